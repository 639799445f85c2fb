"""The tables of results/README.md, from the file of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from overlaplab.view import Table

COSTS = (
    "file;MiB;ours, s CPU;HTA, s CPU;ratio;with imports;ours, MiB peak;HTA, MiB peak;"
    "ratio;above imports"
)
NUMBERS = "file;HTA prints;ours;then, rule by rule;equal"


def tables(results: Mapping[str, Any]) -> tuple[str, str]:
    """Markdown: what each side costs, and how the numbers are explained."""
    rows = results["files"]
    costs = Table(tuple(COSTS.split(";")), tuple(map(_costs, rows)))
    explained = tuple(line for row in rows for line in _explained(row))
    numbers = Table(tuple(NUMBERS.split(";")), explained)
    return costs.markdown(), numbers.markdown()


def _costs(row: Mapping[str, Any]) -> tuple[str, ...]:
    ours, hta = row["ours"], row["hta"]
    head = short_name(row["file"]), f"{row['bytes'] / 2**20:.1f}", _seconds(ours)
    if "ratios" not in row:
        return *head, str(hta["error"]), "-", "-", _mib(ours), "-", "-", "-"
    cpu, imports, peak, above = (
        f"{row['ratios'][key]:.1f}"
        for key in ("cpu", "cpu_with_imports", "peak", "peak_over_imports")
    )
    return *head, _seconds(hta), cpu, imports, _mib(ours), _mib(hta), peak, above


def _explained(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for which, found in row.get("explained", {}).items():
        (_, ours), *rules = found["rules"]
        name = short_name(row["file"]) + (", all steps" * (which == "all_steps"))
        changes = "; ".join(_changes(ours, rules)) or "-"
        equal = "yes" if found["equal"] else "NO"
        yield name, _percent(found["hta"], 2), _percent(ours, 4), changes, equal


def _changes(before: float | None, rules: Sequence[Sequence[Any]]) -> Iterator[str]:
    """The rules that changed anything, with the number after each."""
    for rule, percent in rules:
        if _percent(percent, 4) != _percent(before, 4):
            yield f"{rule}: {_percent(percent, 4)}"
        before = percent


def short_name(file: str) -> str:
    return file.removesuffix(".gz").removesuffix(".json")


def _percent(value: Any, places: int) -> str:
    if value is None:
        return "none"
    return f"{value:.{places}f}" if isinstance(value, float) else str(value)


def _seconds(side: Mapping[str, Any]) -> str:
    seconds = side["read_cpu_ns"] / 1e9
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}"


def _mib(side: Mapping[str, Any]) -> str:
    return f"{side['peak_bytes'] / 2**20:.0f}"
