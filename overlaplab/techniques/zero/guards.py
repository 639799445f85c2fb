"""What must not be done with a sharded model, refused where it is tried.

Outside its unit's forward and backward a parameter's memory has another unit's values:
a module that computed with it, or a state dict of it, would be wrong without a sign.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from overlaplab.techniques.arrivals import watcher_of
from overlaplab.techniques.model_facts import ModelFacts, marks_of
from overlaplab.techniques.zero.ring import ShardedUnit


class Guards:
    """Hooks on the modules that own parameters, and on their state dicts.

    Args:
        model: sharded.
        units: all of it.
        is_there: whether a unit's weights are there for a module that computes now.
        is_sending: whether gradients of the open step are on their way.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        is_there: Callable[[ShardedUnit], bool],
        is_sending: Callable[[], bool],
    ) -> None:
        self._parameters = [info for unit in units for info in unit.parameters]
        self._tensors = [info.parameter for info in self._parameters]
        self._pieces = {id(p) for u in units for row in u.rows for p in row.pieces}
        self._is_there, self._is_sending = is_there, is_sending
        self._lifted = False
        unit_of = {id(i.parameter): unit for unit in units for i in unit.parameters}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            for saving in (
                module.register_state_dict_pre_hook,
                module.register_load_state_dict_pre_hook,
            ):
                self._handles.append(saving(self._refuse_state))
            owned = {unit_of.get(id(p)) for p in module._parameters.values()}
            for unit in owned - {None}:
                assert unit is not None
                hook = self._check(unit, name or type(module).__name__)
                self._handles.append(module.register_forward_pre_hook(hook))
        self._handles.append(_before_every_optimizer(self._refuse_optimizer))
        self.note_places()

    def note_places(self) -> None:
        """Parameters are where they should be."""
        self._places = [place for _, place in marks_of(self._tensors)]

    def check_places(self) -> None:
        """Raise RuntimeError if somebody gave a parameter other memory."""
        places = [place for _, place in marks_of(self._tensors)]
        if places != self._places:
            same = [a == b for a, b in zip(places, self._places, strict=True)]
            name = self._parameters[same.index(False)].name
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

    def _check(self, unit: ShardedUnit, name: str) -> Callable[..., None]:
        def check(*_: object) -> None:
            if not self._is_there(unit):
                raise RuntimeError(
                    f"module {name} computes while the weights of its unit "
                    f"{unit.name} are not gathered. Call the model itself, whose "
                    "forward gathers them; a module that is used by itself needs to "
                    "be a unit: Zero3(model, units=[...])."
                )

        return check

    def _refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_sending():
            return
        for group in optimizer.param_groups:
            if not self._pieces.isdisjoint(map(id, group["params"])):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() before zero.wait(): gradients "
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


def in_backward() -> bool:
    """Whether a backward pass is running on this thread."""
    return torch._C._current_graph_task_id() >= 0


def refuse_second(facts: ModelFacts) -> None:
    """A model that somebody else reduces or shards."""
    for info in facts.parameters:
        if watcher_of(info) is not None:
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


class Windows:
    """When units were in their forward, by the numbers that autograd gives its nodes.

    A weight that is used elsewhere, as in `F.linear(x, embedding.weight)`, is found in
    the graph of the output; one that is frozen, or has no graph, is not.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[ShardedUnit, str, list[range]]] = {}

    def note(self, unit: ShardedUnit, begin: int) -> None:
        """Its forward made the nodes from `begin` to now."""
        for info in unit.parameters:
            entry = self._of.setdefault(id(info.parameter), (unit, info.name, []))
            entry[2].append(range(begin, number_of_node()))

    def check(self, out: object) -> None:
        """Raise RuntimeError if a unit's weight was used outside its forward."""
        found = [t.grad_fn for t in tree_leaves(out) if isinstance(t, Tensor)]
        seen: set[Any] = set(found)
        while found:
            node: Any = found.pop()
            for user, _ in () if node is None else node.next_functions:
                if id(getattr(user, "variable", None)) in self._of:
                    unit, name, windows = self._of[id(user.variable)]
                    if not any(node._sequence_nr() in window for window in windows):
                        raise RuntimeError(
                            f"parameter {name} is used outside the forward of its unit "
                            f"{unit.name}, where its values are gone. Give units "
                            "without it: Zero3(model, units=[...])."
                        )
                elif user not in seen:
                    seen.add(user)
                    found.append(user)


number_of_node = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
