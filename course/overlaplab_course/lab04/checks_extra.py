"""Graders of lab 04's extras, 4.6 to 4.9."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from overlaplab.grading import laws, program_laws
from overlaplab.grading.answered import as_answer
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import Examined, Repair
from overlaplab.grading.laws import Violation
from overlaplab_course.lab04 import broken, extras, given, reference
from overlaplab_course.lab04.given import NUM_RANKS, sent_bytes, wire_bytes

LAB = Declared(__file__)
SLOWER = program_laws.slower(given.BOARD, launch_ns=20_000)


def most_sent(seen: Examined) -> int:
    """Bytes that crossed the busiest rank's link."""
    return max(sent_bytes(seen.program, rank) for rank in range(len(seen.values)))


# -- 4.6

CHUNK, ONCE, HALF, ALL, RUNS = LAB.sentences("4.6")


@LAB.grader("4.6")
def grade_ring(sheet: Sheet, chunk_to_send: extras.ChunkToSend) -> None:
    """Counted for rings of 2 to 8, of 4 first, then run on 4."""
    for n in (NUM_RANKS, 2, 3, 5, 6, 7, 8):
        sheet.ran(f"your schedule on a ring of {n}")
        sheet.verify(CHUNK, extras.no_chunk(chunk_to_send, n))
        sheet.stop_if_wrong()
        for sentence, steps in ((HALF, n - 1), (ALL, 2 * (n - 1))):
            held = extras.simulate(chunk_to_send, n, steps)
            for judged in (ONCE, sentence):
                fault = next(_faults(judged, held), {})
                LAB.refuse(sheet, judged, bool(fault), n=n, steps=steps, **fault)
                sheet.stop_if_wrong()
    for n in (NUM_RANKS, 3):
        inputs = extras.ring_inputs(n)
        total = torch.stack([tensor for (tensor,) in inputs]).sum(0)
        sheet.ran(f"your schedule on {n} ranks, {total.numel()} elements")
        seen = Examined(extras.play_ring(chunk_to_send, n))
        sheet.show(seen.timeline, step_ns=seen.step_ns, title="your ring")
        program_laws.hold(sheet, seen.run, once=())  # counted above
        values = [{"the tensor": value} for value in seen.values]
        wrong = laws.values_law(values, {"the tensor": total})
        sheet.verify(RUNS, [*wrong, *_moved_otherwise(sheet, seen, total)])
        sheet.stop_if_wrong()
    sheet.show_first()


def _moved_otherwise(sheet: Sheet, seen: Examined, tensor: Tensor) -> list[Violation]:
    """Ranks that send more or less of the tensor than a ring has to."""
    n, size = len(seen.values), tensor.numel() * tensor.itemsize
    wanted = wire_bytes("all_reduce", n, size)
    # Sends and receives are both in the record: each byte is counted twice.
    moved = [sent_bytes(seen.program, rank) // 2 for rank in range(n)]
    return [
        LAB.violation(sheet, RUNS, rank=rank, moved=own, wanted=wanted)
        for rank, own in enumerate(moved)
        if own != wanted
    ]


def _faults(sentence: str, held: extras.Counts) -> Iterator[dict[str, Any]]:
    """Where a schedule breaks what `sentence` says: the fields of its `seen`."""
    for rank, chunks in enumerate(held):
        most = max(map(len, chunks))
        if sentence == HALF and most < len(held):
            yield {"rank": rank, "parts": most}
        for number, chunk in enumerate(chunks):
            here = {"rank": rank, "number": number, "parts": len(chunk)}
            if sentence == ALL and len(chunk) < len(held):
                yield here
            for source, count in sorted(chunk.items()):
                if sentence == ONCE and count > 1:
                    yield here | {"source": source, "count": count}


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
        answer = as_answer(bus_gbyte_per_s(operation, num_ranks, size, us))

        def is_near(*numbers: float, answer: Any = answer) -> bool:
            return any(abs(answer - number) <= 0.01 * number for number in numbers)

        good, why = isinstance(answer, (int, float)), "no_number"
        if good:
            units = [factor * right for factor in (1e-3, 1e3, 1e6, 1e9)]
            why = "unit" if is_near(*units) else "factor"
            why = "whole" if is_near(size / (us * 1e3)) else why
            good = is_near(right)
        ran = f"{operation}, {size} bytes, {num_ranks} ranks, {us:g} us"
        facts = {"ran": ran, "answer": answer, "right": right, "wire": wire}
        LAB.expect(sheet, RIGHT, good, hint=LAB.hint(RIGHT, why), **facts)


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
        seen_here, right_here = [{what: value}], {what: wanted}
        found += laws.values_law(seen_here, right_here, what="the value", rank=rank)
    return found


@lru_cache(maxsize=4)
def _blocks_truth(number: int) -> Mapping[str, object]:
    own = extras.repair_case(number)
    luck_us = extras.luck_us(own.play_blocks(broken.blocks))
    kind = "read before the wait"
    return {"kind": kind, "messages": len(own.widths), "luck_us": luck_us}


def _blocks_oracle(inputs: given.Inputs) -> Any:
    x = inputs[0][0]
    for i, w in enumerate(inputs[0][1]):
        total = sum(x @ weights[i]["in"] for _, weights in inputs)
        x = x + total + (x @ w["side"]).relu() @ w["back"]
    return x


def _micros_truth(number: int) -> Mapping[str, object]:
    num_micros = len(extras.repair_case(number).tokens)
    return {
        "kind": "sent again",
        "messages_in_flight": num_micros,
        "weight_of_the_first": NUM_RANKS ** (num_micros - 1),
    }


def _micros_oracle(inputs: given.Inputs) -> Any:
    return sum(a @ b for (micros,) in inputs for a, b in micros)


def _more_than_once(seen: Examined) -> list[Violation]:
    n = len(seen.values)
    wanted, sent = wire_bytes("all_reduce", n, given.MESSAGE_BYTES), most_sent(seen)
    message = f"{sent} bytes crossed the link of one rank"
    violation = Violation("bytes", message, f"{wanted}, as for one gradient")
    return [violation] if sent > wanted + n else []


def _repair(
    oracle: Callable[[given.Inputs], Any], inputs: str, **options: Any
) -> Repair:
    """What both share: `oracle(inputs)` is what every rank must return.

    `inputs` names the method of `extras.RepairCase` that makes them.
    """

    def made(case: extras.RepairCase) -> given.Inputs:
        found: given.Inputs = getattr(case, inputs)()
        return found

    return Repair(
        diagnosis=DIAGNOSIS,
        kinds=LAB.cases("4.8a", "kinds")[DIAGNOSIS],
        cases=extras.repair_cases,
        play=lambda case, step: Examined(given.play(step, made(case))),
        wrong=lambda case, seen, _: wrong_results(
            seen.values, [oracle(made(case))] * case.num_ranks
        ),
        clock=SLOWER,
        stop=True,
        **options,
    )


REPAIRS = {
    "4.8a": _repair(
        _blocks_oracle,
        "blocks",
        kept=KEPT,
        truth=_blocks_truth,
        reference=reference.blocks,
        ran="your blocks: {messages} of them on 4 ranks",
    ),
    "4.8b": _repair(
        _micros_oracle,
        "micros",
        kept=SHORT,
        truth=_micros_truth,
        reference=reference.accumulate,
        ran="your accumulation: {messages_in_flight} micro-batches on 4 ranks",
        once=_more_than_once,
    ),
}
for _id, _form in REPAIRS.items():
    LAB.grader(_id)(_form.grade)

# -- 4.9: one chunk is synchronous; graded by its cost

AT_MOST = 0.15
USABLE, REGRET = LAB.sentences("4.9")


@LAB.grader("4.9")
def grade_chunks(sheet: Sheet, choose_chunks: Callable[..., Any]) -> None:
    """Ask on each case and compare with the best of five answers."""
    sheet.ran(f"choose_chunks on {len(extras.CASES)} layers")
    lost = {}
    for case in extras.CASES:
        name, *numbers = case
        answer = as_answer(choose_chunks(*numbers))
        good = answer in extras.CHUNKS and not isinstance(answer, bool)
        facts = {"name": name, "answer": answer, "chunks": extras.CHUNKS}
        LAB.expect(sheet, USABLE, good, **facts)
        sheet.stop_if_wrong()
        described = (
            f"{name}: {answer} takes {case.step_us(answer):.0f} us, {case.best} "
            f"takes {case.step_us(case.best):.0f}"
        )
        lost[described] = case.regret(answer)
    sheet.verify(REGRET, laws.regret_law(lost, at_most=AT_MOST))
