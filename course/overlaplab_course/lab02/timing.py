"""Exercise 2.1: the time of a step, by a program that times itself.

Four training steps, each with one trap and no other, so that a stopwatch that falls
into one is refused by that trap's sentence.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab_course.lab02.stopwatch import Timed, run_timed

Step = Callable[[], None]
TimeStep = Callable[[Step], Any]

GPU_TIME = "it is the time of the GPU's step, not of its launches"
WARM_UP = "what only the first three calls do is not in it"
AHEAD = "the CPU runs ahead while it measures, as it does in training"
TYPICAL = "it is the typical step: odd ones do not move it"

WARM_UP_CALLS = 3
LEAST_STEPS = 10
# A start from an idle GPU, spread over twenty steps, costs 2 % here.
TOLERANCE = 0.03

# Which products each step launches: (number, width), small ones first.
_LARGE, _SMALL = 64, 8
_SHAPES: Mapping[str, tuple[tuple[int, int], ...]] = {
    "steady": ((10, _LARGE),),
    "cold": ((10, _LARGE),),
    "small first": ((24, _SMALL), (20, _LARGE)),
    "odd": ((10, _LARGE),),
    "training": ((12, _SMALL), (14, _LARGE)),
}
_HINTS: Mapping[str, str] = {
    GPU_TIME: "a launch is not a start: let the GPU take the times, with events",
    WARM_UP: f"call step() {WARM_UP_CALLS} times before the first event",
    AHEAD: "record all events first, wait once at the end, read them then",
    TYPICAL: "the median of the steps, one by one; a mean or a minimum is moved",
}
_WHY: Mapping[str, str] = {
    GPU_TIME: "steady: every step is the same, and the GPU needs longer than its "
    "launches",
    WARM_UP: f"cold: the first {WARM_UP_CALLS} calls do more, as set-up does",
    AHEAD: "small first: each step begins with small kernels, which a CPU that is "
    "ahead has launched in time",
    TYPICAL: "odd: one step in seven takes five times as long, one does nothing",
}
_FIXTURES: Mapping[str, str] = {
    GPU_TIME: "steady",
    WARM_UP: "cold",
    AHEAD: "small first",
    TYPICAL: "odd",
}


def make_step(kind: str) -> Step:
    """A training step of one rank, in miniature: products, then a message.

    Args:
        kind: "steady", "cold", "small first", "odd", or "training", which is cold,
            begins with small kernels and has odd steps.
    """
    with _disable_current_modes():
        inputs = {width: torch.eye(width) for width in (_LARGE, _SMALL)}
        gradient = torch.ones(256, 256)
    calls = 0

    def step() -> None:
        nonlocal calls
        calls += 1
        times = 1
        if kind in ("cold", "training") and calls <= WARM_UP_CALLS:
            times = 4  # communicators are set up, kernels are tried out
        elif kind in ("odd", "training") and calls % 7 == 5:
            times = 5  # a checkpoint is written
        elif kind in ("odd", "training") and calls % 7 == 0:
            return  # a step that is skipped
        for _ in range(times):
            for number, width in _SHAPES[kind]:
                for _ in range(number):
                    _ = inputs[width] @ inputs[width]
        dist.all_reduce(gradient)

    return step


def time_with(time_step: TimeStep, kind: str = "training") -> Timed:
    """Let `time_step(step)` time a step on two ranks of the virtual cluster.

    Args:
        kind: of step, as `make_step` takes it.

    Returns:
        What it said, on rank 0, and the run.
    """
    return run_timed(_program, time_step, kind)


def _program(time_step: TimeStep, kind: str) -> tuple[Any, int]:
    step = make_step(kind)
    calls = 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        step()

    return time_step(counted), calls


def reference(step: Step, num_steps: int = 20) -> float:
    """The course's own: an event between any two steps, read at the end."""
    for _ in range(WARM_UP_CALLS):
        step()
    events = [streams.Event(enable_timing=True) for _ in range(num_steps + 1)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    streams.synchronize()
    times: list[float] = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(times)


@lru_cache(maxsize=8)
def true_ms(kind: str) -> float:
    """The time of a typical step of `kind`."""
    value: float = time_with(reference, kind).value[0]
    return value


@exercise(
    "2.1",
    title="time a step",
    solution="time_step",
    verifies=(GPU_TIME, WARM_UP, AHEAD, TYPICAL),
    points=3,
    timeout_s=120.0,
)
def grade_timing(sheet: Sheet, time_step: TimeStep) -> None:
    """Each trap alone: what the stopwatch says, against the step as it was."""
    for sentence, kind in _FIXTURES.items():
        sheet.ran(f"your stopwatch, on a step called {kind!r}, on 2 ranks")
        timed = time_with(time_step, kind)
        said, calls = timed.value
        if isinstance(said, bool) or not isinstance(said, int | float):
            raise TypeError(
                f"time_step returned {said!r:.80}; expected a number, in ms"
            )
        if calls:
            sheet.show(timed.timeline.of_rank(0), title=f"your stopwatch on {kind!r}")
        right_ms = true_ms(kind)
        enough = calls >= WARM_UP_CALLS + LEAST_STEPS
        off = abs(said / right_ms - 1)
        seen = f"{said:.4g} ms" + _slip(said, right_ms, kind)
        if not enough:
            seen = f"step was called {calls} times"
        sheet.expect(
            sentence,
            enough and off <= TOLERANCE,
            seen=seen,
            expected=(
                f"{right_ms:.4g} ms, within {100 * TOLERANCE:.0f} %\n{_WHY[sentence]}"
                if enough
                else f"{WARM_UP_CALLS} calls that warm up, {LEAST_STEPS} or more timed"
            ),
            hint=_HINTS[sentence],
        )
        sheet.stop_if_wrong()


def _slip(said: float, right_ms: float, kind: str) -> str:
    """What a wrong number probably is."""
    if abs(said * 1e3 / right_ms - 1) < TOLERANCE:
        return "\nthat is in seconds"
    if abs(said / (1e3 * right_ms) - 1) < TOLERANCE:
        return "\nthat is in microseconds"
    if said <= 0:
        return "\nno time at all: are both events on the stream that computes?"
    if kind == "steady" and said < right_ms:
        return "\nshorter than the GPU's work: whose clock is that?"
    return ""
