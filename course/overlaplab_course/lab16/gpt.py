"""The GPTs of lab 16, recorded as shapes: one GPU, launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from overlaplab.cluster.run import Run, run
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.timeline import Memory, Timeline
from overlaplab.timeline.span import MEMORY_KINDS
from overlaplab_course import stored

MIB = 2**20
# The step is captured in a CUDA graph.
CAPTURED: Hardware = replace(
    find_hardware("h200-nvlink"),
    name="h200, captured",
    launch_ns=0,
    collective_launch_ns=0,
)


def record(train: Callable[..., Any], *args: Any) -> Run:
    """`train(*args)` on one GPU, shapes only."""
    options: dict[str, Any] = {"world_size": 1, "hardware": CAPTURED}
    return run(train, *args, fake=True, timeout_s=120, **options)


def peak_mib(timeline: Timeline) -> float:
    """The most that lives at once."""
    (memory,) = timeline.memory
    return memory.peak_bytes / MIB


def peak_percent(timeline: Timeline) -> float:
    """How far through the step the peak is."""
    (memory,) = timeline.memory
    return 100 * (memory.peak_ns - timeline.start_ns) / timeline.step_ns


def _runs_at_peak(timeline: Timeline) -> str:
    """What runs there: the operator, and the part of the step that it is in."""
    (memory,) = timeline.memory
    at = [s for s in timeline.spans if s.start_ns <= memory.peak_ns < s.end_ns]
    return f"{at[0].name}, {at[0].attributes.get('label')}" if at else "the end"


def _kinds(memory: Memory) -> dict[str, float]:
    return {kind: size / MIB for kind, size in memory.kinds_at(memory.peak_ns)}


def peaks_table(steps: Mapping[str, Timeline]) -> str:
    """Of each step the peak in MiB, what holds it, and when it is."""
    every = {name: _kinds(step.memory[0]) for name, step in steps.items()}
    kinds = [k for k in MEMORY_KINDS if any(r.get(k, 0) >= 0.5 for r in every.values())]
    rows = [
        (
            name,
            f"{peak_mib(step):.0f}",
            *(f"{every[name].get(kind, 0):.0f}" for kind in kinds),
            f"{peak_percent(step):.0f} %",
        )
        for name, step in steps.items()
    ]
    table = stored.text_table(("MiB at the peak", "all", *kinds, "of the step"), rows)
    run = [f"{name}: {_runs_at_peak(step)}" for name, step in steps.items()]
    return "\n".join([table, "", "What runs then:", *run])


def part_ms(timeline: Timeline, *parts: str) -> float:
    """What the kernels of some parts of a step take."""
    kernels = [s for s in timeline.spans if s.kind == "compute"]
    chosen = [s for s in kernels if s.attributes.get("label") in parts]
    return sum(s.duration_ns for s in chosen) / 1e6


def most_mib(timeline: Timeline, kind: str = "activations") -> float:
    """The most of one kind at any time."""
    (memory,) = timeline.memory
    return max(dict(memory.kinds)[kind]) / MIB


def bill_table(plain: Timeline, again: Timeline) -> str:
    """Activations and time of two steps, and the second relative to the first."""
    steps, both = (plain, again), ("forward", "backward")
    numbers = {
        "most activations, MiB": [most_mib(s) for s in steps],
        "peak, MiB": [peak_mib(s) for s in steps],
        "forward, ms": [part_ms(s, "forward") for s in steps],
        "backward, ms": [part_ms(s, "backward") for s in steps],
        "forward and backward, ms": [part_ms(s, *both) for s in steps],
        "step with optimizer, ms": [s.step_ns / 1e6 for s in steps],
    }
    rows = [
        (
            what,
            *(f"{x:.0f}" if "MiB" in what else f"{x:.2f}" for x in (a, b)),
            f"{b / a:.2f}",
        )
        for what, (a, b) in numbers.items()
    ]
    return stored.text_table(("", "kept", "computed again", "ratio"), rows)
