"""What lab 02 shows: true times, numbers of real steps, gaps, stored measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from matplotlib.figure import Figure

from overlaplab.timeline import CPU_LANE, Span, Timeline
from overlaplab.view import draw_many
from overlaplab_course import stored
from overlaplab_course.lab02 import given
from overlaplab_course.lab02.given import first_ns, messages_of, whole_trace


@lru_cache(maxsize=8)
def true_ms(kind: str) -> float:
    """The time of a typical step of `kind`."""
    from overlaplab_course.lab02 import reference  # not before it is needed

    value: float = given.time_with(reference.time_step, kind).value[0]
    return value


def read(step: Timeline) -> dict[str, float]:
    """The right numbers of 2.5, from the spans of one step that starts at 0."""
    messages = messages_of(step)
    compute = [s for s in step.spans if s.kind == "compute"]
    first, last = messages[0], max(messages, key=lambda s: s.end_ns)
    computed_ns = max(s.end_ns for s in compute)
    backward = next(s for s in compute if "backward" in s.name)
    return {
        "backward_ms": backward.start_ns / 1e6,
        "first_ms": first.start_ns / 1e6,
        "lead_ms": (first.start_ns - first.attributes["launch_ns"]) / 1e6,
        "tail_ms": (last.end_ns - max(computed_ns, last.start_ns)) / 1e6,
        "tail_mib": last.bytes / 2**20,
    }


def with_gaps(timeline: Timeline, gaps: Sequence[tuple[int, int, str]]) -> Timeline:
    """The timeline with one lane more: the learner's annotations, by their reason."""
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


def pay(serial: Timeline, overlapped: Timeline) -> dict[str, float]:
    """The right numbers of 2.7, and one that nobody is asked for ("alone_ratio").

    The kernels of these steps run one at a time, so that the two parts of "longer" add
    up to the difference of the compute times.
    """
    before, after = serial.report(), overlapped.report()
    found = {
        "hidden_ms": after.hidden_ns / 1e6,
        "saved_ms": (before.step_ns - after.step_ns) / 1e6,
        "messages_ms": (after.communication_ns - before.communication_ns) / 1e6,
    }
    for name, touched in (("beside", True), ("alone", False)):
        chosen = [(a, b) for a, b, t in given.pairs(serial, overlapped) if t is touched]
        before_ns = sum(a.duration_ns for a, _ in chosen)
        after_ns = sum(b.duration_ns for _, b in chosen)
        found[f"{name}_ms"] = (after_ns - before_ns) / 1e6
        found[f"{name}_ratio"] = after_ns / before_ns
    return found


# -- times without a profiler, of the run that gave the traces


def traced_ms(which: str) -> float:
    """From the start of a step to that of the next, on the GPU, on average."""
    whole = whole_trace(which)
    first, last = (first_ns(whole.of_step(whole.steps[i])) for i in (0, -1))
    return (last - first) / (len(whole.steps) - 1) / 1e6


_UNPROFILED = json.loads((given.FOLDER / "unprofiled.json").read_text("utf-8"))


def unprofiled_ms(variant: str, batch: int) -> float:
    """The median step of a variant without a profiler: "compute", "serial",
    "overlapped" (buckets of 100 MiB), "overlapped, 25 MiB".
    """
    value: float = _UNPROFILED["median_ms"][str(batch)][variant]
    return value


def spread_ms(variant: str, batch: int) -> tuple[float, float]:
    """(p10, p90) of the steps of which `unprofiled_ms` is the median."""
    low, high = _UNPROFILED["p10_to_p90_ms"][str(batch)][variant]
    return low, high


class Paid(NamedTuple):
    """What overlap was worth: of what sending costs at the end, how much is gone."""

    possible_ms: float  # the serial step less computing alone: what there is to save
    saved_ms: float  # the serial step less the overlapped one
    percent: float  # saved of possible


def did_it_pay(batch: int) -> Paid:
    """From medians of three programs that took turns, without a profiler."""
    compute_ms, serial_ms, overlapped_ms = (
        unprofiled_ms(variant, batch) for variant in ("compute", "serial", "overlapped")
    )
    possible_ms, saved_ms = serial_ms - compute_ms, serial_ms - overlapped_ms
    return Paid(possible_ms, saved_ms, 100 * saved_ms / possible_ms)


def machine() -> str:
    """Where and when the traces were taken, one line."""
    found = {**_UNPROFILED, "world_size": _UNPROFILED["num_cards"]}
    return f"Measured: {stored.machine(found)}"


@stored.shown("02")
def on_gpus(found: stored.Stored) -> list[str]:
    """What each stopwatch said, and what moves a step's time: what `measure` stored."""
    head = ("around", "wait each", "events")
    rows = [["ms per step", *head]]
    for kind, said in found["stopwatches"].items():
        row = "{} ({} + {})".format(kind, *found["kinds"][kind])
        rows.append([row, *(f"{said[name]:.2f}" for name in head)])
    group, waits = found["new groups"]["made by the first call"], found["waits"]
    firsts = {"step of the process": found["first steps"]}
    firsts |= {} if "error" in group else {"message of a new group": group["calls"]}
    factor = waits["a wait after each operator"] / waits["as it is"]
    return [
        *stored.columns(rows),
        "(small products of {small} + large of {large}, bfloat16; {mib} MiB)\n".format(
            **found["sizes"]
        ),
        *(
            f"first {what}: {ms[0]:.1f} ms; the tenth: {ms[9]:.2f}"
            for what, ms in firsts.items()
        ),
        f"small first, a wait after each operator: x {factor:.2f}",
        *(
            f"{kind}, in ol.profile(): x {modes['kineto']['step_ratio']:.2f}; "
            f"with events=True: x {modes['events']['step_ratio']:.2f}"
            for kind, modes in found["profiles"].items()
        ),
        f"\n{stored.machine(found)}; medians, the slowest rank's.",
        f"On two GPUs or more: {stored.command('02')}",
    ]
