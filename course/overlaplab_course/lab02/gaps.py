"""Exercise 2.6: the gaps of the communication lane, and what ended each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import CPU_LANE, Span, Timeline
from overlaplab.timeline.intervals import merge
from overlaplab.view import draw_many
from overlaplab_course.lab02.traces import num_steps, trace_step

WHERE = "every gap of 1 ms or more, from the end of a message to the next start"
BESIDE = "where messages run side by side, a gap is where none runs"
WHY = "what held up the message that ends the gap"
TRACES = "all steps of both stored traces"

LEAST_NS = 1_000_000
AT_ONCE_NS = 100_000

Gap = tuple[int, int, str]
FindGaps = Callable[[Timeline], Any]

_HINTS = {
    WHERE: "sort the messages by start; 1 ms is 1_000_000 ns, and counts",
    BESIDE: "merge() the messages first: a short one may lie inside a long one",
    WHY: 'compare the start of the next message with its attributes["launch_ns"]',
    TRACES: "draw your gaps, and look at the first that is wrong",
}


def reference(timeline: Timeline) -> list[Gap]:
    """The course's own."""
    messages = [s for s in timeline.spans if s.kind == "communication"]
    busy = merge((s.start_ns, s.end_ns) for s in messages)
    gaps = []
    for (_, end_ns), (start_ns, _) in pairwise(busy):
        if start_ns - end_ns < LEAST_NS:
            continue
        following = next(s for s in messages if s.start_ns == start_ns)
        waited_ns = start_ns - following.attributes["launch_ns"]
        why = "launch" if waited_ns < AT_ONCE_NS else "gradient"
        gaps.append((end_ns, start_ns, why))
    return gaps


def with_gaps(timeline: Timeline, gaps: Sequence[Gap]) -> Timeline:
    """The timeline with a lane more: the learner's annotations, by their reason."""
    marks = [
        Span(0, f"gap: {why}", "host", why, start_ns, max(start_ns, end_ns))
        for start_ns, end_ns, why in gaps
    ]
    return Timeline.of([*(s for s in timeline.spans if s.lane != CPU_LANE), *marks])


def draw_gaps(annotated: Mapping[str, Timeline]) -> Figure:
    """Timelines that `with_gaps` gave, one under the other."""
    figure = draw_many(annotated, critical_path=False)
    for text in figure.texts:  # what the legend calls a lane of marks
        if text.get_text() == "CPU computes":
            text.set_text("your gaps")
    return figure


def _message(start_us: int, end_us: int, lead_us: int, lane: str = "comm") -> Span:
    return Span(
        0,
        lane,
        "communication",
        "all_reduce",
        1000 * start_us,
        1000 * end_us,
        attributes={"launch_ns": 1000 * (start_us - lead_us)},
    )


def _compute(start_us: int, end_us: int) -> Span:
    return Span(0, "default", "compute", "mm", 1000 * start_us, 1000 * end_us)


CASES: dict[str, Timeline] = {
    WHERE: Timeline.of(
        [
            _compute(0, 2000),
            _message(2000, 2500, 9000),
            _compute(2600, 3400),
            _message(3500, 4000, 9000),
            _message(4999, 6000, 9000),
            _compute(4100, 4900),
            _message(6000, 6500, 9000),
            _compute(6600, 20000),
        ]
    ),
    BESIDE: Timeline.of(
        [
            _message(0, 9000, 9000),
            _message(1000, 2000, 9000, "comm:1"),
            _message(4000, 5000, 9000, "comm:1"),
            _message(12000, 12500, 9000, "comm:1"),
        ]
    ),
    WHY: Timeline.of(
        [
            _message(0, 500, 9000),
            _message(3000, 3500, 15),
            _compute(0, 2995),
            _message(6000, 6500, 2000),
            _message(9000, 9500, 40),
            _compute(3500, 9000),
        ]
    ),
}


@exercise(
    "2.6",
    title="the gaps between messages",
    solution="find_gaps",
    verifies=(WHERE, BESIDE, WHY, TRACES),
    points=3,
    timeout_s=30.0,
)
def grade_gaps(sheet: Sheet, find_gaps: FindGaps) -> None:
    """Three small timelines with a trap each, then the stored traces."""
    sheet.ran("three small timelines, then every step of two traces")
    for sentence, timeline in CASES.items():
        said = _gaps(find_gaps(timeline))
        right = reference(timeline)
        drawn = with_gaps(timeline, said)
        if sentence != WHY:  # here only the places count
            said = [(a, b, "") for a, b, _ in said]
            right = [(a, b, "") for a, b, _ in right]
        if said != right:
            sheet.show(drawn, title="your gaps, on a small timeline")
        _expect(sheet, sentence, timeline, said, right)
        sheet.stop_if_wrong()  # one trap at a time
    for which in ("overlapped, batch 8", "overlapped, batch 2"):
        for number in range(num_steps(which)):
            timeline = trace_step(which, number)
            said = _gaps(find_gaps(timeline))
            right = reference(timeline)
            if said != right:
                sheet.show(with_gaps(timeline, said), title=f"your gaps, {which}")
            _expect(sheet, TRACES, timeline, said, right)


def _expect(
    sheet: Sheet, sentence: str, timeline: Timeline, said: list[Gap], right: list[Gap]
) -> None:
    why_of = {(a, b): why for a, b, why in said}
    places = [(a, b) for a, b, _ in right]
    missing = [gap for gap in right if gap[:2] not in why_of]
    extra = [gap for gap in said if gap[:2] not in places]
    other = [g for g in right if g[:2] in why_of and why_of[g[:2]] != g[2]]
    sheet.expect(
        sentence,
        said == right,
        seen="\n".join(
            [f"{len(said)} gap{'s' * (len(said) != 1)}"]
            + [f"missing from yours: {_text(gap)}" for gap in missing[:2]]
            + [f"yours, but {_fault(timeline, gap)}: {_text(gap)}" for gap in extra[:2]]
            + [_reason(timeline, gap, why_of[gap[:2]]) for gap in other[:2]]
            + (["twice, or in another order"] if not missing + extra + other else [])
        ),
        expected="; ".join(_text(gap) for gap in right[:3])
        + (f"; ... {len(right)} in all" if len(right) > 3 else ""),
        hint=_HINTS[WHY if other and not missing and not extra else sentence],
    )


def _fault(timeline: Timeline, gap: Gap) -> str:
    """Why what a learner reports is no gap."""
    start_ns, end_ns, _ = gap
    sent = [s for s in timeline.spans if s.kind == "communication"]
    if any(s.start_ns < end_ns and start_ns < s.end_ns for s in sent):
        return "a message runs in it"
    if end_ns - start_ns < LEAST_NS:
        return "shorter than 1 ms"
    return "not from the end of a message to the next start"


def _reason(timeline: Timeline, gap: Gap, said: str) -> str:
    """A gap at the right place with the wrong reason."""
    following = next(
        s for s in timeline.spans if s.kind == "communication" and s.start_ns == gap[1]
    )
    before_ms = (gap[1] - following.attributes["launch_ns"]) / 1e6
    return (
        f"{gap[0] / 1e6:g} to {gap[1] / 1e6:g} ms: you say {said!r}, it is {gap[2]!r}: "
        f"the next message was launched {before_ms:.3g} ms before its start"
    )


def _text(gap: Gap) -> str:
    start_ns, end_ns, why = gap
    reason = f", {why!r}" if why else ""
    return f"{start_ns / 1e6:g} to {end_ns / 1e6:g} ms{reason}"


def _gaps(said: object) -> list[Gap]:
    """The answer as triples.

    Raises:
        ValueError: it is something else.
    """
    try:
        gaps = [(int(a), int(b), str(why)) for a, b, why in said]  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"find_gaps returned {said!r:.120}; expected a list of triples "
            "(start_ns, end_ns, why)"
        ) from error
    unknown = {why for _, _, why in gaps} - {"launch", "gradient"}
    if unknown:
        raise ValueError(
            f"find_gaps says {sorted(unknown)}; why is 'launch' or 'gradient'"
        )
    return gaps
