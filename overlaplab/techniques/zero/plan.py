"""The plan of a step: what is gathered when, into which slot, what is scattered when.

Pure data, made from the order in which a step used its units: it prints, compares, and
is checked. Knows no tensor, no module and no rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlaplab.errors import OverlaplabError


class PlanError(OverlaplabError):
    """A plan would compute with weights that are not there."""


class Use(NamedTuple):
    """One unit computes.

    Args:
        unit: its index.
        backward: in a backward pass.
        again: what is computed once more there, by checkpointing: no gradients.
        paused: a backward inside `no_sync()`: gradients stay, and so do weights.
    """

    unit: int
    backward: bool
    again: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """What is launched for one use.

    Args:
        use: which unit computes.
        slot: of the ring, where its weights are.
        gathers: units whose all-gathers are launched just before it computes.
        scatters: whether its gradients leave behind it, from the slot.
    """

    use: Use
    slot: int
    gathers: tuple[int, ...] = ()
    scatters: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Rows in the order of a step, the same on every rank.

    Args:
        rows: one for every use.
        slots: of each unit, its place in the ring.
        names: of the units.
    """

    rows: tuple[Row, ...]
    slots: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def uses(self) -> list[Use]:
        """The order that it is for."""
        return [row.use for row in self.rows]

    def __str__(self) -> str:
        return self._grid()

    def _grid(self, bad: int = -1) -> str:
        width = max(map(len, self.names), default=0)
        lines = []
        for number, row in enumerate(self.rows):
            line = (
                f"{number:>3} {_word(row.use):<8} "
                f"{self.names[row.use.unit]:<{width}} slot {row.slot}"
            )
            if row.gathers:
                line += f"  gather {' '.join(self.names[u] for u in row.gathers)}"
            if row.scatters:
                line += "  then scatter"
            lines.append(line + ("   <-- here" if number == bad else ""))
        return "\n".join(lines)

    def check(self) -> None:
        """Follow the plan without running it.

        Raises:
            PlanError: a unit computes and its weights are not in its slot, or a gather
                would overwrite what computes in that row; the row is marked.
        """
        inside: dict[int, int] = {}  # slot -> unit
        for number, row in enumerate(self.rows):
            for unit in row.gathers:
                inside[self.slots[unit]] = unit
            unit = row.use.unit
            if inside.get(row.slot) != unit or row.slot != self.slots[unit]:
                found = inside.get(row.slot)
                raise PlanError(
                    f"row {number}: {self.names[unit]} computes with slot {row.slot}, "
                    f"which has {'nothing' if found is None else self.names[found]}; "
                    f"its own slot is {self.slots[unit]}.\n{self._grid(number)}\n"
                    "Gather a unit before it computes, into a slot that is not in use."
                )
            if row.scatters:
                del inside[row.slot]


def _word(use: Use) -> str:
    return "again" if use.again else "backward" if use.backward else "forward"


def plan_slots(uses: Sequence[Use], num_units: int, num_slots: int) -> tuple[int, ...]:
    """A slot for each unit, in turn by first use: neighbours never share one."""
    order = list(dict.fromkeys([use.unit for use in uses] + [*range(num_units)]))
    slots = [0] * num_units
    for position, unit in enumerate(order):
        slots[unit] = position % num_slots
    return tuple(slots)


def plan_step(
    uses: Sequence[Use], names: Sequence[str], prefetch: int, slots: Sequence[int]
) -> StepPlan:
    """Gather each unit before it is used, `prefetch` uses ahead where its slot is free.

    A slot is free when what is in it is not used before the unit that wants it. A unit
    that is still in its slot is not gathered again: so the last units of a forward
    serve the first of the backward. Behind a unit's backward its gradients leave from
    its slot, and its weights are gone; not so inside `no_sync()`.

    Args:
        uses: the order of the step, from an empty ring.
        names: of all units.
        prefetch: how many uses ahead a gather is launched; 0: on demand.
        slots: of each unit, see `plan_slots`.

    >>> uses = [Use(0, False), Use(1, False), Use(2, False)]
    >>> uses += [Use(2, True), Use(1, True), Use(0, True)]
    >>> print(plan_step(uses, "abc", prefetch=1, slots=plan_slots(uses, 3, 2)))
      0 forward  a slot 0  gather a b
      1 forward  b slot 1  gather c
      2 forward  c slot 0
      3 backward c slot 0  then scatter
      4 backward b slot 1  gather a  then scatter
      5 backward a slot 0  then scatter
    """
    inside: dict[int, int] = {}
    rows = []
    for number, use in enumerate(uses):
        gathers: list[int] = []
        needed: set[int] = set()
        for ahead in uses[number : number + prefetch + 1]:
            slot = slots[ahead.unit]
            if inside.get(slot) != ahead.unit:
                if inside.get(slot) in needed:
                    break  # in order: nothing behind it goes first
                inside[slot] = ahead.unit
                gathers.append(ahead.unit)
            needed.add(ahead.unit)
        goes_on = number + 1 < len(uses) and uses[number + 1].unit == use.unit
        leave = use.backward and not use.again and not use.paused
        scatters = leave and not goes_on
        rows.append(Row(use, slots[use.unit], tuple(gathers), scatters))
        if scatters:
            inside.pop(slots[use.unit], None)
    plan = StepPlan(tuple(rows), tuple(slots), tuple(names))
    plan.check()
    return plan
