"""Graders of lab 04's extras, 4.6 to 4.9."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from overlaplab.grading import laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import Examined, Repair
from overlaplab.grading.laws import Violation
from overlaplab_course.lab04 import broken, extras, given, reference
from overlaplab_course.lab04.given import NUM_RANKS, sent_bytes, wire_bytes

LAB = Declared(__file__)

# -- 4.6

CHUNK, ONCE, HALF, ALL, RUNS = LAB.sentences("4.6")


@LAB.grader("4.6")
def grade_ring(sheet: Sheet, chunk_to_send: extras.ChunkToSend) -> None:
    """Counted for rings of 2 to 8, of 4 first, then run on 4."""
    for n in (NUM_RANKS, 2, 3, 5, 6, 7, 8):
        sheet.ran(f"your schedule on a ring of {n}")
        sheet.verify(CHUNK, extras.no_chunk(chunk_to_send, n))
        sheet.stop_if_wrong()
        for sentence, steps, fault, expected in (
            (HALF, n - 1, _none_finished, f"one chunk with all {n}"),
            (ALL, 2 * (n - 1), _unfinished, f"all {n}"),
        ):
            held = extras.simulate(chunk_to_send, n, steps)
            sheet.verify(ONCE, _unless(_twice(held), "once"))
            sheet.stop_if_wrong()
            sheet.verify(sentence, _unless(fault(held), expected))
            sheet.stop_if_wrong()
    sheet.ran("your schedule on 4 ranks, 400000 elements")
    seen = Examined(extras.play_ring(chunk_to_send))
    sheet.show(seen.timeline, step_ns=seen.step_ns, title="your ring")
    total = torch.stack([tensor for (tensor,) in extras.ring_inputs()]).sum(0)
    wrong = laws.values_law(
        [{"the tensor": value} for value in seen.values], {"the tensor": total}
    )
    wanted = wire_bytes("all_reduce", NUM_RANKS, total.numel() * total.itemsize)
    for rank in range(NUM_RANKS):
        # Sends and receives are both in the record: each byte is counted twice.
        moved = sent_bytes(seen.program, rank) // 2
        message = f"rank {rank} sent {moved} bytes"
        if moved != wanted:
            wrong.append(Violation("bytes", message, str(wanted)))
    sheet.verify(RUNS, wrong)


def _unless(fault: str, expected: str) -> list[Violation]:
    return [Violation("ring", fault, expected)] if fault else []


def _twice(held: extras.Counts) -> str:
    n = len(held)
    return next(
        (
            f"on a ring of {n}, chunk {number} on rank {rank} has the part of rank "
            f"{source} {count} times"
            for rank, chunks in enumerate(held)
            for number, chunk in enumerate(chunks)
            for source, count in sorted(chunk.items())
            if count > 1
        ),
        "",
    )


def _none_finished(held: extras.Counts) -> str:
    n = len(held)
    most = [max(len(chunk) for chunk in chunks) for chunks in held]
    return next(
        (
            f"on a ring of {n}, after {n - 1} steps the best chunk of rank {rank} has "
            f"{parts} of {n} parts"
            for rank, parts in enumerate(most)
            if parts < n
        ),
        "",
    )


def _unfinished(held: extras.Counts) -> str:
    n = len(held)
    return next(
        (
            f"on a ring of {n}, rank {rank} ends with {len(chunk)} of {n} parts in "
            f"chunk {number}"
            for rank, chunks in enumerate(held)
            for number, chunk in enumerate(chunks)
            if len(chunk) < n
        ),
        "",
    )


# -- 4.7

(RIGHT,) = LAB.sentences("4.7")


@LAB.grader("4.7")
def grade_bus(sheet: Sheet, bus_gbyte_per_s: Callable[..., Any]) -> None:
    """As nccl-tests define it, on measurements that the lesson does not show."""
    measurements = LAB.cases("4.7", "measurements")[RIGHT]
    sheet.ran(f"your function on {len(measurements)} invented measurements")
    for operation, num_ranks, size, us in measurements:
        wire = wire_bytes(operation, num_ranks, size)
        right = given.bus_of_ours(operation, num_ranks, size, us)
        answer = bus_gbyte_per_s(operation, num_ranks, size, us)
        sheet.expect(
            RIGHT,
            bool(isinstance(answer, (int, float)) and _is_close(answer, right)),
            seen=f"{operation}, {size} bytes, {num_ranks} ranks, {us:g} us: {answer!r}",
            expected=f"{right:.4g} GB/s: {wire} bytes cross a link",
            hint=_bus_hint(answer, right, size / (us * 1e3)),
        )


def _is_close(answer: float, right: float) -> bool:
    return abs(answer - right) <= 0.01 * right


def _bus_hint(answer: object, right: float, whole: float) -> str:
    if not isinstance(answer, (int, float)):
        return "return a number"
    if _is_close(answer, whole):
        return "that is size over time; how often does a byte cross a link?"
    if any(_is_close(answer, factor * right) for factor in (1e-3, 1e3, 1e6, 1e9)):
        return "GB/s are 1e9 bytes a second; the time is in microseconds"
    return (
        "which collectives send a byte 2 (n - 1)/n times, which (n - 1)/n, which once?"
    )


# -- 4.8: public bugs in small; the learner's number draws the widths

DIAGNOSIS, SAFE, VALUES, KEPT = LAB.sentences("4.8a")
*_, BYTES, SHORT = LAB.sentences("4.8b")


def wrong_results(
    seen: Sequence[Any], right: Sequence[Tensor], what: str = "the result"
) -> list[Violation]:
    """Each rank's result beside its own oracle's."""
    found = []
    for rank, (value, wanted) in enumerate(zip(seen, right, strict=True)):
        if not isinstance(value, Tensor):
            message = f"on rank {rank} the step returned {type(value).__name__}"
            expected, hint = "the tensor that it computes", "is there a return?"
            found.append(Violation("values", message, expected, hint, rank=rank))
            continue
        wrong = laws.values_law([{what: value}], {what: wanted}, what="the value")
        found += [
            Violation(v.law, v.message.replace("rank 0", f"rank {rank}"), v.expected)
            for v in wrong
        ]
    return found


@lru_cache(maxsize=4)
def _blocks_truth(number: int) -> Mapping[str, object]:
    own = extras.repair_case(number)
    return {
        "kind": "read before the wait",
        "messages": len(own.widths),
        "luck_us": extras.luck_us(own.play_blocks(broken.blocks)),
    }


def _blocks_oracle(inputs: given.Inputs) -> list[Tensor]:
    x = inputs[0][0]
    for i, w in enumerate(inputs[0][1]):
        total = sum(x @ weights[i]["in"] for _, weights in inputs)
        x = x + total + (x @ w["side"]).relu() @ w["back"]
    return [x] * len(inputs)


BLOCKS = Repair(
    diagnosis=DIAGNOSIS,
    safe=SAFE,
    values=VALUES,
    kept=KEPT,
    truth=_blocks_truth,
    play=lambda number, blocks: Examined(
        extras.repair_case(number).play_blocks(blocks)
    ),
    reference=reference.blocks,
    wrong=lambda number, seen, _: wrong_results(
        seen.values, _blocks_oracle(extras.repair_case(number).blocks())
    ),
    ran="your blocks: {messages} of them on 4 ranks",
    stop=True,
)


@LAB.grader("4.8a")
def grade_early(sheet: Sheet, *solution: Any) -> None:
    """The wait stands before the reader, and after what needs no sum."""
    BLOCKS.grade(sheet, *solution)


def _micros_truth(number: int) -> Mapping[str, object]:
    num_micros = len(extras.repair_case(number).tokens)
    return {
        "kind": "sent again",
        "messages_in_flight": num_micros,
        "weight_of_the_first": NUM_RANKS ** (num_micros - 1),
    }


def _micros_oracle(inputs: given.Inputs) -> list[Tensor]:
    total = sum(a @ b for (micros,) in inputs for a, b in micros)
    assert isinstance(total, Tensor)
    return [total] * len(inputs)


def _more_than_once(seen: Examined) -> list[Violation]:
    wanted = wire_bytes("all_reduce", NUM_RANKS, 250 * 400 * 4)
    sent = max(sent_bytes(seen.program, rank) for rank in range(NUM_RANKS))
    message = f"{sent} bytes crossed the link of one rank"
    violation = Violation("bytes", message, f"{wanted}, as for one gradient")
    return [violation] if sent > wanted + NUM_RANKS else []


MICROS = Repair(
    diagnosis=DIAGNOSIS,
    safe=SAFE,
    values=VALUES,
    kept=SHORT,
    truth=_micros_truth,
    play=lambda number, step: Examined(extras.repair_case(number).play_micros(step)),
    reference=reference.accumulate,
    wrong=lambda number, seen, _: wrong_results(
        seen.values, _micros_oracle(extras.repair_case(number).micros())
    ),
    ran="your accumulation: {messages_in_flight} micro-batches on 4 ranks",
    also={BYTES: _more_than_once},
    stop=True,
)


@LAB.grader("4.8b")
def grade_again(sheet: Sheet, *solution: Any) -> None:
    """One message per gradient, when it is whole."""
    MICROS.grade(sheet, *solution)


# -- 4.9: one chunk is synchronous; graded by its cost

AT_MOST = 0.15
USABLE, REGRET = LAB.sentences("4.9")


@LAB.grader("4.9")
def grade_chunks(sheet: Sheet, choose_chunks: Callable[..., Any]) -> None:
    """Ask on each case and compare with the best of five answers."""
    sheet.ran(f"choose_chunks on {len(extras.CASES)} layers")
    lost = {}
    for case in extras.CASES:
        answer = choose_chunks(
            case.compute_us, case.overhead_us, case.latency_us, case.wire_us
        )
        sheet.expect(
            USABLE,
            answer in extras.CHUNKS and not isinstance(answer, bool),
            seen=f"{case.name}: {answer!r}",
            expected=f"one of {extras.CHUNKS}",
        )
        sheet.stop_if_wrong()
        described = (
            f"{case.name}: {answer} takes {case.step_us(answer):.0f} us, {case.best} "
            f"takes {case.step_us(case.best):.0f}"
        )
        lost[described] = case.regret(answer)
    sheet.verify(REGRET, laws.regret_law(lost, at_most=AT_MOST))
