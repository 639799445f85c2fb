"""Extra 2.8a: a profiler whose events can see no overlap. It is to be repaired.

Truth is the timeline of the very run in which the learner's events took the times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import Timeline
from overlaplab_course.lab02.stopwatch import Timed, run_timed

COMPUTE = "compute_ms is the time of the products"
MESSAGE = "communication_ms is the time of the message, however much of it is hidden"
HIDDEN = "hidden_ms is the time in which both run"
ONCE = "there is one message, as without a profiler"
UNDISTURBED = "the step is as long as without a profiler"

KEYS = ("compute_ms", "communication_ms", "hidden_ms")
TOLERANCE = 0.03
# (products, elements of the message): hidden in full, for the most part, for the less.
CASES = ((8, 256 * 256), (8, 1024 * 1024), (3, 1024 * 1024))

Part = Callable[[], Any]
ProfileStep = Callable[[Part, Part], Mapping[str, float]]

_HINTS = {
    COMPUTE: "its two events stand on the stream that computes, around compute()",
    MESSAGE: "its two events need a stream of their own, on which work.wait() waits; "
    "and that stream must first wait for the current one, or its first event is taken "
    "long before the message can start",
    HIDDEN: "from the later of the two starts to the earlier of the two ends",
    ONCE: "call send() once, and time that one",
    UNDISTURBED: "nothing may wait between send() and compute(); read the times last",
}


def _program(profile_step: ProfileStep, num_products: int, num_elements: int) -> Any:
    """A step with a queue before it: the CPU is ahead, as in training."""
    with _disable_current_modes():
        a = torch.eye(64)
        gradient = torch.ones(num_elements)
    for _ in range(12):
        _ = a @ a
    calls = {"compute": 0, "send": 0}

    def compute() -> None:
        calls["compute"] += 1
        with streams.annotate("compute"):
            for _ in range(num_products):
                _ = a @ a

    def send() -> Any:
        calls["send"] += 1
        with streams.annotate("send"):
            return dist.all_reduce(gradient, async_op=True)

    said = profile_step(compute, send)
    streams.synchronize()
    return said, calls


def plain_step(compute: Part, send: Part) -> Mapping[str, float]:
    """The step without any profiler."""
    work = send()
    compute()
    work.wait()
    return {}


def broken_profile(compute: Part, send: Part) -> Mapping[str, float]:
    """As the lesson hands it out (a test holds the two together)."""
    begin, computed, sending, sent = (
        streams.Event(enable_timing=True) for _ in range(4)
    )
    begin.record()
    work = send()
    compute()
    computed.record()
    sending.record()
    work.wait()
    sent.record()
    streams.synchronize()
    hidden_ms = max(0.0, sending.elapsed_time(computed))
    return {
        "compute_ms": begin.elapsed_time(computed),
        "communication_ms": sending.elapsed_time(sent),
        "hidden_ms": hidden_ms,
    }


def reference(compute: Part, send: Part) -> Mapping[str, float]:
    """The course's own: the message's events on a stream that waits for it."""
    begin, computed, sending, sent = (
        streams.Event(enable_timing=True) for _ in range(4)
    )
    main, side = streams.current_stream(), streams.Stream()
    side.wait_stream(main)
    begin.record()
    with streams.stream(side):
        sending.record()
        work = send()
        work.wait()
        sent.record()
    compute()
    computed.record()
    main.wait_stream(side)
    streams.synchronize()
    compute_ms = begin.elapsed_time(computed)
    communication_ms = sending.elapsed_time(sent)
    return {
        "compute_ms": compute_ms,
        "communication_ms": communication_ms,
        "hidden_ms": min(compute_ms, communication_ms),
    }


def profile_with(profile_step: ProfileStep, case: int = 1) -> Timed:
    """Let a profiler time one of the three steps, on two ranks."""
    return run_timed(_program, profile_step, *CASES[case])


def truth(timeline: Timeline) -> dict[str, float]:
    """What happened on rank 0, of the labelled parts, in ms."""
    own = timeline.where(
        lambda s: (
            s.rank == 0
            and s.kind in ("compute", "communication")
            and s.attributes.get("label") in ("compute", "send")
        )
    ).report()
    return {
        "compute_ms": own.compute_ns / 1e6,
        "communication_ms": own.communication_ns / 1e6,
        "hidden_ms": own.hidden_ns / 1e6,
    }


@lru_cache(maxsize=4)
def plain_ms(case: int) -> float:
    """How long the run takes without a profiler."""
    return profile_with(plain_step, case).timeline.end_ns / 1e6


@exercise(
    "2.8a",
    title="a profiler that sees no overlap",
    solution="profile_step",
    verifies=(COMPUTE, MESSAGE, HIDDEN, ONCE, UNDISTURBED),
    points=2,
    timeout_s=120.0,
    optional=True,
)
def grade_profile_step(sheet: Sheet, profile_step: ProfileStep) -> None:
    """What it says against what happened; what happened against the plain step."""
    for case, (num_products, num_elements) in enumerate(CASES):
        size = num_elements * 4 // 2**10
        sheet.ran(f"{num_products} products beside a message of {size} KiB, on 2 ranks")
        timed = profile_with(profile_step, case)
        said, calls = timed.value
        sheet.show(timed.timeline.of_rank(0), title="your profiler's step")
        if not isinstance(said, Mapping) or not all(key in said for key in KEYS):
            raise TypeError(
                f"profile_step returned {said!r:.80}; expected a dict, keys {KEYS}"
            )
        sheet.expect(
            ONCE,
            calls == {"compute": 1, "send": 1},
            seen=f"send() was called {calls['send']} times, "
            f"compute() {calls['compute']} times",
            expected="once each",
            hint=_HINTS[ONCE],
        )
        ms, plain = timed.timeline.end_ns / 1e6, plain_ms(case)
        sheet.expect(
            UNDISTURBED,
            ms <= 1.02 * plain,
            seen=f"{ms:.3f} ms",
            expected=f"{plain:.3f} ms, or 2 % more",
            hint=_HINTS[UNDISTURBED],
        )
        right = truth(timed.timeline)
        sentences = (COMPUTE, MESSAGE, HIDDEN)
        for sentence, key in zip(sentences, KEYS, strict=True):
            value = float(said[key])
            sheet.expect(
                sentence,
                abs(value - right[key]) <= TOLERANCE * right[key],
                seen=f"{key}: {value:.4g}",
                expected=f"{right[key]:.4g}, within {100 * TOLERANCE:.0f} %",
                hint=_HINTS[sentence],
            )
        sheet.stop_if_wrong()
