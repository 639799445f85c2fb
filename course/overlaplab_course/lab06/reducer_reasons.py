"""Why a reducer of lab 06 is wrong, from what it sent and left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.grading import fixtures, laws, stage
from overlaplab.grading.declared import Declared
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab.grading.gradients import are_own, are_same, are_sums, comparable
from overlaplab.grading.laws import Violation
from overlaplab_course.lab06.given import ReducerState
from overlaplab_course.lab06.reference import plan_buckets

_UNUSED = Declared(__file__).sentences("6.3")[7]
SKIPPED_HINTS: Mapping[str, str] = Declared(__file__).cases("6.3", "skipped")[_UNUSED]
PARAMETER_SENT = "you sent the parameter; its gradient is `.grad`"
STALE = (
    "a place keeps what the step before left in it: place.zero_() where `.grad` is None"
)
_NO_WORK = (  # our finish sends only what has no work
    "works[b] is None after your launch: without async_op=True all_reduce "
    "waits by itself and returns None (with it, store what it returns)"
)


def slip_of_hooks(trained: Trained, fixture: Fixture) -> str:
    """What hooks did that our finish makes look like something else, "" if nothing."""
    ops = trained.evidence.program.ranks[0]
    for gradient in trained.evidence.gradients_of(0, 1):
        if len({ops[op].phase == "backward" for op in gradient.sends}) == 2:
            return _NO_WORK
    if are_same(trained.gradients[0][0], dict(fixture.build(0).named_parameters())):
        return PARAMETER_SENT
    return ""


def nothing_launched(
    install_hooks: Callable[[ReducerState], Any],
    trained: Trained,
    fixture: Fixture,
    cap_bytes: int,
) -> list[Violation]:
    """Nothing, where the hooks launch a bucket in the backward pass of step 1."""
    ops = trained.evidence.program.ranks[0]
    sends = {op for g in trained.evidence.gradients_of(0, 1) for op in g.sends}
    if not sends or any(ops[op].phase == "backward" for op in sends):
        return []
    left = stage.run(_left_missing, install_hooks, fixture, cap_bytes, check=False)
    before, after = left.values[0]
    still = " still" if after[0] == before[0] else ""
    seen = (
        f"your hooks launched 0 of {len(before)} buckets, our finish sent them: "
        f"after the backward pass missing[0] is{still} {after[0]}"
    )
    expected = f"missing[0] goes from {before[0]} to 0, and bucket 0 is launched then"
    hint = "launch a bucket in the hook that brings its missing[b] to 0"
    hint = "which line counts missing[b] down?" if still else hint
    return [Violation("prompt", seen, expected, hint)]


def _left_missing(
    install_hooks: Callable[[ReducerState], Any], fixture: Fixture, cap_bytes: int
) -> tuple[list[int], list[int]]:
    """`missing` before and after one backward pass with these hooks."""
    model = fixture.build(dist.get_rank())
    params = [p for p in model.parameters() if p.requires_grad]
    state = ReducerState.of(model, plan_buckets(params, cap_bytes))
    before = [*state.missing]
    install_hooks(state)
    loss = fixture.loss(model, *fixture.make_batch(dist.get_rank(), 1))
    loss.backward()  # type: ignore[no-untyped-call]
    return before, [int(number) for number in state.missing]


def hint_of_values(
    trained: Trained, fixture: Fixture, num_ranks: int, cap_bytes: int
) -> str:
    """What wrong gradients of step 1 look like, "" if like nothing known."""
    if are_sums(trained.gradients[0][0], fixture, num_ranks):
        return "this is the SUM over the ranks: divide by dist.get_world_size()"
    params = [p for p in fixture.build(0).parameters() if p.requires_grad]
    buckets = len(plan_buckets(params, cap_bytes))
    for rank in range(num_ranks):
        if len(trained.evidence.sends_of(rank, 1)) < buckets:
            return SKIPPED_HINTS.get(fixture.name, SKIPPED_HINTS["unused"])
    right = comparable(fixtures.oracle(fixture, steps=1, world_size=num_ranks)[0][0])
    for rank, grads in enumerate(trained.gradients[0]):
        seen = comparable(grads, right)
        for name, wanted in right.items():
            if seen.get(name) is None and wanted is not None:
                return (
                    f"the sum for {name} is in its buffer, but `.grad` is None on rank "
                    f"{rank}: write it back where there was no gradient, too"
                )
    if fixture.name in SKIPPED_HINTS and all(
        are_same(grads, right) for grads in trained.gradients[0]
    ):
        return STALE  # wrong from step 2 on only
    own = comparable(fixtures.oracle(fixture, steps=1, world_size=1)[0][0])
    first = comparable(trained.gradients[0][0], right)
    kept = [n for n in right if _wrong(first, right, n) and not _wrong(first, own, n)]
    if are_own(trained.gradients[0][0], fixture) or kept:
        whose = f" of {kept[0]}" if kept and not _all(first, own) else ""
        return (
            f"the buffer has the sum, but `.grad`{whose} still has this rank's own "
            "gradient: write it back"
        )
    return ""


def _wrong(seen: fixtures.Gradients, right: fixtures.Gradients, name: str) -> bool:
    one: dict[str, torch.Tensor | None] = {name: seen.get(name)}
    return bool(laws.values_law([one], {name: right.get(name)}))


def _all(seen: fixtures.Gradients, own: fixtures.Gradients) -> bool:
    return not any(_wrong(seen, own, name) for name in own)
