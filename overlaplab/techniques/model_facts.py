"""What a technique knows of its model: which parameters, and that ranks agree on them.

Knows neither buckets nor hooks. A parameter shared by two modules is one parameter.
"""

from __future__ import annotations

import hashlib
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.nn.parallel import DistributedDataParallel

from overlaplab import streams
from overlaplab.errors import MismatchError

Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True, eq=False)
class ParameterInfo:
    """One parameter and how its gradient travels.

    Args:
        index: position among the model's parameters.
        name: its first name in the model.
        parameter: the tensor itself.
        stride: the layout that its gradient has on the wire, equal on all ranks.
        in_rows: whether that is row-major, as a fresh contiguous tensor has it.
    """

    index: int
    name: str
    parameter: nn.Parameter
    stride: tuple[int, ...]
    in_rows: bool


class ModelFacts:
    """The parameters of a model as they were at construction; ranks agree on them.

    Args:
        model: any module. Parameters without an element are left out.
        group: the ranks that must agree. Collective: all of them build theirs.

    Attributes:
        parameters: in the model's order.
        tensors: the same, the tensors alone.

    Raises:
        TypeError: `model` is no module.
        ValueError: nothing to train; wrapped in DistributedDataParallel; a parameter
            or buffer that is a DTensor or cannot be sent (sparse, lazy, meta,
            overlapping, int16, on a device that the group cannot reach).
        MismatchError: ranks differ in names, shapes, dtypes or what is frozen; or in
            buffers.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        _refuse_model(model)
        named = [(n, p) for n, p in model.named_parameters() if p.numel()]
        for name, tensor in chain(named, model.named_buffers()):
            _refuse_tensor(name, tensor, dist.get_backend(group))
        if not any(p.requires_grad for _, p in named):
            raise ValueError(
                f"{type(model).__name__} has no parameter that requires a gradient; "
                "there is nothing to reduce"
            )
        self._model = model
        self._group = group
        strides = [_dense_stride(p) for _, p in named]
        rows = [_row_major(p.shape) for _, p in named]
        self.tensors = [parameter for _, parameter in named]
        facts = [
            f"{name} {tuple(p.shape)} {p.dtype} "
            f"{'trains' if p.requires_grad else 'frozen'}"
            for name, p in named
        ]
        if not self._agree(facts + self._buffer_rows(), strides):
            strides = rows  # row-major is possible everywhere
        self.parameters = tuple(
            ParameterInfo(i, name, parameter, strides[i], strides[i] == rows[i])
            for i, (name, parameter) in enumerate(named)
        )
        self._look_around()

    def trains(self) -> list[bool]:
        """Whether each parameter requires a gradient now."""
        return list(map(_requires_grad, self.tensors))

    def dtypes(self) -> list[torch.dtype]:
        """Each parameter's, now."""
        return list(map(_dtype, self.tensors))

    @property
    def num_bytes(self) -> int:
        """Of the gradients of what trains."""
        trains = [p for p in self.tensors if p.requires_grad]
        return sum(p.numel() * p.element_size() for p in trains)

    def check_identity(self) -> None:
        """Raise RuntimeError if a parameter was replaced, added or removed.

        Hooks sit on parameter objects: one that came later trains on local gradients
        only, and the ranks drift apart without a message.
        """
        # In C from end to end: it runs in each step, over every module.
        if sum(map(len, self._tables)) == len(self._members) and all(
            map(operator.is_, self._walk(), self._members)
        ):
            return
        now = {name: p for name, p in self._model.named_parameters() if p.numel()}
        mine = {info.name: info.parameter for info in self.parameters}
        changed = [n for n in {**mine, **now} if now.get(n) is not mine.get(n)]
        if not changed:  # e.g. a module without parameters was added
            self._look_around()
            return
        raise RuntimeError(
            f"parameter {changed[0]} is not the object that the reducer was built "
            f"with ({len(changed)} changed since: it was replaced, added or removed). "
            "Change the model first, then build the reducer and the optimizer."
        )

    def broadcast(
        self,
        only: Sequence[Tensor] | None = None,
        *,
        parameters: bool = True,
        source: int = 0,
    ) -> None:
        """Give all ranks the buffers (and parameters) of the `source`. Blocks.

        Args:
            only: of these; None: of all.
            parameters: False: buffers alone.
            source: a rank of the group.
        """
        source = dist.get_global_rank(self._group, source)
        what = "parameters" if parameters else "buffers"
        tensors: Iterable[Tensor] = self._model.buffers()
        if only is not None:
            tensors = [tensor.detach() for tensor in only]
        elif parameters:
            tensors = chain((p.detach() for p in self._model.parameters()), tensors)
        with torch.no_grad(), streams.annotate(f"broadcast {what}"):
            # A copy, because ranks may hold one tensor in different memory orders.
            pairs = [(t, t.contiguous()) for t in tensors if t.numel()]
            works = [
                dist.broadcast(
                    _as_moved(sent), source, group=self._group, async_op=True
                )
                for _, sent in pairs
            ]
            for (tensor, sent), work in zip(pairs, works, strict=True):
                work.wait()
                if sent is not tensor:
                    tensor.copy_(sent)
                elif not tensor.is_inference():  # autograd hears of a copy alone
                    torch.autograd.graph.increment_version(tensor)

    def _look_around(self) -> None:
        modules = list(self._model.modules())
        self._tables: list[dict[str, Any]] = [m._parameters for m in modules]
        self._tables += [m._modules for m in modules]
        self._members = tuple(self._walk())

    def _walk(self) -> Iterator[Any]:
        """Every parameter and child module."""
        return chain.from_iterable(map(_values, self._tables))

    def check_buffers(self) -> None:
        """Raise MismatchError if those of other ranks differ by now. Collective."""
        self._agree(self._buffer_rows(), [])

    def _buffer_rows(self) -> list[str]:
        named = self._model.named_buffers()
        return [
            f"buffer {name} {tuple(b.shape)} {b.dtype}"
            for name, b in named
            if b.numel()
        ]

    def _agree(self, rows: list[str], strides: list[tuple[int, ...]]) -> bool:
        """Whether ranks have equal memory orders; raises if they have other rows."""
        first = self.tensors[0]
        if is_fake(first):
            return True  # no values to compare; all ranks run this same code
        what, layout = _digest(rows), _digest(map(str, strides))
        # One MAX finds the largest of each and, by the negatives, the smallest.
        largest = torch.tensor([what, -what, layout, -layout]).to(first.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        top, bottom, top_layout, bottom_layout = largest.tolist()
        if top != -bottom:
            self._explain_mismatch(rows)
        return bool(top_layout == -bottom_layout)

    def _explain_mismatch(self, mine: list[str]) -> None:
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        columns = zip_longest(*everyone, fillvalue="-")
        for i, column in enumerate(columns):
            if len(set(column)) > 1:
                rows = "\n".join(f"  rank {r}: {text}" for r, text in enumerate(column))
                if all(text.startswith(("buffer ", "-")) for text in column):
                    raise MismatchError(
                        f"the ranks' models differ in their buffers:\n{rows}\nRegister "
                        "the same buffers on every rank."
                    )
                raise MismatchError(
                    f"the ranks' models differ at parameter {i}:\n{rows}\nBuild the "
                    "same model on every rank, then the reducer."
                )


_requires_grad = operator.attrgetter("requires_grad")
_dtype = operator.attrgetter("dtype")
_values = operator.methodcaller("values")  # a scripted module's table is no dict
_version = operator.attrgetter("_version")


def marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """One for each, which changes with a write and where `.data =` swaps the memory."""
    place: Callable[[Tensor], int] = Tensor.data_ptr
    if tensors and isinstance(tensors[0], FakeTensor):
        place = _place_of_fake
    return list(zip(map(_version, tensors), map(place, tensors), strict=True))


def _place_of_fake(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs, for collectives that know none. The same memory."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_moved(tensor: Tensor) -> Tensor:
    """For collectives that only move: float8, which gloo does not know, as bytes."""
    return tensor.view(torch.uint8) if _is_float8(tensor) else as_real(tensor)


def _is_spread(tensor: Tensor) -> bool:
    """Whether it is a DTensor. That takes a second to load; who made one has."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def _is_float8(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements share memory: some dimension is walked without moving."""
    return any(
        size > 1 and step == 0
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _refuse_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected a torch.nn.Module"
        )
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{f'module {name}' if name else 'model'} is wrapped in "
                "DistributedDataParallel, which averages gradients itself. Take the "
                "module inside (its .module), or use DDP alone."
            )
        if getattr(module, "sparse", False) and isinstance(
            module, nn.Embedding | nn.EmbeddingBag
        ):
            raise ValueError(
                f"module {name or type(module).__name__} makes sparse gradients "
                "(sparse=True), which an all-reduce cannot average. Use sparse=False."
            )
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name} has no shape yet (a lazy module). Run one forward "
                "before you build the reducer."
            )


# NCCL and gloo have no such type.
_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)


def _refuse_tensor(name: str, tensor: Tensor, backend: str) -> None:
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    what = f"{kind} {name}"
    if _is_spread(tensor):
        raise ValueError(
            f"{what} is a DTensor: what made it one (fully_shard, parallelize_module) "
            "spreads it over the ranks and takes care of its gradient. Use one of the "
            "two."
        )
    if tensor.is_meta and not is_fake(tensor):
        raise ValueError(
            f"{what} is on the meta device: it has no values to agree on. Materialise "
            "the model first (model.to_empty(device=...), then initialise it)."
        )
    if tensor.is_inference():
        raise ValueError(
            f"{what} was made in torch.inference_mode() and cannot be trained. Build "
            "the model outside of it."
        )
    if tensor.is_nested or tensor.is_quantized:
        how = "nested" if tensor.is_nested else "quantized"
        raise ValueError(
            f"{what} is {how}, which no process group sends. Register plain tensors "
            "instead."
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} has layout {tensor.layout}; make it dense first.")
    if overlaps_itself(tensor):
        raise ValueError(
            f"{what} is expanded: elements share memory, which a broadcast cannot "
            f"write. Register {name.rpartition('.')[2]}.clone() instead."
        )
    if tensor.dtype in _NOT_SENT:
        raise ValueError(
            f"{what} is {tensor.dtype}, which no process group sends. Use int32."
        )
    if tensor.requires_grad and _is_float8(tensor):
        raise ValueError(
            f"{what} is {tensor.dtype}, which process groups do not sum. Freeze it, or "
            "train it in bfloat16."
        )
    if backend == "nccl" and not tensor.is_cuda:
        raise ValueError(
            f"{what} is on {tensor.device}, but the process group is nccl's. Move the "
            "model to ol.device() first."
        )


def _digest(rows: Iterable[str]) -> int:
    """62 bits, so that the negative fits an int64 too."""
    text = "\n".join(rows).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 2


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own stride where it fills its memory, else that of plain rows."""
    if torch._C._TensorBase.is_contiguous(tensor):
        return tuple(tensor.stride())
    like = torch.empty_like(tensor, device="meta")  # keeps a dense order only
    return tuple(like.stride())


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())
