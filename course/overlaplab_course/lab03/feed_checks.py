"""The grader of 3.4: batches go to the device from pinned memory, beside a step."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from overlaplab.grading import Sheet, Violation, laws, program_laws
from overlaplab.grading.forms import Examined
from overlaplab_course.lab03 import given, reference
from overlaplab_course.lab03.checks_extra import LAB
from overlaplab_course.lab03.jobs import SLOW_COPIES

NOBODY_EARLY, OWN_BATCH, LEAN, FIRST_COPY = LAB.sentences("3.4")


def crowded(seen: Examined) -> list[Violation]:
    """On every rank Python refers to at most three batches at a time.

    After `record_stream` the allocator keeps a dropped batch until the device is
    there; how many that are is a matter of how far the CPU is ahead, and not judged.
    """
    found = []
    for rank, ops in enumerate(seen.program.ranks):
        lives = [
            (life.born, len(ops) if life.freed is None else life.freed)
            for life in seen.program.storages
            if life.rank == rank and life.name.startswith("batch ")
        ]
        most = max(
            (sum(b <= at < freed for b, freed in lives) for at, _ in lives), default=0
        )
        if most > 3:
            message = f"Python on rank {rank} holds {most} batches at a time"
            hint = "when may a batch go? Who keeps it?"
            found.append(Violation("memory", message, "at most 3", hint, rank=rank))
    return found


@lru_cache(maxsize=8)
def best_feed(loop: given.Loop) -> given.Fed:
    """The course's own."""
    return given.feed_loop(reference.feed, loop)


@LAB.grader("3.4")
def grade_feed(sheet: Sheet, feed: given.Feed) -> None:
    """Feed each loop; the first that goes wrong is described and drawn."""
    for loop in given.LOOPS:
        sheet.ran(
            f"{loop.num_batches} batches ({loop.name}), copies of {loop.copy_ms} ms, "
            f"steps of {loop.step_ms} ms, {loop.num_ranks} ranks"
        )
        fed, right = given.feed_loop(feed, loop), best_feed(loop)
        fed.draw_on(sheet, right.step_ns, f"your run ({loop.name})")
        wrong = wrong_losses(fed, right)
        program_laws.hold(sheet, fed.run, wrong=wrong, what="a loss")
        sheet.verify(LEAN, crowded(fed))
        sheet.stop_if_wrong()
        sheet.verify(FIRST_COPY, _slow_feed(fed, right, loop))
        late = program_laws.slow_law(SLOW_COPIES, fed.program, right.program)
        sheet.verify(FIRST_COPY, late)
        sheet.stop_if_wrong()
    sheet.show_first(f"{len(given.LOOPS)} loops on 2 and 3 ranks")


def wrong_losses(fed: given.Fed, right: given.Fed) -> list[Violation]:
    """Every rank's losses are those of its own batches, in order."""
    found = []
    for rank, (mine, ours) in enumerate(zip(fed.values, right.values, strict=True)):
        if len(mine) != len(ours):
            seen, wanted = f"ran {len(mine)} steps", f"{len(ours)}, one for each sample"
            found.append(Violation("values", f"rank {rank} {seen}", wanted, rank=rank))
            continue
        found += [
            Violation(
                "values",
                f"step {number} on rank {rank} saw another batch",
                f"sample {number}",
                "in which order are the samples copied, and into what?",
                rank=rank,
                step=number,
            )
            for number, (a, b) in enumerate(zip(mine, ours, strict=True), start=1)
            if not torch.allclose(a, b, rtol=1e-5)
        ]
    return found


def _waits_for_next(fed: given.Fed, loop: given.Loop) -> int:
    """The first step that waits for a copy that was launched early enough; 0: none."""
    ops, spans = fed.program.ranks[0], fed.run.timeline.of_rank(0).spans
    copies = [s for s in spans if s.kind == "memcpy"]
    for number in range(1, min(loop.num_batches, len(copies))):
        steps = [op.index for op in ops if op.label == f"step {number}"]
        own = [s for s in spans if s.attributes.get("op") in steps[:1]]
        following = copies[number]
        launched = following.attributes.get("op", len(ops)) < min(steps, default=0)
        if launched and own and own[0].start_ns >= following.end_ns:
            return number
    return 0


def _slow_feed(fed: given.Fed, right: given.Fed, loop: given.Loop) -> list[Violation]:
    copies = [op for op in fed.program.ranks[0] if op.kind == "memcpy"]
    why = "late"
    if any(op.attributes.get("pinned") is False for op in copies):
        why = "pageable"
    elif all(op.stream == "default" for op in copies):
        why = "default"
    exposed = f"{fed.exposed_copy_ns / 1e6:.1f} ms of copies are exposed"
    cause = ""
    if why == "late" and (number := _waits_for_next(fed, loop)):
        why = "waits"
        cause = f"step {number} begins only when batch {number + 1} has been copied too"
    return [
        replace(
            violation,
            message=f"{loop.name}: {cause or violation.message}; {exposed}",
            hint=LAB.hint(FIRST_COPY, why),
        )
        for violation in laws.step_law(fed.step_ns, right.step_ns)
    ]
