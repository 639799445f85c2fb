"""When gradients leave: the hooks of parameters, in an order that ranks share.

A unit's gradients are sent when all of them have arrived and all units before it in the
order are sent; what is missing then is sent as zeros, at the latest at the step's end.
Each backward of a step is sent by itself, except inside `no_sync`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.model_facts import ModelFacts
from overlaplab.techniques.zero.gathering import Gathering
from overlaplab.techniques.zero.guards import refuse_no_weights
from overlaplab.techniques.zero.plan import StepPlan
from overlaplab.techniques.zero.ring import ShardedUnit
from overlaplab.techniques.zero.scatters import Scatters
from overlaplab.techniques.zero.units import REST


class Sending:
    """Counts gradients, and gives what is complete to `Scatters`.

    Args:
        facts: of the model.
        units: all of it, the rest last.
        scatters: how gradients leave.
        gathering: knows which units went backward with their weights, and the step.
    """

    def __init__(
        self,
        facts: ModelFacts,
        units: Sequence[ShardedUnit],
        scatters: Scatters,
        gathering: Gathering,
    ) -> None:
        self._facts, self._units = facts, units
        self._scatters, self._gathering = scatters, gathering
        self._arrivals = Arrivals(facts.parameters, self._backward_begins, self._full)
        self._sends = False  # the last backward does
        self.follow(None)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only add up."""
        with self._arrivals.pausing():
            yield

    def follow(self, plan: StepPlan | None) -> None:
        """Send in the plan's order; without one, the last unit first. The rest last."""
        order = (
            list(range(len(self._units)))[::-1] if plan is None else plan.scatter_order
        )
        rest = [unit for unit in self._units if unit.name == REST]
        units = [self._units[index] for index in order]
        self._order = [unit for unit in units if unit not in rest] + rest
        self._arrivals.plan(
            [[i.index for i in unit.parameters] for unit in self._order]
        )

    def forward_begins(self) -> None:
        """Refuse a broken step; outside one, look again at what trains."""
        self.refuse_broken("this forward")
        if not self._gathering.is_open:
            self._arrivals.reset()

    @property
    def is_open(self) -> bool:
        """Whether gradients have arrived that were not handed over."""
        return self._arrivals.is_open

    def finish(self) -> None:
        """Send what has not been, and hand over this rank's part of the averages."""
        if self._arrivals.windows:
            raise RuntimeError("zero.wait() inside no_sync(); leave the block first")
        self.refuse_broken("zero.wait()")
        self._arrivals.announce_rest()
        self._scatters.finish()
        self._scatters.hand_over(self._facts.parameters)

    def close(self) -> None:
        """The step has ended, or was given up."""
        self._scatters.clear()
        self._arrivals.reset()
        self._sends = False

    def remove(self) -> None:
        """Take the hooks off."""
        self._arrivals.remove()

    def refuse_broken(self, what: str) -> None:
        """Raise RuntimeError if a backward of the open step did not end."""
        if self._arrivals.is_open and self._arrivals.backward_failed:
            raise RuntimeError(
                f"a backward of step {self._gathering.num_steps} raised before it "
                f"ended: {self._scatters.num_launched} reduce-scatters were sent, so "
                f"{what} cannot go on. Call zero.abandon() on every rank."
            )

    def _backward_begins(self) -> None:
        """The first gradient of a backward is here."""
        if self._arrivals.is_open:
            self.refuse_broken("this backward")
            if self._sends:  # one more of this step: the one before sends what is left
                self._arrivals.announce_rest()
                self._arrivals.reset()
        self._sends = not self._arrivals.paused

    def _full(self, position: int) -> None:
        """Unit `position` of the order, and all before it, have their gradients."""
        unit = self._order[position]
        if unit.name != REST and unit not in self._gathering.went_backward:
            for info in unit.parameters:
                refuse_no_weights(unit, info.parameter.grad)
        self._scatters.launch(unit, self._arrivals.writers(position))
