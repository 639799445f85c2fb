"""What must not be done with a sharded model, refused where it is tried.

Outside its unit's forward and backward a parameter's memory has another unit's values:
a module that computed with it, or a state dict of it, would be wrong without a sign.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overlaplab.techniques.hooks import is_watched
from overlaplab.techniques.model_facts import ModelFacts, marks_of
from overlaplab.techniques.zero.ring import ShardedUnit


class Checks:
    """Hooks before the forward of modules: the weights of their unit must be there.

    A hook costs its module microseconds in each step, where launches bind. So a unit
    that computes, whose weights are there, has none meanwhile.

    Args:
        model: sharded.
        units: all of it.
        is_there: whether a unit's weights are there for a module that computes now.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        is_there: Callable[[ShardedUnit], bool],
    ) -> None:
        self._is_there = is_there
        self._off: ShardedUnit | None = None
        self._hooks: dict[ShardedUnit, list[_Placed]] = {unit: [] for unit in units}
        unit_of = {id(i.parameter): unit for unit in units for i in unit.parameters}
        for name, module in model.named_modules():
            owned = {unit_of.get(id(p)) for p in module._parameters.values()}
            for unit in owned - {None}:
                assert unit is not None
                check = partial(self._check, unit, name or type(module).__name__)
                key = module.register_forward_pre_hook(check).id
                self._hooks[unit].append((module._forward_pre_hooks, key, check))

    def take_off(self, unit: ShardedUnit | None) -> None:
        """`unit` computes, or none: every other one has its hooks."""
        if self._off is not None:
            for hooks, key, check in self._hooks[self._off]:
                hooks[key] = check
        if unit is not None:
            for hooks, key, _ in self._hooks[unit]:
                hooks.pop(key, None)
        self._off = unit

    def remove(self) -> None:
        """Take all of them off for good."""
        for placed in self._hooks.values():
            for hooks, key, _ in placed:
                hooks.pop(key, None)
            placed.clear()

    def _check(self, unit: ShardedUnit, name: str, *_: object) -> None:
        if torch.compiler.is_compiling():
            return  # the unit's own hooks are not compiled
        if not self._is_there(unit):
            raise RuntimeError(
                f"module {name} computes while the weights of its unit {unit.name} are "
                "not gathered. Call the model itself, whose forward gathers them; a "
                "module that is used by itself needs to be a unit: "
                "Zero3(model, units=[...])."
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()


_Placed = tuple[dict[int, Callable[..., Any]], int, Callable[..., Any]]


class Guards:
    """Hooks on state dicts and optimizers, and a look at where parameters are.

    Args:
        model: sharded.
        units: all of it.
        is_sending: whether gradients of the open step are on their way.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        is_sending: Callable[[], bool],
    ) -> None:
        self._parameters = [info for unit in units for info in unit.parameters]
        self._tensors = [info.parameter for info in self._parameters]
        self._ids = set(map(id, self._tensors))
        self._pieces = {id(p) for u in units for row in u.rows for p in row.pieces}
        self._is_sending = is_sending
        self._lifted = False
        self._handles: list[Any] = []
        module: Any
        for module in model.modules():
            for saving in (
                module.register_state_dict_pre_hook,
                module.register_load_state_dict_pre_hook,
            ):
                self._handles.append(saving(self._refuse_state))
        self._handles.append(_before_every_optimizer(self._refuse_optimizer))
        self.note_places()

    def note_places(self) -> None:
        """Parameters are where they should be."""
        self._marks = marks_of(self._tensors)

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter was written, or has other memory."""
        marks = marks_of(self._tensors)
        if marks != self._marks:
            same = [a == b for a, b in zip(marks, self._marks, strict=True)]
            at = same.index(False)
            name = self._parameters[at].name
            if marks[at][1] == self._marks[at][1]:
                raise RuntimeError(
                    f"parameter {name} was written in place, in its module's forward "
                    "or outside: that is lost, because its values are in shards. "
                    "Change zero.shards() between steps, or what an optimizer does."
                )
            raise RuntimeError(
                f"parameter {name} is no longer a view of gathered memory: .data was "
                "set, or the model was moved or cast, after it was sharded. Change the "
                "model first, then build Zero3 and the optimizer."
            )

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """State dicts are allowed in this block."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            if not self._ids.isdisjoint(map(id, group["params"])):
                raise RuntimeError(
                    f"{name}.step() over the parameters of a sharded model, which get "
                    f"no gradients. Build it over what does: {name}(zero.shards())."
                )
        if not self._is_sending():
            return
        for group in optimizer.param_groups:
            if not self._pieces.isdisjoint(map(id, group["params"])):
                raise RuntimeError(
                    f"{name}.step() before zero.wait(): gradients "
                    "are on their way, and the shards have none yet. Call zero.wait() "
                    "between loss.backward() and optimizer.step()."
                )

    def _refuse_state(self, module: nn.Module, *_: object) -> None:
        if not self._lifted:
            raise RuntimeError(
                f"the state dict of a sharded {type(module).__name__} has no values "
                "on any rank. On every rank, call zero.full_state_dict() or "
                "zero.checkpoint() to save, and zero.load_full_state_dict() or "
                "zero.load_checkpoint() to load."
            )


def _before_every_optimizer(refuse: Callable[[torch.optim.Optimizer], None]) -> Any:
    """Call `refuse` before each step of any optimizer, as long as its owner lives."""
    method = weakref.WeakMethod(refuse)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (alive := method()) is not None:
            alive(optimizer)

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(refuse.__self__, handle.remove)  # type: ignore[attr-defined]
    return handle


class Hook:
    """A hook that is not compiled, on a module that is not copied."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self._fn = fn

    def __call__(self, *args: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            _call_uncompiled(self._fn, *args)
        else:
            self._fn(*args)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()


def _call(fn: Callable[..., None], *args: object) -> None:
    fn(*args)


# Imports torch._dynamo when it is called: seconds that others need not wait.
_call_uncompiled = torch._disable_dynamo(_call)  # type: ignore[attr-defined]


def refuse_copy() -> NoReturn:
    """By copy.deepcopy, pickle or torch.save."""
    raise TypeError(
        "a sharded model cannot be copied or pickled: it has no values on any rank. "
        "Load zero.full_state_dict() into a model that is not sharded."
    )


def in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() >= 0


def refuse_model(model: nn.Module, facts: ModelFacts) -> None:
    """One that writes its weights, or that somebody else reduces or shards."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(
            module, nn.Embedding | nn.EmbeddingBag
        ):
            raise ValueError(
                f"module {name or type(module).__name__} has max_norm="
                f"{module.max_norm}: its forward writes its weight, and what is "
                "written to gathered values is lost. Use max_norm=None."
            )
    for info in facts.parameters:
        if is_watched(info):
            raise ValueError(
                f"parameter {info.name} has a reducer already, or is sharded. Call its "
                "remove() first."
            )


def refuse_second_derivatives(unit: ShardedUnit) -> None:
    """A graph of the backward would save weights that are gone when it is used."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"the backward of unit {unit.name} is to be differentiated "
            "(create_graph=True), but its weights are not kept. Use a model that is "
            "not sharded for second derivatives."
        )


def refuse_old_graph(unit: ShardedUnit, made_in: int, now: int) -> None:
    """Weights may have changed since the forward."""
    if made_in != now:
        raise RuntimeError(
            f"a backward in step {now} reached unit {unit.name} in a graph of step "
            f"{made_in}, whose weights are gone. Run every backward of a step before "
            "its zero.wait()."
        )


def refuse_no_weights(unit: ShardedUnit, gradient: Tensor | None) -> None:
    """The unit went backward and no hook on its outputs was called."""
    if gradient is not None:
        raise RuntimeError(
            f"unit {unit.name} got gradients without its weights: none of the tensors "
            "that its forward returned was on the way of the backward pass. Return "
            "every tensor that reaches the loss, in lists, tuples or dicts."
        )
