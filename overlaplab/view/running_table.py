"""The running table: step, exposed, hidden, saved and critical-path shares by name."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass

from overlaplab.errors import printable
from overlaplab.timeline import SHARES, Timeline
from overlaplab.view.arguments import check_timelines
from overlaplab.view.panel import knows_saved
from overlaplab.view.units import decimals, percentages, time_unit


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text that print, and show as a table in a notebook.

    Args:
        header: of the columns.
        rows: as many cells each as the header has.
        note: a line under the table.
        left: columns, from the left, whose text starts at the left.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    left: int = 1

    def __str__(self) -> str:
        table = [[*map(printable, row)] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for cells in table:
            pairs = list(zip(cells, widths, strict=True))
            aligned = [cell.ljust(width) for cell, width in pairs[: self.left]]
            aligned += [cell.rjust(width) for cell, width in pairs[self.left :]]
            lines.append("  ".join(aligned).rstrip())
        return "\n".join([*lines, self.note] if self.note else lines)

    def __repr__(self) -> str:
        return str(self)

    def markdown(self) -> str:
        """The table without its note."""
        right = len(self.header) - self.left
        rule = ["---"] * self.left + ["---:"] * right
        rows = [[*map(_escaped, row)] for row in (self.header, *self.rows)]
        rows.insert(1, rule)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)

    def _repr_markdown_(self) -> str:
        return f"{self.markdown()}\n\n{self.note}"

    def _repr_html_(self) -> str:
        def cells(row: tuple[str, ...], tag: str) -> str:
            left = [f'<{tag} class="left">'] * self.left + [f"<{tag}>"] * len(row)
            pairs = zip(left, map(html.escape, row), strict=False)
            return "".join(f"{begin}{cell}</{tag}>" for begin, cell in pairs)

        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in self.rows)
        note = f"<p><small>{html.escape(self.note)}</small></p>" if self.note else ""
        head = f"<thead><tr>{cells(self.header, 'th')}</tr></thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>{note}"


def _escaped(cell: str) -> str:
    """A name as text, whatever Markdown would make of it; "_" in a word is one."""
    return re.sub(r"([\\`*\[\]<>|$])", r"\\\1", " ".join(printable(cell).split()))


def table(timelines: Mapping[str, Timeline]) -> Table:
    """The numbers of each timeline, one row each, in one unit.

    Shares are whole percents of the critical path and add up to 100 in each row.

    Args:
        timelines: by name. Numbers are those of the slowest rank, see `Report`.
    """
    check_timelines(timelines)
    reports = [timeline.report() for timeline in timelines.values()]
    times_ns = [(r.step_ns, r.exposed_ns, r.hidden_ns, r.saved_ns) for r in reports]
    scale, unit = time_unit(max((row[0] for row in times_ns), default=0))
    digits = decimals(time_ns / scale for row in times_ns for time_ns in row)
    rows = []
    unknown = False
    for (name, timeline), row in zip(timelines.items(), times_ns, strict=True):
        percents = percentages(timeline.critical_path().shares_ns.values())
        shown = [f"{time_ns / scale:.{digits}f}" for time_ns in row]
        if not knows_saved(timeline):
            shown[-1], unknown = "?", True
        rows.append(
            (
                name,
                *shown,
                *(str(percent) for percent in percents),
            )
        )
    columns = [f"{word} ({unit})" for word in ("step", "exposed", "hidden", "saved")]
    columns += [f"{share} %" for share in SHARES]
    note = "%: shares of the critical path. saved = compute + communication - step."
    if unknown:
        note += (
            " ?: this run alone does not show it: kernels that ran beside others may"
            " have taken longer than alone."
        )
    return Table(("", *columns), tuple(rows), note)
