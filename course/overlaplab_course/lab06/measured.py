"""What lab 06 shows of real GPUs: stored measurements, with card and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import overlaplab

_STORED = Path(__file__).with_name("measured.json")
_RESULTS = Path(overlaplab.__file__).parent / "bench" / "results"


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


_SHOWN = (
    "compute",
    "serial",
    "per parameter",
    "ddp default",
    "ddp best",
    "ours best",
    "ddp captured",
    "ours captured",
)


def stored_benchmarks(folder: Path | None = None) -> list[str]:
    """What `python -m overlaplab.bench data-parallel` stored: lines to print.

    For each run on GPUs: the machine, then a table of its first model, median ms of a
    step by variant and batch size. All numbers of a table are of one run.
    """
    folder = folder or _RESULTS
    lines = []
    for path in sorted(folder.glob("data_parallel-*.json")):
        stored = json.loads(path.read_text())
        if stored.get("backend") != "nccl" or path.stem.endswith("quick"):
            continue
        lines += _table(stored)
    return lines or ["No benchmark of this version is stored yet."]


def stored_ms(variant: str, batch: int) -> float:
    """Median ms a step of the first model in the stored run on GPUs, as printed."""
    folder = _RESULTS
    for path in sorted(folder.glob("data_parallel-*.json")):
        stored = json.loads(path.read_text())
        if stored.get("backend") != "nccl" or path.stem.endswith("quick"):
            continue
        model = stored["cases"][0]["model"]
        for case in stored["cases"]:
            if (case["model"], case["batch"]) == (model, batch):
                return float(case["variants"][variant]["median_ms"])
    raise KeyError(f"no stored time of {variant!r} at batch {batch}")


def _table(stored: Mapping[str, Any]) -> list[str]:
    model = stored["cases"][0]["model"]
    cases = [case for case in stored["cases"] if case["model"] == model]
    batches = [f"batch {case['batch']}" for case in cases]
    lines = [
        f"{stored['world_size']} x {stored['card']}, torch {stored['torch']}, NCCL "
        f"{stored['nccl']}, {stored['date'][:10]}",
        f"{model}, ms a step" + "".join(f"{batch:>12}" for batch in batches),
    ]
    width = len(f"{model}, ms a step")
    for kind in _SHOWN:
        found = [case["variants"].get(kind, {}).get("median_ms") for case in cases]
        cells = (f"{'-' if ms is None else format(ms, '.1f'):>12}" for ms in found)
        lines.append(f"{kind:<{width}}" + "".join(cells))
    return lines
