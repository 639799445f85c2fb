"""Graders of what is read off stored traces: 2.5, 2.6, 2.7."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlaplab.grading.answered import as_answer
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import judge_numbers
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab02 import given, reference
from overlaplab_course.lab02.given import messages_of, trace_step
from overlaplab_course.lab02.show import pay, read, with_gaps

LAB = Declared(__file__)


# What any number may be by mistake.
SLIPS = {"ns": "that is in ns", "us": "that is in us", "minus": "the other way round"}


def _judge(
    sheet: Sheet, id: str, said: Any, right: Mapping[str, float], **others: float
) -> None:
    """Each number that a learner reads; `others`: see `slips` in the file."""
    tables = LAB.tables(id)
    if not isinstance(said, Mapping):
        keys = [one["entry"] for one in tables]
        raise TypeError(
            f"got {type(said).__name__}; expected a dict with the keys {keys}"
        )
    every = {**right, **others}
    judge_numbers(sheet, tables, said, right, every, common=SLIPS, form=".6g")


# -- 2.5

BACKWARD, FIRST, LEAD, TAIL, BYTES = LAB.sentences("2.5")


@LAB.grader("2.5")
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each number against the spans of the learner's own step."""
    sheet.ran("your step of the trace 'overlapped, batch 8'")
    step = trace_step("overlapped, batch 8", int(my_number))
    right, messages = read(step), messages_of(step)
    last = max(messages, key=lambda s: s.end_ns)
    launch_ms = messages[0].attributes["launch_ns"] / 1e6
    sheet.show(step, title="your step, overlapped, batch 8")
    _judge(
        sheet,
        "2.5",
        reading,
        right,
        launch=launch_ms,
        before_0=-launch_ms,
        end=messages[0].end_ns / 1e6,
        after_backward=right["first_ms"] - right["backward_ms"],
        exposed=step.report().exposed_ns / 1e6,
        whole=last.duration_ns / 1e6,
        MB=messages[-1].bytes / 1e6,
        bytes=messages[-1].bytes,
        all=sum(m.bytes for m in messages) / 2**20,
    )


# -- 2.6

WHERE, APART, WHY, ALL_STEPS = LAB.sentences("2.6")

Gap = tuple[int, int, str]


def _span(lane: str, start_us: int, end_us: int, *lead_us: int) -> Span:
    """A message, if it was launched before its start, else a kernel."""
    times = 1000 * start_us, 1000 * end_us
    if not lead_us:
        return Span(0, lane, "compute", "mm", *times)
    launched = {"launch_ns": 1000 * (start_us - lead_us[0])}
    return Span(0, lane, "communication", "all_reduce", *times, attributes=launched)


@LAB.grader("2.6")
def grade_gaps(sheet: Sheet, find_gaps: Callable[[Timeline], Any]) -> None:
    """Three small timelines with a trap each, then the stored traces."""
    sheet.ran("three small timelines, then every step of two traces")
    for sentence, spans in LAB.cases("2.6", "spans").items():
        timeline = Timeline.of(_span(*span) for span in spans)
        found = _gaps(find_gaps(timeline))
        _expect_gaps(sheet, sentence, timeline, found, "on a small timeline")
        sheet.stop_if_wrong()  # one trap at a time
    for which in ("overlapped, batch 8", "overlapped, batch 2"):
        for number in range(len(given.whole_trace(which).steps)):
            timeline = trace_step(which, number)
            found = _gaps(find_gaps(timeline))
            _expect_gaps(sheet, ALL_STEPS, timeline, found, which)


def _expect_gaps(
    sheet: Sheet, sentence: str, timeline: Timeline, said: list[Gap], which: str
) -> None:
    drawn, right = with_gaps(timeline, said), reference.find_gaps(timeline)
    if sentence in (WHERE, APART):  # here only the places count
        said, right = ([(a, b, "") for a, b, _ in gaps] for gaps in (said, right))
    if said != right:
        sheet.show(drawn, title=f"your gaps, {which}")
    why_of = {(a, b): why for a, b, why in said}
    places = [(a, b) for a, b, _ in right]
    in_ms = [(round(1e6 * a), round(1e6 * b)) for a, b, _ in said]
    missing = [gap for gap in right if gap[:2] not in why_of]
    extra = [gap for gap in said if gap[:2] not in places]
    other = [g for g in right if g[:2] in why_of and why_of[g[:2]] != g[2]]
    sheet.expect(
        sentence,
        said == right,
        seen="\n".join(
            ["your times are in ms; asked for are ns"]
            if said and in_ms == places
            else [f"{len(said)} gap{'s' * (len(said) != 1)}"]
            + [f"missing from yours: {_text(gap)}" for gap in missing[:2]]
            + [f"yours, but {_fault(timeline, gap)}: {_text(gap)}" for gap in extra[:2]]
            + [_reason(timeline, gap, why_of[gap[:2]]) for gap in other[:2]]
            + (["twice, or in another order"] if not missing + extra + other else [])
        ),
        expected="; ".join(_text(gap) for gap in right[:3])
        + (f"; ... {len(right)} in all" if len(right) > 3 else ""),
        hint=LAB.cases("2.6", "hint")[WHY] if other and not missing + extra else "",
    )


def _fault(timeline: Timeline, gap: Gap) -> str:
    """Why what a learner reports is no gap."""
    start_ns, end_ns, _ = gap
    sent = messages_of(timeline)
    if any(s.start_ns < end_ns and start_ns < s.end_ns for s in sent):
        return "a message runs in it"
    if end_ns - start_ns < 1_000_000:
        return "shorter than 1 ms"
    return "not from the end of a message to the next start"


def _reason(timeline: Timeline, gap: Gap, said: str) -> str:
    """A gap at the right place with the wrong reason."""
    following = next(s for s in messages_of(timeline) if s.start_ns == gap[1])
    before_ms = (gap[1] - following.attributes["launch_ns"]) / 1e6
    return (
        f"{gap[0] / 1e6:g} to {gap[1] / 1e6:g} ms: you say {said!r}, it is {gap[2]!r}: "
        f"the next message was launched {before_ms:.3g} ms before its start"
    )


def _text(gap: Gap) -> str:
    start_ns, end_ns, why = gap
    reason = f", {why!r}" if why else ""
    return f"{start_ns / 1e6:g} to {end_ns / 1e6:g} ms{reason}"


def whole(time: Any) -> Any:
    """An integer of Python's where it is one; a fraction of a ns says ms."""
    number = as_answer(time)
    return int(number) if int(number) == number else float(number)


def _gaps(said: Any) -> list[Gap]:
    """The answer as triples.

    Raises:
        ValueError: it is something else.
    """
    try:
        gaps = [(whole(a), whole(b), str(why)) for a, b, why in said]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"find_gaps returned {said!r:.120}; expected a list of triples "
            "(start_ns, end_ns, why)"
        ) from error
    if unknown := {why for _, _, why in gaps} - {"launch", "gradient"}:
        raise ValueError(
            f"find_gaps says {sorted(unknown)}; why is 'launch' or 'gradient'"
        )
    return gaps


# -- 2.7: hidden is not saved; who pays the difference?

HIDDEN, SAVED, BESIDE, ALONE, MESSAGES, TOUCHED = LAB.sentences("2.7")


@LAB.grader("2.7")
def grade_bill(sheet: Sheet, my_number: int, bill: Mapping[str, Any]) -> None:
    """Each number against the two steps of the learner's number."""
    sheet.ran("your steps of 'serial' and 'overlapped', batch 8")
    serial, overlapped = given.both_steps(int(my_number))
    sheet.show(overlapped, title="your step, overlapped")
    right, report = pay(serial, overlapped), overlapped.report()
    serial_ns = serial.report().compute_ns
    _judge(
        sheet,
        "2.7",
        bill,
        right,
        communication=report.communication_ns / 1e6,
        exposed=report.exposed_ns / 1e6,
        report=report.saved_ns / 1e6,
        kernels=(report.compute_ns - serial_ns) / 1e6,
        kernels_ratio=report.compute_ns / serial_ns,
        inverse=1 / right["beside_ratio"],
        longer=right["beside_ratio"] - 1,
        mean=mean_of_ratios(serial, overlapped),
    )


def mean_of_ratios(serial: Timeline, overlapped: Timeline) -> float:
    """What is wrong about a mean: every kernel counts alike."""
    ratios = [
        b.duration_ns / a.duration_ns
        for a, b, beside in given.pairs(serial, overlapped)
        if beside and a.duration_ns
    ]
    return sum(ratios) / len(ratios)
