"""What lab 06 shows of real GPUs: stored measurements, with card and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_STORED = Path(__file__).with_name("lab06_measured.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """A stored table; prints with the machine that it was measured on.

    Args:
        source: what was measured, and how.
        machine: card, torch, NCCL, date.
        columns: their titles, with the unit in `source`.
        rows: a name and a number (or None) a column.
    """

    source: str
    machine: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [" " * width + "".join(f"{c:>16}" for c in self.columns)]
        for name, numbers in self.rows:
            cells = "".join(f"{'-' if n is None else n:>16}" for n in numbers)
            lines.append(f"{name:<{width}}{cells}")
        return "\n".join([*lines, f"Measured: {self.source}.", self.machine])

    def __repr__(self) -> str:
        return str(self)

    def number(self, row: str, column: str) -> float:
        """The number of the first row whose name begins with `row`."""
        place = self.columns.index(column)
        for name, numbers in self.rows:
            number = numbers[place]
            if name.startswith(row) and number is not None:
                return number
        raise KeyError(f"no number for {row!r}, {column!r}")


@lru_cache(maxsize=1)
def _read() -> Mapping[str, Mapping[str, Any]]:
    stored: Mapping[str, Mapping[str, Any]] = json.loads(_STORED.read_text())
    return stored


def message_points() -> dict[float, float]:
    """MiB to microseconds of one all-reduce, measured."""
    pairs: Sequence[Sequence[float]] = _read()["all_reduce_alone"]["mib_to_us"]
    return {mib: us for mib, us in pairs}


def machine(table: str) -> str:
    """The machine on which a stored table was measured, one line."""
    entry = _read()[table]
    return "{card}, torch {torch}, NCCL {nccl}, {date}".format(**entry)


def measured(table: str) -> Measured:
    """A stored table: "data_parallel", "ends" or "hidden"."""
    entry = _read()[table]
    return Measured(
        source=entry["source"],
        machine=machine(table),
        columns=tuple(entry["columns"]),
        rows=tuple((name, tuple(numbers)) for name, *numbers in entry["rows"]),
    )


def stored_benchmarks(folder: Path | None = None) -> list[str]:
    """What `python -m overlaplab.bench data-parallel` stored: lines to print.

    One paragraph for each file on GPUs: the machine, then each case's variants with
    their median and their ratio to DDP at its best setting in the same run.
    """
    folder = folder or Path(__file__).parents[1] / "bench" / "results"
    lines = []
    for path in sorted(folder.glob("*.json")):
        stored = json.loads(path.read_text())
        if stored.get("backend") != "nccl":
            continue
        lines.append(
            f"{stored['world_size']} x {stored['card']}, torch {stored['torch']}, NCCL "
            f"{stored['nccl']}, {stored['date'][:10]}: {stored['command']}"
        )
        for case in stored["cases"]:
            lines.append(f"  {case['model']}, batch {case['batch']}:")
            ratios = case["ratio_to_ddp_best"]
            for kind, found in case["variants"].items():
                line = f"    {kind:<18} {found['median_ms']:8.2f} ms   "
                line += f"{ratios[kind]:.2f} of DDP's best   {found.get('name', '')}"
                lines.append(line.rstrip())
    return lines or ["No benchmark of this version is stored yet."]
