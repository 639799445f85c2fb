"""When units are gathered: hooks that follow the plan of a step, or note the order.

[Note: who may be overwritten]
A unit computes between the two hooks of its forward. In the backward pass autograd runs
the nodes of a graph in the reverse order of their making, so when the gradient of a
unit's output arrives, all that was made behind that output has run: whatever computed
after the unit is done with its weights. At these moments, and at no others, gathers are
launched. No parameter is counted, so frozen and unused ones need nothing of their own.

[Note: the order of a step]
The first step gathers on demand and notes which unit was used when. `plan_step` makes a
plan of it, which is followed as long as each use is the plan's next. A step that runs
otherwise goes on without: what is in its slot is used, the rest is gathered on demand,
and a new plan is made at its end. On demand, ranks first say through the store what
they want, so that they never meet in different gathers. Forwards without gradients,
outside a step, follow the forward part of the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from overlaplab.errors import MismatchError
from overlaplab.techniques.zero.guards import (
    Checks,
    Hook,
    in_backward,
    refuse_old_graph,
    refuse_second_derivatives,
)
from overlaplab.techniques.zero.plan import StepPlan, Use, plan_slots, plan_step
from overlaplab.techniques.zero.ring import Ring, ShardedUnit
from overlaplab.techniques.zero.scatters import Scatters
from overlaplab.techniques.zero.windows import number_of, number_of_node


class Gathering:
    """Hooks on a model and its units that gather, in time, what computes.

    Args:
        model: the whole.
        units: all of it, the rest last.
        ring: their memory.
        scatters: hears what begins to compute, and what goes backward.
        prefetch: uses ahead.
        exchange: (key, text) to every rank's text; ranks call it alike.
        before: called when a forward of the model begins.

    Attributes:
        plan: of the next step, None before one has ended.
        uses: of the open step (or evaluation), equal neighbours once.
        is_open: a step is open: since its first forward with gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ShardedUnit],
        ring: Ring,
        scatters: Scatters,
        prefetch: int,
        exchange: Callable[[str, str], list[str]],
        before: Callable[[], None],
    ) -> None:
        self._units = [unit for unit in units if not unit.is_rest]
        self._rest = next((unit for unit in units if unit.is_rest), None)
        self._ring, self._scatters = ring, scatters
        self._prefetch, self._exchange, self._before = prefetch, exchange, before
        self._slots = plan_slots((), len(self._units), max(1, ring.num_slots))
        ring.place(self._slots)
        self.plan: StepPlan | None = None
        self._followed: StepPlan | None = None
        self._computing: ShardedUnit | None = None
        self._checks = Checks(model, units, self._is_there)
        self._windows = scatters.windows
        self._begin = 0
        self._in_forward = self.is_open = False
        self._num_exchanges = 0
        self.uses: list[Use] = []
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._enter), prepend=True),
            model.register_forward_hook(Hook(self._leave)),
            model.register_forward_hook(Hook(self._interrupted), always_call=True),
        ]
        for unit in self._units:
            pre, post = self._hooks(unit)
            # First of all: other hooks may compute with the weights.
            self._handles += [
                unit.module.register_forward_pre_hook(Hook(pre), prepend=True),
                unit.module.register_forward_hook(Hook(post)),
            ]

    def end_step(self) -> bool:
        """Agree on the next step's plan; whether it is another than the last one."""
        plan = self._followed
        if not self.is_open or not self.uses:
            return False
        if plan and len(self.uses) == len(plan.rows):
            return False
        text = " ".join(f"{_letter(use)}{use.unit}" for use in self.uses)
        self._num_exchanges += 1
        everyone = self._exchange(f"plan {self._num_exchanges}", text)
        if len(set(everyone)) > 1:
            _refuse(
                f"ranks ran step {self._scatters.num_steps} in different orders",
                everyone,
            )
        slots = plan_slots(self.uses, len(self._units), self._ring.num_slots)
        if slots != self._slots:
            self._slots = slots
            self._ring.place(slots)
        names = [unit.name for unit in self._units]
        self.plan = plan_step(self.uses, names, self._prefetch, slots)
        return True

    def close(self) -> None:
        """The step has ended, or was given up."""
        self.is_open = False
        self.uses = []
        self._computes(None)
        self._ring.forget()

    def remove(self) -> None:
        """Take the hooks off."""
        self._checks.remove()
        for handle in self._handles:
            handle.remove()

    # A use: a unit computes.

    def _use(self, unit: ShardedUnit, use: Use) -> None:
        if not self.uses or self.uses[-1] != use or not self._ring.has(unit):
            if not use.again:  # the unit behind may go on with what it computes
                self._scatters.begins(unit)
            self.uses.append(use)
            number, plan = len(self.uses) - 1, self._followed
            if plan and number < len(plan.rows) and plan.rows[number].use == use:
                self._launch(plan, number)
            else:
                self._followed = None
            if not self._ring.has(unit):
                self._agree(unit, use)
                self._gather(unit)
        self._ring.wait(unit)

    def _launch(self, plan: StepPlan, number: int) -> None:
        for index in plan.rows[number].gathers:
            if not self._ring.has(self._units[index]):
                self._gather(self._units[index])

    def _gather(self, unit: ShardedUnit) -> None:
        inside = self._computing
        if inside is not None and inside is not unit and inside.slot == unit.slot:
            raise RuntimeError(
                f"a backward inside the forward of unit {inside.name} would gather "
                f"unit {unit.name} into the same slot, over weights that compute. "
                "Detach what that backward goes through, or give the ring more slots: "
                f"prefetch={self._prefetch + 1} or more."
            )
        self._ring.launch(unit)

    def _agree(self, unit: ShardedUnit, use: Use) -> None:
        """See [Note: the order of a step]."""
        self._num_exchanges += 1
        where = f"use {len(self.uses) - 1} of step {self._scatters.num_steps}"
        wanted = f"{'backward' if use.backward else 'forward'} of {unit.name}, {where}"
        everyone = self._exchange(f"gather {self._num_exchanges}", wanted)
        if len(set(everyone)) > 1:
            _refuse("ranks compute with different units", everyone)

    # Hooks.

    def _enter(self, *_: object) -> None:
        """The model's forward begins, and a step or an evaluation if none is open."""
        self._before()
        begins = not self.is_open
        if begins:
            self.is_open = torch.is_grad_enabled()
            self._followed = self.plan
            self._windows.begin(self.plan is None)
            self.uses = []
            self._ring.forget()
        self._in_forward = True
        self._computes(None)
        if self._rest and not self._ring.has(self._rest):
            self._ring.launch(self._rest)
        if begins and self._followed:  # beside what computes before the first unit
            self._launch(self._followed, 0)
        if self._rest:
            self._ring.wait(self._rest)

    def _leave(self, model: nn.Module, args: Any, out: object) -> None:
        if self._windows.is_open:
            self._windows.check(out)
        if not self.is_open:
            self._ring.drain()
        if self._rest and torch.is_grad_enabled():
            self._refuse_later(self._rest, out)

    def _interrupted(self, *_: object) -> None:
        """The model's forward ended, maybe by an error."""
        self._in_forward = False
        self._computes(None)

    def _computes(self, unit: ShardedUnit | None) -> None:
        if unit is not self._computing:
            self._computing = unit
            self._checks.take_off(unit)

    def _is_there(self, unit: ShardedUnit) -> bool:
        """Whether a module of `unit` may compute now."""
        if in_backward():
            return self._ring.has(unit)
        return self._in_forward and unit in (self._computing, self._rest)

    def _hooks(self, unit: ShardedUnit) -> tuple[Any, Any]:
        def before_forward(*_: object) -> None:
            again = in_backward()  # checkpointing computes it once more
            if again or self._in_forward:
                self._begin = number_of_node()
                self._computes(unit)
                self._use(unit, Use(unit.index, again, again))

        def after_forward(module: nn.Module, args: Any, out: object) -> None:
            self._computes(None)
            if torch.is_grad_enabled():
                made = self._watch(unit, out)
                if self._windows.is_open:
                    numbers = [number_of(tensor.grad_fn) for tensor in made]
                    self._windows.note(unit, self._begin, numbers, in_backward())

        return before_forward, after_forward

    def _watch(self, unit: ShardedUnit, out: object) -> list[Tensor]:
        """Gather `unit` again when the gradient of something in `out` arrives.

        What it only passes on belongs to who made it: its gradient comes when `unit`
        is done, and the unit that made it has just been gathered.

        Returns:
            What it watches.
        """
        made_in = self._scatters.num_steps

        def before_backward(_: Tensor) -> None:
            if not self._in_forward:  # checkpointing stops a forward in the middle
                self._computes(None)
            self._windows.check_backward()
            refuse_second_derivatives(unit)
            refuse_old_graph(unit, made_in, self._scatters.num_steps)
            if unit.is_lookup:
                self._scatters.begins(unit)
            else:
                paused = self._scatters.is_paused()
                self._use(unit, Use(unit.index, True, False, paused))
                self._scatters.goes_backward(unit)

        made = list(_made(out, self._begin))
        for tensor in made:
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]
        return made

    def _refuse_later(self, rest: ShardedUnit, out: object) -> None:
        """The rest is not gathered again: its weights are those of this step."""
        made_in = self._scatters.num_steps

        def before_backward(_: Tensor) -> None:
            refuse_old_graph(rest, made_in, self._scatters.num_steps)

        for tensor in _made(out):
            tensor.register_hook(before_backward)  # type: ignore[no-untyped-call]


def _made(out: object, begin: int = 0) -> Iterator[Tensor]:
    """Tensors in `out` whose nodes were made since number `begin`."""
    for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
        node = tensor.grad_fn if isinstance(tensor, Tensor) else None
        if node is not None and number_of(node) >= begin:
            yield tensor


def _letter(use: Use) -> str:
    if use.paused:
        return "n"  # no_sync
    return "a" if use.again else "b" if use.backward else "f"


def _refuse(what: str, everyone: list[str]) -> None:
    rows = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(everyone))
    raise MismatchError(
        f"{what}:\n{rows}\nWhat is gathered must not depend on a rank's own data: put "
        "the units between which ranks choose into one unit, or into none (units=[])."
    )
