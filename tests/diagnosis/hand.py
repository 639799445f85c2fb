"""Timelines made by hand: a line a span, times in microseconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from overlaplab.timeline import CPU_LANE, Source, Span, Timeline

MIB = 2**20


def span(
    rank: int,
    lane: str,
    kind: str,
    name: str,
    start_us: float,
    end_us: float,
    **more: Any,
) -> Span:
    """A span; `launch` is the moment of its launch in us, `bytes` its size."""
    size = more.pop("bytes", 0)
    if "launch" in more:
        more["launch_ns"] = round(more.pop("launch") * 1000)
    start_ns, end_ns = round(start_us * 1000), round(end_us * 1000)
    return Span(rank, lane, kind, name, start_ns, end_ns, bytes=size, attributes=more)  # type: ignore[arg-type]


def compute(start_us: float, end_us: float, *, rank: int = 0, **more: Any) -> Span:
    """A kernel on the default stream."""
    name = more.pop("name", "mm")
    return span(rank, "default", "compute", name, start_us, end_us, **more)


def send(start_us: float, end_us: float, *, rank: int = 0, **more: Any) -> Span:
    """A collective of 25 MiB, if nothing else is said."""
    more.setdefault("bytes", 25 * MIB)
    name, lane = more.pop("name", "all_reduce"), more.pop("lane", "comm")
    return span(rank, lane, "communication", name, start_us, end_us, **more)


def copy(start_us: float, end_us: float, *, rank: int = 0, **more: Any) -> Span:
    return span(rank, "default", "memcpy", "memcpy", start_us, end_us, **more)


def launch(start_us: float, end_us: float, *, rank: int = 0, **more: Any) -> Span:
    return span(rank, CPU_LANE, "launch", "launch mm", start_us, end_us, **more)


def wait(start_us: float, end_us: float, *, rank: int = 0, name: str = "item") -> Span:
    return span(rank, CPU_LANE, "host", f"wait {name}", start_us, end_us)


def timeline(*spans: Span, device: str = "") -> Timeline:
    made = Timeline.of(spans)
    if not device:
        return made
    ranks = sorted({s.rank for s in spans})
    source = Source(devices=tuple((rank, device) for rank in ranks))
    return dataclasses.replace(made, source=source)
