"""HTA's overlap, computed from our timeline by HTA's rules, one rule after another.

Why two tools print two numbers for one trace is then a computation: each rule alone
moves ours by so much, and all of them give what HTA prints. The rules are those of
HTA 0.5.0 (hta/common/trace.py, hta/common/trace_parser.py, hta/utils/utils.py).
Knows timelines only, neither files nor HTA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import Interval, intersect, merge, total

# An answer of HTA's is a percentage with two places.
HALF_A_PLACE = 0.005
_COMMUNICATES = re.compile(r"nccl.*Kernel")
_COPIES = re.compile(r"Memcpy|Memset|dma")
_COMPUTES_NOT = re.compile(r".*Memcpy|Memset|.*Sync")


@dataclass(frozen=True)
class Step:
    """The overlap after one more of HTA's rules.

    Args:
        rule: in words.
        percent: of communication that is hidden; None if there is none.
    """

    rule: str
    percent: float | None


def explain(
    timeline: Timeline,
    rank: int,
    *,
    all_steps: bool = False,
    device_steps: Sequence[Interval] = (),
) -> list[Step]:
    """Ours, then each of HTA's rules on top of those before it; the last is HTA's.

    Args:
        timeline: of `read_trace`: its spans know "kernel", "step" and "launch_ns",
            its source what the trace's clock showed at 0.
        rank: whose.
        all_steps: HTA's `include_last_profiler_step=True`.
        device_steps: the marks of the steps in the GPU's rows, on the trace's clock.
            They have no stream, so HTA takes them for the CPU's.
    """
    spans = [s for s in timeline.spans if s.rank == rank]
    zero_ns = timeline.source.zero_ns
    ours = timeline.of_rank(rank).report().ranks[0].overlap_fraction
    steps = [Step("ours", None if ours is None else 100 * ours)]
    spans = list(_by_name(spans))
    steps.append(Step("names of kernels", _percent(spans, merge)))
    if len(timeline.steps) > 1:  # HTA filters nothing where there is only one
        spans = [s for s in spans if "launch_ns" in s.attributes]
        steps.append(Step("only what has a launch", _percent(spans, merge)))
        last = _launches(timeline.steps[-1], spans)
        marks = [(a - zero_ns, b - zero_ns) for a, b in device_steps]
        if all_steps:
            ends = [*last[-1:], *(end for _, end in marks)]
            spans = [s for s in spans if not ends or _launch(s) <= max(ends)]
            steps.append(Step("nothing after the last step", _percent(spans, merge)))
        else:
            begins = [*last[:1], *(begin for begin, _ in marks)]
            spans = [s for s in spans if not begins or _launch(s) < max(begins)]
            steps.append(Step("without the last step", _percent(spans, merge)))
    rounded = _percent(spans, lambda i: _unions(_whole_us(i, zero_ns)))
    return [*steps, Step("whole microseconds", rounded)]


def agrees(steps: Sequence[Step], printed: float | None) -> bool:
    """Whether the last step is the percentage that HTA printed (None for its NaN)."""
    computed = steps[-1].percent
    if computed is None or printed is None:
        return computed is printed
    return abs(computed - printed) <= HALF_A_PLACE + 1e-9


def _by_name(spans: Iterable[Span]) -> Iterable[Span]:
    """Kernels with the kind that HTA gives to their names; nothing else."""
    for span in spans:
        kernel = span.attributes.get("kernel")
        if span.kind not in ("compute", "communication") or kernel is None:
            continue
        if _COMMUNICATES.match(kernel):
            yield replace(span, kind="communication")
        elif not _COPIES.match(kernel) and not _COMPUTES_NOT.match(kernel):
            yield replace(span, kind="compute")


def _launch(span: Span) -> int:
    launch_ns: int = span.attributes["launch_ns"]
    return launch_ns


def _launches(step: int, spans: Sequence[Span]) -> list[int]:
    """When the kernels of a step were launched.

    The timeline has no span for the step itself: its first launch stands for its
    begin and its last for its end, which differs for no kernel.
    """
    return sorted(_launch(s) for s in spans if s.attributes.get("step") == step)


def _percent(
    spans: Sequence[Span], unions: Callable[[Iterable[Interval]], list[Interval]]
) -> float | None:
    compute, communication = (
        unions((s.start_ns, s.end_ns) for s in spans if s.kind == kind)
        for kind in ("compute", "communication")
    )
    hidden = intersect(_positive(compute), _positive(communication))
    length = total(communication)
    return 100 * total(hidden) / length if length else None


def _whole_us(intervals: Iterable[Interval], zero_ns: int) -> Iterable[Interval]:
    """Starts rounded up, ends down, on the trace's own clock: short ones turn over."""
    for start, end in intervals:
        yield -(-(start + zero_ns) // 1000) * 1000, (end + zero_ns) // 1000 * 1000


def _unions(intervals: Iterable[Interval]) -> list[Interval]:
    """HTA's union: one that ends before it starts stays, with its negative length."""
    groups: list[Interval] = []
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            groups.append((start, end))
        else:
            groups[-1] = (groups[-1][0], max(groups[-1][1], end))
        reached = end if reached is None else max(reached, end)
    return groups


def _positive(intervals: Iterable[Interval]) -> list[Interval]:
    return [(start, end) for start, end in intervals if start < end]
