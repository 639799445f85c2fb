"""A model with its blocks cut out: who calls what with which inputs, and what is left.

The copy that `cut` makes shares parameters with the model and nothing else: no hook,
no gradient, no buffer. Each block is a `Stub`, which asks its book what to do:
`Looking` lets one block of each kind run and notes calls; `Marking`, of around.py,
gives outputs of their size. Knows no policy.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.finding import (
    HIDDEN,
    call_spec,
    counters,
    hides_tensors,
    likeness,
)
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.policies import BATCH_NORM


@dataclass(eq=False)
class Kind:
    """Calls that cost the same.

    Args:
        name: of the first block.
        block: its copy, to be measured.
        args, kwargs: of the call, detached; tensors as large as the model's.
        needs_grad: of each tensor among the inputs.
        autocast: device type, dtype, whether it was on.
        outputs: stand-ins of the outputs' leaves, as far as they are tensors.
        tree: how outputs are nested.
        obstacle: why it is not planned; "" if it is.
        writes: what its forward changes, which must not happen twice.
        gradients: of its outputs, while it is timed.
    """

    name: str
    block: nn.Module
    args: Any
    kwargs: Any
    needs_grad: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    outputs: list[Any] = field(default_factory=list)
    tree: Any = None
    obstacle: str = ""
    writes: str = ""
    gradients: list[Tensor] = field(default_factory=list)

    def inputs(self) -> tuple[Any, Any]:
        """Fresh leaves on the memory of the first call's inputs."""
        leaves, tree = pytree.tree_flatten((self.args, self.kwargs))
        flags = iter(self.needs_grad)
        fresh = [
            leaf.detach().requires_grad_(next(flags))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(fresh, tree)
        return args, kwargs


class NotCopiedError(ValueError):
    """A model that has no copy, on which things could be tried."""


class Stub(nn.Module):
    """Stands where a block stood. Its attributes are the block's, of a copy.

    Args:
        name: of the block.
        original: the block, of the model itself.
        copier: makes the copy, once it is asked for.
    """

    def __init__(self, name: str, original: nn.Module, copier: _Copier) -> None:
        super().__init__()
        self.__dict__ |= {"name": name, "original": original, "copier": copier}
        self.__dict__["book"] = None

    @property
    def block(self) -> nn.Module:
        """The copy."""
        copier: _Copier = self.__dict__["copier"]
        return copier.copy(self.__dict__["original"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["copier"].copy(self.__dict__["original"]), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["book"].call(self, args, kwargs)


def cut(
    model: nn.Module, blocks: Mapping[str, nn.Module], meter: Meter
) -> tuple[nn.Module, dict[str, Stub]]:
    """A copy of `model` with a stub for each block; blocks are copied when asked for.

    Raises:
        NotCopiedError: the model cannot be copied.
    """
    copier = _Copier(type(model).__name__, meter)
    stubs = {name: Stub(name, block, copier) for name, block in blocks.items()}
    for name, block in blocks.items():
        copier.memo[id(block)] = stubs[name]
    inside = {id(block) for block in blocks.values()}
    skeleton = copier.copy(model, inside)
    return skeleton, stubs


class _Copier:
    """Copies modules, each once; parameters are shared with the model."""

    def __init__(self, model_name: str, meter: Meter) -> None:
        self.memo: dict[int, Any] = {}
        self._blocks: dict[int, nn.Module] = {}
        self._model_name = model_name
        self._meter = meter

    def copy(self, module: nn.Module, without: Set[int] = frozenset()) -> nn.Module:
        """The copy of `module`.

        Args:
            without: ids of modules in it that have a stand-in in the memo.
        """
        if id(module) in self._blocks:
            return self._blocks[id(module)]
        self._adopt(module, set(without))
        stub = self.memo.pop(id(module), None)
        try:
            copied = copy.deepcopy(module, self.memo)
        except (TypeError, RuntimeError) as error:
            raise NotCopiedError(
                f"{self._model_name} cannot be copied ({error}), and a planner tries "
                "things on a copy. Keep what has no copy (files, results that are not "
                "parameters) outside of the model"
            ) from error
        if stub is not None:
            self.memo[id(module)] = stub
        self._blocks[id(module)] = _without_hooks(copied)
        return copied

    def _adopt(self, module: nn.Module, seen: set[int]) -> None:
        """Let the memo have the tensors of `module` and its children."""
        if id(module) in seen:
            return
        seen.add(id(module))
        meter, memo = self._meter, self.memo
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                shared = meter.adopt(parameter.detach())
                memo[id(parameter)] = nn.Parameter(shared, parameter.requires_grad)
        plain = [v for v in vars(module).values() if isinstance(v, Tensor)]
        for tensor in [*module._buffers.values(), *plain]:
            if tensor is not None and id(tensor) not in memo:
                adopted = meter.adopt(tensor.detach())
                memo[id(tensor)] = adopted.clone() if meter.computes else adopted
        for child in module.children():
            self._adopt(child, seen)


def _without_hooks(module: nn.Module) -> nn.Module:
    """Hooks of reducers and recorders are not for copies.

    Those of torch.nn.utils (weight_norm, spectral_norm) are: they compute the weights.
    """
    for inner in module.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            of_inner = getattr(inner, hooks)
            for key, hook in list(of_inner.items()):
                if not type(hook).__module__.startswith("torch.nn.utils."):
                    del of_inner[key]
        inner.__dict__.pop("forward", None)
    return module


class Looking:
    """Runs one block of each kind; notes calls."""

    def __init__(self, device_type: str) -> None:
        self.kinds: dict[Hashable, Kind] = {}
        self.calls: list[tuple[str, Kind]] = []  # in the order of the forward
        self._device_type = device_type
        self._likeness: dict[str, Hashable] = {}

    def counts(self) -> Counter[str]:
        """How often each block was called."""
        return Counter(name for name, _ in self.calls)

    def call(self, stub: Stub, args: Any, kwargs: Any) -> Any:
        name = stub.name
        if name not in self._likeness:
            self._likeness[name] = likeness(stub.__dict__["original"])
        autocast = (
            self._device_type,
            torch.get_autocast_dtype(self._device_type),
            torch.is_autocast_enabled(self._device_type),
        )
        key = self._likeness[name], call_spec(args, kwargs), autocast
        kind = self.kinds.get(key)
        if kind is None:
            kind = self.kinds[key] = _try(name, stub.block, args, kwargs, autocast)
        self.calls.append((name, kind))
        leaves = [_stand_in(leaf) for leaf in kind.outputs]
        return pytree.tree_unflatten(leaves, kind.tree)


def _try(name: str, block: nn.Module, args: Any, kwargs: Any, autocast: Any) -> Kind:
    """Run a block once, and see what it does to its inputs and buffers."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    held_args, held_kwargs = pytree.tree_unflatten(
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
    )
    needs_grad = tuple(t.requires_grad for t in inputs)
    kind = Kind(name, block, held_args, held_kwargs, needs_grad, autocast)
    before = [t._version for t in inputs]
    buffers = _counted_buffers(block)
    versions = [b._version for b in buffers.values()]
    plain = counters(block)
    outputs, kind.tree = pytree.tree_flatten(block(*args, **kwargs))
    kind.outputs = [
        o.detach().requires_grad_(o.requires_grad) if isinstance(o, Tensor) else o
        for o in outputs
    ]
    if [t._version for t in inputs] != before:
        kind.obstacle = "it writes one of its inputs"
    tensors = [o for o in outputs if isinstance(o, Tensor)]
    memory = {t.untyped_storage()._cdata for t in inputs}
    if any(t.untyped_storage()._cdata in memory for t in tensors):
        kind.obstacle = "one of its outputs is the memory of an input"
    if not any(t.requires_grad for t in tensors):
        kind.obstacle = "none of its outputs needs a gradient"
    if hidden := [type(o).__name__ for o in (*leaves, *outputs) if hides_tensors(o)]:
        kind.obstacle = f"it takes or returns a {hidden[0]}, {HIDDEN}"
    if isinstance(block, torch.jit.ScriptModule):
        kind.obstacle = "it is scripted, and nothing can stand before its forward"
    for (path, buffer), version in zip(buffers.items(), versions, strict=True):
        if buffer._version != version:
            kind.writes = f"the buffer {path}"
    if not kind.obstacle and (counted := counters(block)) != plain:
        block(*args, **kwargs)  # what is only set in a first forward may stay
        if changed := [k for k, v in counters(block).items() if v != counted.get(k)]:
            kind.writes = f"the attribute {changed[0]}"
    return kind


def _counted_buffers(block: nn.Module) -> dict[str, Tensor]:
    """Buffers that nobody watches over: batch norms' statistics count once anyway."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in block.named_modules()
        if not isinstance(module, BATCH_NORM)
        for name, buffer in module.named_buffers(recurse=False)
    }


def _stand_in(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    made = torch.empty_like(leaf)
    if leaf.is_floating_point():
        made.normal_() if leaf.numel() else None
    else:
        made.copy_(leaf)
    # No leaf: a block may write into it.
    return made.requires_grad_().clone() if leaf.requires_grad else made
