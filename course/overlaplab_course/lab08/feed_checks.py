"""Graders of lab 08's feeding: 8.1 and 8.2.

Both play loops that the learner has not seen, on two and three ranks, with batches of
several shapes; the first that goes wrong is described and drawn.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from overlaplab.grading import Sheet, Violation, laws, program_laws
from overlaplab.grading.declared import Declared
from overlaplab.program import Finding, Op
from overlaplab.view import format_bytes
from overlaplab_course.lab03.jobs import SET_UP, SLOW_COPIES
from overlaplab_course.lab08 import given, reference
from overlaplab_course.lab08.given import STEP, DoubleBuffered, Fed, Loop, Prefetch

LAB = Declared(__file__)
SAFE, OWN, FREE_CPU, LEAN, SHORT = LAB.sentences("8.1")
EDGES, OWN_SLOT, NO_MORE, LAZY, BESIDE = LAB.sentences("8.2")


@lru_cache(maxsize=8)
def best_feed(loop: Loop) -> Fed:
    """The course's own prefetcher."""
    return given.feed(reference.prefetch, loop)


@lru_cache(maxsize=8)
def best_slots(loop: Loop) -> Fed:
    """The course's own double buffer."""
    return given.feed_slots(reference.double_buffered, loop)


@LAB.grader("8.1")
def grade_prefetch(sheet: Sheet, prefetch: Prefetch) -> None:
    """Pinned batches, memory from the allocator."""
    for loop in given.LOOPS:
        sheet.ran(_described(loop))
        seen, right = given.feed(prefetch, loop), best_feed(loop)
        _draw(sheet, seen, right)
        _hold(sheet, SAFE, OWN, seen, right)
        _judge_lean(sheet, seen)
        sheet.stop_if_wrong()
        _judge_step(sheet, SHORT, seen, right)
        sheet.stop_if_wrong()
    sheet.show_first(f"{len(given.LOOPS)} loops on 2 and 3 ranks")


@LAB.grader("8.2")
def grade_slots(sheet: Sheet, double_buffered: DoubleBuffered) -> None:
    """Pageable batches, four slots, and a CPU that takes time to fill."""
    for loop in given.FILLED:
        sheet.ran(f"{_described(loop)}, fills of {loop.fill_ms} ms")
        seen, right = given.feed_slots(double_buffered, loop), best_slots(loop)
        _draw(sheet, seen, right)
        _hold(sheet, EDGES, OWN_SLOT, seen, right)
        sheet.verify(NO_MORE, [v for r in _ranks(seen) for v in _allocated(seen, r)])
        ahead = {rank: max(value[1], default=0) for rank, value in _values(seen)}
        rank = max(ahead, key=lambda rank: ahead[rank])
        LAB.refuse(sheet, LAZY, ahead[rank] > 2, rank=rank, ahead=ahead[rank])
        sheet.stop_if_wrong()
        _judge_step(sheet, BESIDE, seen, right)
        sheet.stop_if_wrong()
    sheet.show_first(f"{len(given.FILLED)} loops on 2 and 3 ranks")


def _described(loop: Loop) -> str:
    return (
        f"{loop.num_batches} batches ({loop.name}), copies of {loop.copy_ms} ms, steps "
        f"of {loop.step_ms} ms, {loop.num_ranks} ranks"
    )


def _draw(sheet: Sheet, seen: Fed, right: Fed) -> None:
    if not seen.whole.spans:
        return
    steps = {"step_ns": seen.step_ns, "target_ns": right.step_ns}
    sheet.show(seen.timeline, title=f"your run ({seen.loop.name})", **steps)


def _ranks(seen: Fed) -> range:
    return range(seen.loop.num_ranks)


def _values(seen: Fed) -> list[tuple[int, Any]]:
    return list(enumerate(seen.values))


def _hold(sheet: Sheet, safe: str, own: str, seen: Fed, right: Fed) -> None:
    """The laws of programs; the CPU may wait in a step, which is ours."""
    ours = {op.label for ops in seen.program.ranks for op in ops if _is_ours(op)}
    hint = LAB.hint(safe, _missing(safe, seen.findings[0])) if seen.findings else ""
    hints = {"hazard": hint, "unwaited": hint}
    if waits := program_laws.cpu_law(seen.program, but=ours):
        why = "wait" if "synchronize" in waits[0].message else "copy"
        hints["cpu"] = LAB.hint(FREE_CPU, why)
    program_laws.hold(
        sheet,
        seen.run,
        wrong=_wrong_batches(sheet, own, seen, right),
        what="a loss",
        but=ours,
        hints=hints,
    )


def _missing(sentence: str, finding: Finding) -> str:
    """Which edge of the exercise's the first finding lacks."""
    text = str(finding)
    if sentence == SAFE:
        return "reuse" if "handed out again" in text else "early"
    if "the CPU" in text.partition("\n")[0]:
        return "fill"
    # Who comes second: a copy overwrites what a step reads, a step reads a copy.
    then = text.rpartition("\n  then ")[2]
    return "overwrite" if then.startswith(("written", "copy")) else "early"


def _wrong_batches(
    sheet: Sheet, sentence: str, seen: Fed, right: Fed
) -> list[Violation]:
    """Steps that saw another batch, on each rank; or too few of them."""
    found: list[Violation] = []
    for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True)):
        steps, wanted = len(mine[0]), len(ours[0])
        if steps != wanted:
            facts: dict[str, Any] = {"rank": rank, "steps": steps, "wanted": wanted}
            return [*found, LAB.violation(sheet, sentence, **facts)]
        found += [
            Violation(
                "values",
                f"step {number} on rank {rank} saw another batch, or not its rows",
                f"batch {number}, of {seen.loop.rows(number)} rows",
                "which rows are copied, from where, in which order?",
                rank=rank,
            )
            for number, (a, b) in enumerate(zip(mine[0], ours[0], strict=True))
            if not torch.allclose(a, b, rtol=1e-5)
        ]
    return found


def _judge_lean(sheet: Sheet, seen: Fed) -> None:
    for rank, (_, ahead) in _values(seen):
        facts = {"seen": f"has taken {max(ahead, default=0)} batches ahead"}
        facts["expected"] = "at most 2 beside the step's"
        if max(ahead, default=0) <= 2:
            held = _held(seen, rank)
            facts["seen"] = f"holds {held:.1f} batches on the device"
            facts["expected"] = "at most 3"
            if held <= 3:
                continue
        LAB.refuse(sheet, LEAN, True, rank=rank, **facts)
        return
    sheet.expect(LEAN, True)


def _held(seen: Fed, rank: int) -> float:
    """The most bytes that copies wrote and Python still refers to, in batches."""
    ops = seen.program.ranks[rank]
    filled = {a.storage for op in ops if op.kind == "memcpy" for a in op.writes}
    lives = [s for s in seen.program.storages if s.rank == rank and s.storage in filled]
    most = max(
        (
            sum(s.bytes for s in lives if s.born <= t and (s.freed or len(ops)) > t)
            for t in {life.born for life in lives}
        ),
        default=0,
    )
    return most / (16384 * seen.loop.copy_ms)


def _allocated(seen: Fed, rank: int) -> list[Violation]:
    """Memory for a quarter of a unit or more, made by the learner's code."""
    ops = seen.program.ranks[rank]
    found = []
    for life in seen.program.storages:
        op = ops[life.born] if life.rank == rank and life.born < len(ops) else None
        if op is None or life.bytes < 4096 or _is_ours(op):
            continue
        where = "the device's" if not life.host else "the host's"
        found.append(
            Violation(
                "memory",
                f"rank {rank} allocates {format_bytes(life.bytes)} of {where} memory"
                + _where(op),
                "batches live in the four slots",
                rank=rank,
            )
        )
    return found


def _is_ours(op: Op) -> bool:
    return op.label == SET_UP or op.label.startswith(STEP)


def _where(op: Op) -> str:
    return f" [{op.source}]" if op.source else ""


def _judge_step(sheet: Sheet, sentence: str, seen: Fed, right: Fed) -> None:
    slow = laws.step_law(seen.step_ns, right.step_ns)
    slow = slow or program_laws.slow_law(SLOW_COPIES, seen.told, right.told)
    hint = LAB.hint(sentence, _why_slow(seen)) if slow else ""
    sheet.verify(sentence, slow, hint=hint)


def _why_slow(seen: Fed) -> str:
    """What stands in line: copies with steps, or each copy behind the step before."""
    ops = seen.told.ranks[0]
    if any(op.kind == "memcpy" and op.stream == "default" for op in ops):
        return "line"
    first_step = {op.label: op.index for op in reversed(ops)}
    copies = {op.label: op.index for op in ops if op.kind == "memcpy"}
    late = (
        copies.get(f"copy {number + 1}", 0) > first_step.get(f"{STEP}{number}", 0)
        for number in range(seen.loop.num_batches - 1)
    )
    return "late" if any(late) else "wait"
