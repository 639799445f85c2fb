"""A diagnosis as one HTML file that needs nothing else: text, tables, live timeline.

Names come from traces and are shown as text, whatever they contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from overlaplab.diagnosis import tables
from overlaplab.diagnosis.account import ENTRIES
from overlaplab.diagnosis.findings import Finding
from overlaplab.diagnosis.result import Result
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.text import (
    finding_title,
    headline,
    saved_lines,
    source_lines,
    unexplained_lines,
    verdict,
)
from overlaplab.errors import plural
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import Interval
from overlaplab.view import Table, show
from overlaplab.view.scripts import document
from overlaplab.view.units import format_ns

MOST_SPANS = 20_000  # in the page's timeline; more are counted, and not drawn
MOST_STEPS = 40  # rows of the table of all steps


def page(result: Result) -> str:
    """The whole HTML."""
    head = headline(result)
    is_long = len(result.case.steps) > MOST_STEPS
    parts = [
        "<h1>Overlap report</h1>",
        f"<p><b>{escape(verdict(result))}</b></p>",
        *_paragraphs(head, "soft"),
        "<h2>Numbers</h2>",
        _table(tables.numbers(result) if is_long else tables.every_step(result)),
        *_paragraphs(saved_lines(result)),
        "<h2>Findings, the most expensive first</h2>",
        _findings(result.findings),
        *_paragraphs(unexplained_lines(result)),
        "<h2>Timeline</h2>",
        *_timeline(result),
        "<h2>Where each step goes</h2>",
        _table(_account(result)),
    ]
    for title, table in tables.details(result, 20):
        parts += [f"<h2>{title}</h2>", _table(table)]
    remarks = [*result.remarks, *source_lines(result)]
    if remarks:
        parts += ["<h2>What was read</h2>", *_paragraphs(remarks, "soft")]
    style = "\n" + (files("overlaplab.diagnosis") / "page.css").read_text("utf-8")
    return document(f"Overlap report: {head[0]}", style, "\n".join(parts) + "\n")


def shown(result: Result) -> tuple[Timeline, str]:
    """What the page draws, and a sentence that says what it is.

    One step, that of the table and the findings, each rank's cut to its window (the CPU
    runs ahead, and is drawn from there on). Of a step with too many spans, as many
    ranks as fit, the slowest first.
    """
    timeline, steps = result.timeline, result.case.steps
    if not steps:
        return timeline, "Everything."
    same = result.case.representative
    number = same[0].step
    what, drawn = "Everything.", timeline
    if number is not None:
        what = f"Step {number}, of {plural(len(timeline.steps), 'step')}."
        drawn = _cut(timeline, number, {s.rank: (s.start_ns, s.end_ns) for s in same})
    if len(drawn.spans) <= MOST_SPANS:
        return drawn, what
    kept: list[int] = []
    room = MOST_SPANS
    for step in sorted(same, key=lambda s: -s.step_ns):
        room -= sum(1 for s in drawn.spans if s.rank == step.rank)
        if kept and room < 0:
            break
        kept.append(step.rank)
    drawn = drawn.where(lambda s: s.rank in kept)
    if len(kept) < len(same):
        what += f" The slowest {plural(len(kept), 'rank')} of {len(same)}."
    if len(drawn.spans) > MOST_SPANS:
        longest = sorted(drawn.spans, key=lambda s: -s.duration_ns)[:MOST_SPANS]
        least_ns = longest[-1].duration_ns
        total = len(drawn.spans)
        drawn = drawn.where(lambda s: s.duration_ns > least_ns)
        what += (
            f" {len(drawn.spans)} of its {total} spans: those longer than "
            f"{format_ns(least_ns)}."
        )
    return drawn, what


def _cut(timeline: Timeline, number: int, windows: Mapping[int, Interval]) -> Timeline:
    """Each rank's spans in its window, those at its edges shortened to it.

    What the CPU launches there for another step is drawn, but is none of this one.
    """

    def inside(span: Span) -> bool:
        start_ns, end_ns = windows.get(span.rank, (0, 0))
        return span.start_ns < end_ns and span.end_ns > start_ns

    drawn = timeline.where(inside)
    spans = [
        replace(
            span,
            start_ns=max(span.start_ns, windows[span.rank][0]),
            end_ns=min(span.end_ns, windows[span.rank][1]),
            attributes=_without_other_step(span, number),
        )
        for span in drawn.spans
    ]
    # Spans that began before are now the first, in the order of their ranks' windows.
    order = sorted(range(len(spans)), key=lambda i: spans[i].start_ns)
    place = {old: new for new, old in enumerate(order)}
    causes = drawn.causes
    return replace(
        drawn,
        spans=tuple(spans[i] for i in order),
        causes=tuple(
            None if (cause := causes[i]) is None else place[cause]
            for i in order
            if causes
        ),
    )


def _without_other_step(span: Span, number: int) -> Mapping[str, Any]:
    if span.attributes.get("step", number) == number:
        return span.attributes
    renamed = {"step": "for step"}
    return {renamed.get(key, key): value for key, value in span.attributes.items()}


def _account(result: Result) -> Table:
    """Every entry of the account that is not empty everywhere."""
    steps: Sequence[Step] = result.case.steps
    if len(steps) > MOST_STEPS:
        steps = result.case.representative[:MOST_STEPS]
    used = [entry for entry in ENTRIES if any(s.parts[entry] for s in steps)]
    rows = [
        (
            tables.where(step),
            format_ns(step.step_ns),
            *(format_ns(step.parts[entry]) for entry in used),
        )
        for step in steps
    ]
    header = ("", "step", *(entry.replace("_", ": ") for entry in used))
    note = (
        "Each moment counts once, and the row adds up to the step. sending: nothing "
        "computes beside it; last: no computation is left, cpu: the next kernel is not "
        "launched yet, awaited: it is launched and waits for the collective. idle: "
        "nothing runs; cpu, sync: the next kernel is not launched yet (sync: the CPU "
        "had waited for the device)."
    )
    return Table(header, tuple(rows), note=note)


def _timeline(result: Result) -> Iterable[str]:
    drawn, what = shown(result)
    if not drawn.spans:
        return ["<p>Nothing to draw.</p>"]
    return [f'<p class="soft">{escape(what)}</p>', show(drawn).fragment()]


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>None that costs 1/200 of a step.</p>"
    items = [
        f'<li class="finding" data-kind="{escape(one.kind)}">'
        f"<b>{number}. {escape(finding_title(one))}</b>"
        f"<p>{escape(one.says)}</p>"
        f'<p class="remedy">{escape(one.remedy)}</p>'
        f"<details><summary>evidence</summary><pre>{escape(_evidence(one))}</pre>"
        "</details></li>"
        for number, one in enumerate(findings, 1)
    ]
    return f"<ol>{''.join(items)}</ol>"


def _evidence(finding: Finding) -> str:
    lines = []
    for key, value in finding.evidence.items():
        is_time = key.endswith("_ns") and isinstance(value, int)
        lines.append(f"{key}: {format_ns(value) if is_time else value}")
    return "\n".join(lines)


def _paragraphs(lines: Sequence[str], style: str = "") -> list[str]:
    attribute = f' class="{style}"' if style else ""
    return [f"<p{attribute}>{escape(line)}</p>" for line in lines]


def _table(table: Table) -> str:
    return f'<div class="wide">{table._repr_html_()}</div>'
