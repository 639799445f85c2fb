"""What a reducer knows of its model: which parameters, and that ranks agree on them.

Knows neither buckets nor hooks. A parameter shared by two modules is one slot.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab import streams
from overlaplab.errors import MismatchError

Group = dist.ProcessGroup


class ParameterInfo:
    """One trainable or frozen parameter and how its gradient travels.

    Args:
        index: position among the slots.
        name: first name in the model.
        parameter: the tensor itself.
        stride: the layout that its gradient has on the wire, equal on all ranks.
    """

    __slots__ = (
        "bucket",
        "handle",
        "in_rows",
        "index",
        "name",
        "parameter",
        "step",
        "stride",
    )

    def __init__(self, index: int, name: str, parameter: nn.Parameter) -> None:
        self.index = index
        self.name = name
        self.parameter = parameter
        self.lay_out(_dense_stride(parameter))
        self.bucket: Any = None  # where it travels now; None while frozen
        self.step = -1  # the last step in which its gradient arrived
        self.handle: Any = None  # of its hook

    def lay_out(self, stride: tuple[int, ...]) -> None:
        self.stride = stride
        self.in_rows = stride == _row_major(tuple(self.parameter.shape))


class ModelParameters:
    """The parameters of a model as they were at construction.

    Args:
        model: any module; every parameter with at least one element gets a slot.
        group: the ranks that must agree.

    Raises:
        ValueError: nothing to train, a sparse or lazy parameter, or one on a device
            that the group cannot reach.
        MismatchError: ranks differ in names, shapes, dtypes or what is frozen.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        _refuse_sparse(model)
        for name, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise ValueError(
                    f"parameter {name} has no shape yet (a lazy module). Run one "
                    "forward before you build the reducer."
                )
        named = [(n, p) for n, p in model.named_parameters() if p.numel()]
        if not any(p.requires_grad for _, p in named):
            raise ValueError(
                f"{type(model).__name__} has no parameter that requires a gradient; "
                "there is nothing to reduce"
            )
        self.slots = tuple(ParameterInfo(i, n, p) for i, (n, p) in enumerate(named))
        self._model = model
        self._group = group
        self._refuse_other_device()
        self._agree()
        self._trees = [(m._parameters, m._modules) for m in model.modules()]
        self._members = tuple(self._walk())

    def trainable(self) -> list[torch.dtype | None]:
        """Each slot's dtype, None while it is frozen: what a plan depends on."""
        return [
            s.parameter.dtype if s.parameter.requires_grad else None for s in self.slots
        ]

    def check_identity(self) -> None:
        """Raise if a parameter or module was replaced, added or removed.

        Hooks sit on parameter objects: one that came later trains on local gradients
        only and the ranks drift apart without a message.
        """
        members = list(self._walk())
        if len(members) == len(self._members) and all(
            map(operator.is_, members, self._members)
        ):
            return
        now = {name: p for name, p in self._model.named_parameters() if p.numel()}
        mine = {slot.name: slot.parameter for slot in self.slots}
        changed = [n for n in {**mine, **now} if now.get(n) is not mine.get(n)]
        if not changed:  # e.g. a module without parameters was added
            self._trees = [(m._parameters, m._modules) for m in self._model.modules()]
            self._members = tuple(self._walk())
            return
        raise RuntimeError(
            f"parameter {changed[0]} is not the object that the reducer was built "
            f"with ({len(changed)} changed since: it was replaced, added or removed). "
            "Change the model first, then build the reducer and the optimizer."
        )

    def broadcast(self) -> None:
        """Give every rank the values of the group's first rank. Blocks."""
        source = dist.get_global_rank(self._group, 0)
        tensors = chain(
            (p.detach() for p in self._model.parameters()), self._model.buffers()
        )
        with torch.no_grad(), streams.annotate("broadcast parameters"):
            # A copy, because ranks may hold one tensor in different memory orders.
            pairs = [(t, t.contiguous()) for t in tensors if t.numel()]
            works = [
                dist.broadcast(_real(sent), source, group=self._group, async_op=True)
                for _, sent in pairs
            ]
            for (tensor, sent), work in zip(pairs, works, strict=True):
                work.wait()
                if sent is not tensor:
                    tensor.copy_(sent)

    def _walk(self) -> Iterator[Any]:
        """Every parameter and child module, by C iterators: runs in each forward."""
        return chain.from_iterable(
            chain(parameters.values(), modules.values())
            for parameters, modules in self._trees
        )

    def _refuse_other_device(self) -> None:
        if dist.get_backend(self._group) != "nccl":
            return
        for slot in self.slots:
            if not slot.parameter.is_cuda:
                raise ValueError(
                    f"parameter {slot.name} is on {slot.parameter.device}, but the "
                    "process group is nccl's. Move the model to ol.device() first."
                )

    def _agree(self) -> None:
        """Compare a digest of names and shapes, and one of memory orders, at once."""
        if is_fake(self.slots[0].parameter):
            return  # no values to compare; all ranks run this same code
        what = _digest(
            (s.name, tuple(s.parameter.shape), s.parameter.dtype, grad)
            for s, grad in zip(self.slots, self.trainable(), strict=True)
        )
        layout = _digest(s.stride for s in self.slots)
        mine = torch.tensor([what, -what, layout, -layout])
        largest = mine.to(self.slots[0].parameter.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        top, bottom, top_layout, bottom_layout = largest.tolist()
        if top != -bottom:
            self._explain_mismatch()
        if top_layout != -bottom_layout:  # the order of rows is common to all
            for slot in self.slots:
                slot.lay_out(_row_major(tuple(slot.parameter.shape)))

    def _explain_mismatch(self) -> None:
        mine = [
            f"{s.name} {tuple(s.parameter.shape)} {s.parameter.dtype} "
            f"{'trains' if s.parameter.requires_grad else 'frozen'}"
            for s in self.slots
        ]
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        longest = max(len(rows) for rows in everyone)
        padded = [[*rows, *["-"] * (longest - len(rows))] for rows in everyone]
        for i, column in enumerate(zip(*padded, strict=True)):
            if len(set(column)) > 1:
                rows = "\n".join(f"  rank {r}: {text}" for r, text in enumerate(column))
                raise MismatchError(
                    f"the ranks' models differ at parameter {i}:\n{rows}\nBuild the "
                    "same model on every rank, then the reducer."
                )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(
            module, nn.Embedding | nn.EmbeddingBag
        ):
            raise ValueError(
                f"module {name or type(module).__name__} makes sparse gradients "
                "(sparse=True), which an all-reduce cannot average. Use sparse=False."
            )


def _digest(rows: Iterable[Any]) -> int:
    """62 bits, so that the negative fits an int64 too."""
    text = "\n".join(map(repr, rows)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own stride where it fills its memory, else that of plain rows."""
    if torch._C._TensorBase.is_contiguous(tensor):
        return tuple(tensor.stride())
    like = torch.empty_like(tensor, device="meta")  # keeps a dense order only
    return tuple(like.stride())


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
