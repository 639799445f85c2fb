"""What a model's blocks, or all of it, may do: plans for any budget are made of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from overlaplab.techniques.memory import arguments, strategies
from overlaplab.techniques.memory.chain import Chain, Whole
from overlaplab.techniques.memory.knapsack import Curve, find_curve, too_small
from overlaplab.techniques.memory.messages import Communication, choose_with_messages
from overlaplab.techniques.memory.plan import CheckpointPlan, Frontier
from overlaplab.techniques.memory.policies import Policy

_MOST_POINTS = 400


@dataclass(frozen=True)
class Costs:
    """A model's chain and its menu: what plans for any budget are made of.

    Args:
        chain: the step.
        policies: the menu.
        compiled_parts, backend: see `measure_costs`.
        wholes: what steps of the whole model took.
    """

    chain: Chain
    policies: tuple[Policy, ...]
    compiled_parts: tuple[str, ...] = ()
    backend: str = "inductor"
    wholes: tuple[Whole, ...] = ()

    def plan(
        self, choice: Sequence[int], budget_bytes: int | None = None
    ) -> CheckpointPlan:
        """The plan of a choice.

        Raises:
            ValueError: `choice` has not one place of a menu for each block.
        """
        menus = [len(block.options) for block in self.chain.blocks]
        if len(choice) != len(menus) or any(
            not 0 <= place < size for place, size in zip(choice, menus, strict=True)
        ):
            raise ValueError(
                f"choice is {tuple(choice)}; expected {len(menus)} places, one for "
                f"each block, from 0 to less than {', '.join(map(str, menus))}"
            )
        return self._plan(tuple(choice), budget_bytes)

    def _plan(
        self,
        choice: tuple[int, ...],
        budget_bytes: int | None = None,
        communication: Communication | None = None,
        whole: Whole | None = None,
    ) -> CheckpointPlan:
        menu = {policy.name: policy for policy in self.policies}
        parts, backend = self.compiled_parts, self.backend
        return CheckpointPlan(
            self.chain, choice, menu, budget_bytes, parts, backend, communication, whole
        )

    def fastest(
        self, budget_bytes: int, communication: Communication | None = None
    ) -> CheckpointPlan:
        """The fastest within a budget.

        Args:
            communication: what is sent in the backward: then the step ends with its
                messages, see `messages`.

        Raises:
            BudgetError: none fits.
            TypeError: the budget is no whole number, or `communication` none.
        """
        budget_bytes = arguments.whole_bytes("budget_bytes", budget_bytes)
        if not isinstance(communication, Communication | None):
            raise TypeError(
                f"communication is {communication!r}; expected a Communication"
            )
        least = int(self._curve.peak_bytes[0])
        if budget_bytes < (
            all_least := min([least, *(w.peak_bytes for w in self.wholes)])
        ):
            raise too_small(budget_bytes, all_least)
        plans = [
            self._plan((), budget_bytes, communication, whole)
            for whole in self.wholes
            if whole.peak_bytes <= budget_bytes
        ]
        if budget_bytes >= least:
            if communication is None:
                choice = self._curve.choose(budget_bytes)
            else:
                choice = choose_with_messages(self.chain, budget_bytes, communication)
            plans.append(self._plan(choice, budget_bytes, communication))
        return min(plans, key=lambda plan: (plan.step_ns, plan.peak_bytes))

    def every(self, k: int, policy: str = "recompute") -> CheckpointPlan:
        """Every k-th block under `policy`, see `strategies.every`."""
        return self.plan(strategies.every(self.chain, k, policy))

    def none(self) -> CheckpointPlan:
        """All blocks as they are."""
        return self.plan(strategies.none(self.chain))

    def frontier(self) -> Frontier:
        """All plans than which none is as small and as fast, the fastest first.

        Of very many every so-many-th: at most about 400.
        """
        plans = [self._plan((), whole=whole) for whole in self.wholes]
        for place in self._curve.spread(_MOST_POINTS):
            plans.append(self.plan(self._curve.choice(place)))
        best: list[CheckpointPlan] = []
        for plan in sorted(plans, key=lambda plan: (plan.step_ns, plan.peak_bytes)):
            if not best or plan.peak_bytes < best[-1].peak_bytes:
                best.append(plan)
        return Frontier(best)

    @functools.cached_property
    def _curve(self) -> Curve:
        return find_curve(self.chain)
