"""The tables of results/README.md, from the file of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MIB = 2**20


def tables(results: Mapping[str, Any]) -> tuple[str, str]:
    """Markdown: what each side costs, and how the numbers are explained."""
    rows = results["files"]
    return _table(_COSTS, map(_costs, rows)), _table(_NUMBERS, _explained(rows))


_COSTS = (
    "file",
    "MiB",
    "ours, s CPU",
    "HTA, s CPU",
    "ratio",
    "with imports",
    "ours, MiB peak",
    "HTA, MiB peak",
    "ratio",
    "above imports",
)
_NUMBERS = ("file", "HTA prints", "ours", "then, rule by rule", "equal")


def _costs(row: Mapping[str, Any]) -> list[str]:
    ours, hta = row["ours"], row["hta"]
    cells = [short_name(row["file"]), f"{row['bytes'] / _MIB:.1f}", _seconds(ours)]
    if "ratios" not in row:
        return [*cells, str(hta["error"]), *["-"] * 2, _mib(ours), *["-"] * 3]
    ratios = row["ratios"]
    return [
        *cells,
        _seconds(hta),
        f"{ratios['cpu']:.1f}",
        f"{ratios['cpu_with_imports']:.1f}",
        _mib(ours),
        _mib(hta),
        f"{ratios['peak']:.1f}",
        f"{ratios['peak_over_imports']:.1f}",
    ]


def _explained(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    lines = []
    for row in rows:
        for which, found in row.get("explained", {}).items():
            (_, ours), *rules = found["rules"]
            name = short_name(row["file"]) + (", all steps" * (which == "all_steps"))
            told = "; ".join(_changes(ours, rules)) or "-"
            printed = _percent(found["hta"], 2)
            equal = "yes" if found["equal"] else "NO"
            lines.append([name, printed, _percent(ours, 4), told, equal])
    return lines


def _changes(before: float | None, rules: Sequence[Sequence[Any]]) -> list[str]:
    """The rules that changed anything, with the number after each."""
    told = []
    for rule, percent in rules:
        if _percent(percent, 4) != _percent(before, 4):
            told.append(f"{rule}: {_percent(percent, 4)}")
        before = percent
    return told


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
    return f"{side['peak_bytes'] / _MIB:.0f}"


def _table(heads: Sequence[str], rows: Any) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
