"""What lab 06 draws and prints: sweeps of bucket sizes, stored measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from overlaplab.hardware import Hardware
from overlaplab.program import Program, replay
from overlaplab.timeline import Timeline
from overlaplab.view.colors import INK
from overlaplab.view.stacking import Picture
from overlaplab.view.units import share_text
from overlaplab_course import stored
from overlaplab_course.drawing import LINES, PALE, in_words, legend, quiet_axes
from overlaplab_course.lab06.given import MIB


def shares_text(timeline: Timeline) -> str:
    """The shares of the critical path, in the percents of `view.table`."""
    return share_text(timeline.critical_path().shares_ns)


def one_message(
    timeline: Timeline, program: Program
) -> tuple[Timeline, tuple[int, int]]:
    """The timeline with messages called by their gradients; when its widest is sent."""
    names = {
        op.index: op.collective.payload[0].name
        for op in program.ranks[0]
        if op.collective is not None and op.collective.payload
    }
    spans = tuple(
        replace(s, attributes={**s.attributes, "label": names[s.attributes["op"]]})
        if s.attributes.get("op") in names and s.kind == "communication"
        else s
        for s in timeline.spans
    )
    middle_ns = timeline.start_ns + timeline.step_ns // 2
    near = [s for s in spans if s.kind == "communication" and s.end_ns > middle_ns]
    widest = max(near[:8], key=lambda s: s.duration_ns)
    return replace(timeline, spans=spans), (widest.start_ns, widest.end_ns)


def gradient_bytes(program: Program) -> list[int]:
    """The size of each gradient of the recorded step, in the order of arrival."""
    sent = (op.collective for op in program.ranks[0] if op.collective is not None)
    return [tensor.bytes for collective in sent for tensor in collective.payload]


def backward_ns(timeline: Timeline) -> int:
    """From the start of the first backward kernel to the end of the last."""
    spans = [
        span
        for span in timeline.spans
        if span.kind == "compute" and span.attributes.get("phase") == "backward"
    ]
    return max(s.end_ns for s in spans) - min(s.start_ns for s in spans)


def sweep(
    program: Program, hardware: Hardware, bucket_mib: Sequence[float]
) -> dict[float, int]:
    """The step in nanoseconds for each bucket size; `inf` is one message for all."""
    total = sum(gradient_bytes(program))
    caps = {mib: int(min(mib * MIB, total)) for mib in bucket_mib}
    return {
        mib: replay(program, hardware=hardware, buckets=cap).step_ns
        for mib, cap in caps.items()
    }


def valley(steps: Mapping[float, int], within: float = 0.02) -> tuple[float, float]:
    """The smallest and the largest size whose step is within 2 % of the best."""
    best = min(steps.values())
    good = [mib for mib, step_ns in steps.items() if step_ns <= (1 + within) * best]
    return min(good), max(good)


def draw_valleys(
    sweeps: Mapping[str, Mapping[float, int]],
    stars: Mapping[str, tuple[float, int]] | None = None,
) -> Figure:
    """Step over bucket size, each relative to its own best; stars: size and step."""
    lines = {
        name: [(size, step / min(steps.values())) for size, step in steps.items()]
        for name, steps in sweeps.items()
    }
    across, up = "bucket size (MiB)", "step / best step"
    figure = Picture(alt=in_words(lines, across, up), figsize=(9, 3.4))
    ax = quiet_axes(figure, (0.08, 0.16, 0.62, 0.76), across, up)
    styles = ("o-", "s--", "^-.", "d:")
    for (name, points), color, style in zip(lines.items(), LINES, styles, strict=False):
        sizes, relative = zip(*points, strict=True)
        ax.plot(sizes, relative, style, color=color, label=name, markersize=5)
        if stars and name in stars:
            size, step = stars[name]
            at_star = step / min(sweeps[name].values())
            face: Any = {"markerfacecolor": color, "markeredgecolor": INK}
            ax.plot([size], [at_star], "*", markersize=15, zorder=5, **face)
    ax.axhspan(1.0, 1.02, color=PALE, zorder=0)
    ax.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_ylim(0.99, 0.02 + max(y for points in lines.values() for _, y in points))
    legend(figure, 0.71)
    return figure


# -- stored measurements, with card and versions


def _read(table: str) -> dict[str, Any]:
    found = stored.read("06")
    assert found is not None
    entry: dict[str, Any] = found[table]
    return entry


def message_points() -> dict[float, float]:
    """MiB to microseconds of one all-reduce, measured."""
    return dict(_read("all_reduce_alone")["mib_to_us"])


def machine(table: str) -> str:
    """The machine on which a stored table was measured, one line."""
    return stored.machine(_read(table))


class Measured:
    """A stored table: "data_parallel", "ends", "hidden" or "benchmark".

    It prints with what was measured, how, and on which machine.
    """

    def __init__(self, table: str) -> None:
        self._entry = _read(table)

    def lines(self, first: str = "", form: str = "", but: str = "") -> list[str]:
        """Head and rows; without the row `but`."""
        cells = (
            (name, *("-" if n is None else format(n, form) for n in numbers))
            for name, *numbers in self._entry["rows"]
            if name != but
        )
        return stored.columns([(first, *self._entry["columns"]), *cells])

    def __repr__(self) -> str:
        measured = f"Measured: {self._entry['source']}."
        return "\n".join([*self.lines(), measured, stored.machine(self._entry)])

    def number(self, row: str, column: str) -> float:
        """The number of the first row whose name begins with `row`."""
        place = self._entry["columns"].index(column)
        for name, *numbers in self._entry["rows"]:
            number: float | None = numbers[place]
            if name.startswith(row) and number is not None:
                return number
        raise KeyError(f"no number for {row!r}, {column!r}")


measured = Measured


def stored_benchmarks() -> list[str]:
    """What `python -m overlaplab.bench data-parallel` stored: lines to print.

    Median ms of a step by variant and batch size; all numbers are of one run.
    """
    head = _read("benchmark")["source"]
    lines = Measured("benchmark").lines(head, ".1f", but="compute captured")
    return [machine("benchmark"), *lines]


def stored_ms(variant: str, batch: int) -> float:
    """Median ms per step of the stored benchmark."""
    return measured("benchmark").number(variant, f"batch {batch}")


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    return stored.measure_it_here("python -m overlaplab.bench data-parallel --quick")
