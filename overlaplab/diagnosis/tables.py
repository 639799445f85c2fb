"""The tables of a diagnosis: rows of text, for a terminal and for a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.result import Result
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import gb_per_s, short
from overlaplab.view import Table
from overlaplab.view.units import decimals, format_bytes, format_ns, time_unit

_AFTER = {"the previous collective": "the one before", "nothing": "nothing known"}
MOST_ROWS = 16  # of ranks; more are the slowest ones


def numbers(result: Result) -> Table:
    """One row a rank, of the step that is described."""
    steps = list(result.case.representative)
    note = ""
    if len(steps) > MOST_ROWS:
        shown = sorted(steps, key=lambda s: -s.step_ns)[:MOST_ROWS]
        note = f"The {MOST_ROWS} slowest of {len(steps)} ranks. "
        steps = sorted(shown, key=lambda s: s.rank)
    if steps and steps[0].step is not None:
        every = [s.step_ns for s in result.case.steps]
        note += (
            f"Step {steps[0].step}, the slowest rank's step of median length; "
            f"all steps: {format_ns(min(every))} to {format_ns(max(every))}."
        )
    return _numbers_of(steps, note)


def every_step(result: Result) -> Table:
    """One row a rank and step."""
    return _numbers_of(result.case.steps, "")


def details(result: Result, most: int) -> list[tuple[str, Table]]:
    """The tables behind the findings that are not empty, by their titles; of each so
    many rows at `most`."""
    tables = {
        "Longest exposed collectives, and what each of them waited for": exposed,
        "Bandwidth, by size of message": bandwidth,
        "Kernels alone and beside communication": twins,
    }
    made = [(title, table(result, most)) for title, table in tables.items()]
    return [(title, table) for title, table in made if table.rows]


def exposed(result: Result, most: int) -> Table:
    found = [c for c in result.case.collectives if c.exposed_ns]
    found.sort(key=lambda c: -c.exposed_ns)
    spans = result.timeline.spans
    rows = []
    for one in found[:most]:
        after = _AFTER.get(one.waited_for, one.waited_for)
        if one.waited_span is not None and one.waited_for == "its inputs":
            after = short(spans[one.waited_span].name, 18)
        label = str(one.span.attributes.get("label", ""))
        name = short(one.span.name, 22)
        rows.append(
            (
                f"{one.span.rank}"
                + ("" if one.step.step is None else f" / {one.step.step}"),
                f'{name} "{short(label, 12)}"' if label else name,
                format_bytes(one.span.bytes) if one.span.bytes else "?",
                after,
                format_ns(one.span.duration_ns),
                format_ns(one.exposed_ns),
                format_ns(one.waiting_ns) if one.knows_ready else "?",
            )
        )
    has_steps = any(step.step is not None for step in result.case.steps)
    steps = " / step" if has_steps else ""
    header = f"rank{steps};collective;bytes;started after;took;exposed;for peers"
    return Table(tuple(header.split(";")), tuple(rows), left=2)


def bandwidth(result: Result, most: int) -> Table:
    """Medians of messages of like size: those that move longest, smallest first."""
    groups: dict[tuple[str, int | None, int], list[Collective]] = defaultdict(list)
    for one in result.case.collectives:
        if one.span.bytes and one.moving_ns > 0:
            size = one.span.bytes.bit_length()
            groups[one.span.name, one.group_size, size].append(one)
    longest = sorted(groups.values(), key=lambda of: -sum(c.moving_ns for c in of))
    ordered = sorted(longest[:most], key=lambda of: (of[0].span.name, _median_of(of)))
    cut = len(longest) - len(ordered)
    note = f"{cut} more sizes move less and are left out. " if cut > 0 else ""
    rows = []
    for of in ordered:
        alone = [c.alone_ns for c in of if c.alone_ns is not None]
        rows.append(
            (
                of[0].span.name,
                f"{len(of)}",
                format_bytes(_median_of(of)),
                "?" if of[0].group_size is None else f"{of[0].group_size}",
                format_ns(round(median(c.moving_ns for c in of))),
                format_ns(round(median(alone))) if alone else "?",
                _rate([c.algorithm_bytes_per_s for c in of]),
                _rate([c.bus_bytes_per_s for c in of]),
            )
        )
    header = ("", "number", "bytes", "ranks", "moving", "predicted", "algbw", "busbw")
    if (hw := result.case.hardware) is not None:
        guess = ", a guess" if result.case.is_guess else ""
        note += f"predicted: by {hw.name}{guess}; its link reaches "
        note += gb_per_s(hw.link.bytes_per_s)
    return Table(header, tuple(rows), note)


def twins(result: Result, most: int) -> Table:
    """Kernels that ran both alone and beside communication, the costliest first."""
    num_steps = max(1, len({step.step for step in result.case.steps}))
    rows = [
        (
            f"rank {one.rank}",
            short(one.name, 32),
            f"{format_ns(one.alone_ns)} ({one.num_alone}x)",
            f"{format_ns(one.beside_ns)} ({one.num_beside}x)",
            f"{one.ratio:.2f}",
            format_ns(one.cost_ns // num_steps),
        )
        for one in result.case.twins[:most]
        if one.cost_ns > 0
    ]
    header = ("", "kernel", "alone", "beside", "ratio", "cost a step")
    return Table(header, tuple(rows), left=2)


def _numbers_of(steps: Sequence[Step], note: str) -> Table:
    scale, unit = time_unit(max((s.step_ns for s in steps), default=0))
    times = [(s.step_ns, s.compute_ns, s.communication_ns) for s in steps]
    digits = decimals(ns / scale for row in times for ns in row)

    def shown(time_ns: int | None) -> str:
        return "?" if time_ns is None else f"{time_ns / scale:.{digits}f}"

    rows = [
        (
            where(step),
            shown(step.step_ns),
            shown(step.compute_ns),
            shown(step.communication_ns),
            f"{shown(step.hidden_ns)} of {shown(step.communication_ns)}"
            if step.communication
            else "none",
            shown(step.exposed_ns) if step.communication else "none",
            shown(step.parts["copying"]),
            shown(step.idle_ns),
            shown(step.cpu_bound_ns),
        )
        for step in steps
    ]
    header = "step compute comm hidden exposed copying idle CPU-bound"
    return Table((unit, *header.split()), tuple(rows), note)


def where(step: Step) -> str:
    where = f"rank {step.rank}"
    return where if step.step is None else f"{where} step {step.step}"


def _median_of(collectives: Sequence[Collective]) -> int:
    return round(median(c.span.bytes for c in collectives))


def _rate(rates: Sequence[int | None]) -> str:
    known = [rate for rate in rates if rate is not None]
    return gb_per_s(round(median(known))) if known else "?"
