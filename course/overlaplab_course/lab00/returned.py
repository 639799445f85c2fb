"""Exercise 0.2: what has happened when `loss.backward()` returns.

The learner's number draws the net. The step is run again and counted; the
counterfactual is the same program, resolved with launches that take twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from overlaplab.cluster.run import run
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab00.runs import (
    GPU,
    is_launch,
    is_on_gpu,
    last_launch_ns,
    model_and_batch,
    train_step,
)

RETURNED = "when backward() returned: the end of the last launch"
LAUNCHED = "how many operators had been launched"
STARTED = "how many had started on the GPU"
FINISHED = "how many had finished"
SLOWER = "how many had finished with launches that take twice as long"

# How to find each number, said where it is wrong.
_HOW: Mapping[str, str] = {
    RETURNED: "the largest .end_ns of a launch span, in us, to within 0.5",
    LAUNCHED: "the number of launch spans",
    STARTED: "compute spans whose .start_ns is not after that moment",
    FINISHED: "compute spans whose .end_ns is not after that moment",
    SLOWER: "the same, in the timeline resolved again, at its own later moment",
}


@dataclass(frozen=True, slots=True)
class Counts:
    """One step, at the moment at which `backward()` returned."""

    returned_us: float
    launched: int
    started: int
    finished: int


def count(timeline: Timeline) -> Counts:
    """Operators of a step whose last launch is the last of its backward pass."""
    now_ns = last_launch_ns(timeline)
    on_gpu = [span for span in timeline.spans if is_on_gpu(span)]
    return Counts(
        returned_us=now_ns / 1000,
        launched=sum(is_launch(span) for span in timeline.spans),
        started=sum(span.start_ns <= now_ns for span in on_gpu),
        finished=sum(span.end_ns <= now_ns for span in on_gpu),
    )


@lru_cache(maxsize=16)
def step_of(number: int) -> tuple[Timeline, Timeline]:
    """The step of a learner's number, and with launches that take twice as long."""
    model, x = model_and_batch(number)
    recorded = run(train_step, model, x, world_size=1, hardware=GPU)
    assert recorded.program is not None
    slower = replace(GPU, launch_ns=2 * GPU.launch_ns)
    return recorded.timeline, resolve(recorded.program, slower)


@exercise(
    "0.2",
    title="what has happened when backward() returns?",
    solution=("my_number", "counts"),
    verifies=(RETURNED, LAUNCHED, STARTED, FINISHED, SLOWER),
    points=2,
    timeout_s=30.0,
)
def grade_counts(sheet: Sheet, my_number: int, counts: Mapping[str, Any]) -> None:
    """Each number alone; a wrong one is told by what was counted in its place."""
    if not isinstance(counts, Mapping):
        raise TypeError(f"counts is {type(counts).__name__}; expected a dict")
    sheet.ran("your step again, on one GPU, and resolved with slower launches")
    timeline, slower = step_of(int(my_number))
    sheet.show(timeline, title="your step; everything is launched where the grey ends")
    right, twice = count(timeline), count(slower)
    total = len([span for span in timeline.spans if is_on_gpu(span)])
    ends_us = timeline.end_ns / 1000
    _compare(
        sheet,
        RETURNED,
        counts,
        "returned_us",
        right.returned_us,
        {
            ends_us: "that is when the GPU has finished; the CPU does not wait for it",
            max(s.start_ns for s in timeline.spans if is_launch(s)) / 1000: (
                "that is when the last launch begins"
            ),
            right.returned_us * 1000: "that is in ns",
        },
    )
    _compare(
        sheet,
        LAUNCHED,
        counts,
        "launched",
        right.launched,
        {
            len(timeline.spans): "that counts launches and kernels together",
            right.launched - 1: "the one that ends at that moment counts too",
        },
    )
    _compare(
        sheet,
        STARTED,
        counts,
        "started",
        right.started,
        {
            total: "a launch is not a start: when does its kernel begin?",
            right.finished: "one is running at that moment: it has started",
            right.started + right.launched: "launch spans are the CPU's, no starts",
        },
    )
    _compare(
        sheet,
        FINISHED,
        counts,
        "finished",
        right.finished,
        {
            total: "that many finish in the end; how many by that moment?",
            right.started: "one of them is still running",
            right.finished + right.launched: "launch spans are the CPU's, no kernels",
        },
    )
    at_old_moment = sum(
        is_on_gpu(span) and span.end_ns <= 1000 * right.returned_us
        for span in slower.spans
    )
    again = "resolve with slower launches, and count at the new moment: it is later"
    _compare(
        sheet,
        SLOWER,
        counts,
        "finished_if_slower",
        twice.finished,
        {
            at_old_moment: again,
            right.finished: again,
            2 * right.finished: "twice the launches' cost is not twice the number",
            total: "that many finish in the end; how many by that moment?",
        },
    )


def _compare(
    sheet: Sheet,
    sentence: str,
    counts: Mapping[str, Any],
    key: str,
    right: float,
    slips: Mapping[float, str],
) -> None:
    said = counts.get(key)
    if isinstance(said, bool) or not isinstance(said, int | float):
        sheet.expect(
            sentence,
            False,
            seen=f"{key!r} is {said!r}" if key in counts else f"there is no {key!r}",
            expected=f"a number: {_HOW[sentence]}",
        )
        return
    wrong = {k: v for k, v in slips.items() if k != right}
    slip = next((v for k, v in wrong.items() if abs(said - k) < 0.5), "")
    sheet.expect(
        sentence,
        bool(abs(said - right) < 0.5),
        seen=f"{key}: {said:g}" + (f"\n{slip}" if slip else ""),
        expected=_HOW[sentence],
    )
