"""The stored traces of this lab: steps of a GPT on two H200s, and times without them.

traces/README.md says where they come from. Spans are the package's own reader's.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from overlaplab.profiling.read import read_trace
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab02.rows import Row

FOLDER = Path(__file__).with_name("traces")
# What each trace is of: gradients in buckets of 100 MiB, or all at once at the end.
TRACES: Mapping[str, str] = {
    "serial, batch 8": "serial_b8.json.gz",
    "overlapped, batch 8": "ours_b8.json.gz",
    "overlapped, batch 2": "ours_b2.json.gz",
}
ON_GPU = ("compute", "communication", "memcpy", "memset")


def path_of(which: str) -> Path:
    """The file of one of `TRACES`.

    Raises:
        ValueError: there is none of that name.
    """
    if which not in TRACES:
        raise ValueError(f"no trace {which!r}; there are {list(TRACES)}")
    return FOLDER / TRACES[which]


@lru_cache(maxsize=8)
def whole_trace(which: str) -> Timeline:
    """All steps of one of `TRACES`, as `ol.read_trace` gives them."""
    return read_trace(path_of(which))


@lru_cache(maxsize=8)
def raw_rows(which: str) -> tuple[Row, ...]:
    """The events of one of `TRACES` as rows, kernels and all others."""
    with gzip.open(path_of(which)) as file:
        events = json.load(file)["traceEvents"]
    first_ns = min(_ns(e["ts"]) for e in events if e.get("ph") == "X")
    return tuple(
        Row(
            e["name"],
            e["cat"],
            _number(e.get("args", {}).get("stream", e["tid"])),
            _ns(e["ts"]) - first_ns,
            _ns(e["ts"]) + _ns(e["dur"]) - first_ns,
            e.get("args", {}),
        )
        for e in events
        if e.get("ph") == "X" and "cat" in e
    )


@lru_cache(maxsize=8)
def whole_steps(which: str) -> Timeline:
    """What the whole steps of one of `TRACES` launched: nothing that leaked in."""
    whole = whole_trace(which)
    return Timeline.of(s for n in whole.steps for s in whole.of_step(n).spans)


@lru_cache(maxsize=8)
def step_rows(which: str) -> tuple[Row, ...]:
    """The rows of one of `TRACES` from the first GPU event of its first whole step on.

    What a step before launched may still run when the profiler starts: it leaks in.
    """
    rows = raw_rows(which)
    kernels = ("compute", "communication")
    whole = min(s.start_ns for s in whole_trace(which).spans if s.kind in kernels)
    steps = min(s.start_ns for s in whole_steps(which).spans if s.kind in ON_GPU)
    first_ns = min(r.start_ns for r in rows if r.category == "kernel") + steps - whole
    return tuple(row for row in rows if row.start_ns >= first_ns)


@lru_cache(maxsize=32)
def trace_step(which: str, number: int = 0, *, cpu: bool = False) -> Timeline:
    """One step of one of `TRACES`: what it launched, from its first GPU event at 0.

    Args:
        number: a learner's; draws one of the steps.
        cpu: keep the CPU's launches too, which may begin long before 0.

    Returns:
        Messages have the attribute "launch_ns": when the CPU began to launch them.
    """
    whole = whole_trace(which)
    step = whole.of_step(whole.steps[int(number) % len(whole.steps)])
    first_ns = min(s.start_ns for s in step.spans if s.kind in ON_GPU)
    kept = [s for s in step.spans if cpu or s.kind in ON_GPU]
    return Timeline.of(_shifted(span, -first_ns) for span in kept)


def traced_ms(which: str) -> float:
    """From the start of a step to that of the next, on the GPU, on average."""
    whole = whole_trace(which)
    starts = [
        min(s.start_ns for s in whole.of_step(n).spans if s.kind in ON_GPU)
        for n in (whole.steps[0], whole.steps[-1])
    ]
    return (starts[1] - starts[0]) / (len(whole.steps) - 1) / 1e6


def num_steps(which: str) -> int:
    """How many steps a trace has."""
    return len(whole_trace(which).steps)


def stored() -> dict[str, Any]:
    """Step times without a profiler, of the same run as the traces."""
    text = (FOLDER / "unprofiled.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def unprofiled_ms(variant: str, batch: int) -> float:
    """The median step of a variant without a profiler: "compute", "serial",
    "overlapped" (buckets of 100 MiB), "overlapped, 25 MiB".
    """
    value: float = stored()["median_ms"][str(batch)][variant]
    return value


def spread_ms(variant: str, batch: int) -> tuple[float, float]:
    """(p10, p90) of the steps of which `unprofiled_ms` is the median."""
    low, high = stored()["p10_to_p90_ms"][str(batch)][variant]
    return low, high


class Paid(NamedTuple):
    """What overlap was worth: of what sending costs at the end, how much is gone.

    Args:
        possible_ms: the serial step less computing alone: what there is to save.
        saved_ms: the serial step less the overlapped one.
    """

    possible_ms: float
    saved_ms: float

    @property
    def percent(self) -> float:
        """Saved of possible."""
        return 100 * self.saved_ms / self.possible_ms


def did_it_pay(batch: int) -> Paid:
    """From medians of three programs that took turns, without a profiler."""
    serial_ms = unprofiled_ms("serial", batch)
    return Paid(
        serial_ms - unprofiled_ms("compute", batch),
        serial_ms - unprofiled_ms("overlapped", batch),
    )


def machine() -> str:
    """Where and when the traces were taken, one line."""
    return "Measured: {num_cards} x {card}, torch {torch}, NCCL {nccl}, {date}".format(
        **stored()
    )


def _shifted(span: Span, by_ns: int) -> Span:
    attributes = dict(span.attributes)
    if "launch_ns" in attributes:
        attributes["launch_ns"] += by_ns
    return replace(
        span,
        start_ns=span.start_ns + by_ns,
        end_ns=span.end_ns + by_ns,
        attributes=attributes,
    )


def _ns(time_us: float) -> int:
    return round(time_us * 1000)


def _number(text: Any) -> int:
    return text if isinstance(text, int) else -1
