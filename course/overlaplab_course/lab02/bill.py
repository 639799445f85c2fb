"""Exercise 2.7: hidden is not saved. Who pays the difference?

The same step of the same run of two GPUs, all messages at the end ("serial") and in
buckets beside the backward pass ("overlapped"). Both launch the same kernels in the
same order, so that the n-th can be compared with the n-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import intersect, merge
from overlaplab_course.lab02.answers import Answer, grade_answers
from overlaplab_course.lab02.traces import trace_step

HIDDEN = "how much communication is hidden"
SAVED = "how much shorter than the serial step it is"
MESSAGES = "how much longer the messages take in all"
BESIDE = "how much longer the kernels with a message beside them take: contention"
ALONE = "how much longer those without one take, which no message touched"
TOUCHED = "how much longer a kernel takes with a message beside it, as a ratio"


def both_steps(number: int) -> tuple[Timeline, Timeline]:
    """(serial, overlapped): the steps of a learner's number, at batch 8."""
    return (
        trace_step("serial, batch 8", number),
        trace_step("overlapped, batch 8", number),
    )


def pairs(serial: Timeline, overlapped: Timeline) -> list[tuple[Span, Span, bool]]:
    """(alone, the same kernel in the overlapped step, whether a message runs beside).

    Raises:
        ValueError: the two did not launch the same kernels.
    """
    alone = [s for s in serial.spans if s.kind == "compute"]
    after = [s for s in overlapped.spans if s.kind == "compute"]
    if [s.name for s in alone] != [s.name for s in after]:
        raise ValueError("the two steps did not launch the same kernels in one order")
    sent = merge(
        (s.start_ns, s.end_ns) for s in overlapped.spans if s.kind == "communication"
    )
    return [
        (a, b, bool(intersect([(b.start_ns, b.end_ns)], sent)))
        for a, b in zip(alone, after, strict=True)
    ]


def ratio(serial: Timeline, overlapped: Timeline, *, beside: bool) -> float:
    """Time of the kernels with (or without) a message beside, over their time alone."""
    chosen = [
        (a, b) for a, b, touched in pairs(serial, overlapped) if touched is beside
    ]
    return sum(b.duration_ns for _, b in chosen) / sum(a.duration_ns for a, _ in chosen)


def longer_ms(serial: Timeline, overlapped: Timeline, *, beside: bool) -> float:
    """How much longer the kernels with (or without) a message beside take, in all."""
    return (
        sum(
            b.duration_ns - a.duration_ns
            for a, b, touched in pairs(serial, overlapped)
            if touched is beside
        )
        / 1e6
    )


def pay(serial: Timeline, overlapped: Timeline) -> dict[str, float]:
    """The right numbers, and one that nobody is asked for ("alone_ratio").

    The kernels of these steps run one at a time, so that the two parts of "longer" add
    up to the difference of the compute times.
    """
    before, after = serial.report(), overlapped.report()
    return {
        "hidden_ms": after.hidden_ns / 1e6,
        "saved_ms": (before.step_ns - after.step_ns) / 1e6,
        "beside_ms": longer_ms(serial, overlapped, beside=True),
        "alone_ms": longer_ms(serial, overlapped, beside=False),
        "messages_ms": (after.communication_ns - before.communication_ns) / 1e6,
        "beside_ratio": ratio(serial, overlapped, beside=True),
        "alone_ratio": ratio(serial, overlapped, beside=False),
    }


@exercise(
    "2.7",
    title="who pays?",
    solution=("my_number", "bill"),
    verifies=(HIDDEN, SAVED, BESIDE, ALONE, MESSAGES, TOUCHED),
    points=3,
    timeout_s=30.0,
)
def grade_bill(sheet: Sheet, my_number: int, bill: Mapping[str, Any]) -> None:
    """Each number against the two steps of the learner's number."""
    sheet.ran("your steps of 'serial' and 'overlapped', batch 8")
    serial, overlapped = both_steps(int(my_number))
    sheet.show(overlapped, title="your step, overlapped")
    right = pay(serial, overlapped)
    report = overlapped.report()
    whole = report.compute_ns / serial.report().compute_ns
    whole_ms = (report.compute_ns - serial.report().compute_ns) / 1e6
    answers = {
        "hidden_ms": Answer(
            HIDDEN,
            right["hidden_ms"],
            0.02,
            "report().hidden_ns of the overlapped step, in ms",
            (
                (report.communication_ns / 1e6, "that is all communication"),
                (report.exposed_ns / 1e6, "that is what is exposed"),
            ),
        ),
        "saved_ms": Answer(
            SAVED,
            right["saved_ms"],
            0.02,
            "step_ns of the serial step minus step_ns of the overlapped, in ms",
            (
                (
                    report.saved_ns / 1e6,
                    "that compares the overlapped step with its own slowed-down parts; "
                    "compare it with the serial step",
                ),
                (right["hidden_ms"], "hidden is not saved"),
            ),
        ),
        "beside_ms": Answer(
            BESIDE,
            right["beside_ms"],
            0.02,
            "over all kernels that run at least partly beside a message: their time "
            "in the overlapped step minus that in the serial, summed, in ms",
            (
                (whole_ms, "that is over all kernels"),
                (right["alone_ms"], "that is of those without a message beside"),
            ),
        ),
        "alone_ms": Answer(
            ALONE,
            right["alone_ms"],
            0.02,
            "the same over all kernels with no message beside them",
            (
                (whole_ms, "that is over all kernels"),
                (right["beside_ms"], "that is of those with a message beside"),
            ),
        ),
        "messages_ms": Answer(
            MESSAGES,
            right["messages_ms"],
            0.02,
            "communication_ns of the overlapped step minus that of the serial, in ms",
        ),
        "beside_ratio": Answer(
            TOUCHED,
            right["beside_ratio"],
            0.01,
            "of the kernels of beside_ms: their time in the overlapped step over that "
            "in the serial",
            (
                (whole, "that is over all kernels"),
                (right["alone_ratio"], "that is of those without a message beside"),
                (1 / right["beside_ratio"], "the other way round"),
                (right["beside_ratio"] - 1, "that is what it is longer by"),
                (
                    _mean_of_ratios(serial, overlapped),
                    "that is a mean of ratios, in which a kernel of 1 us counts as "
                    "much as one of 1 ms: divide sums",
                ),
            ),
        ),
    }
    grade_answers(sheet, bill, answers)


def _mean_of_ratios(serial: Timeline, overlapped: Timeline) -> float:
    ratios = [
        b.duration_ns / a.duration_ns
        for a, b, beside in pairs(serial, overlapped)
        if beside and a.duration_ns
    ]
    return sum(ratios) / len(ratios)
