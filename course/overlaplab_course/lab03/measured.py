"""What lab 03 shows of real GPUs: what `overlaplab_course.lab03.measure` stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlaplab.cluster.run import run
from overlaplab_course.lab03.four_races import PROGRAMS

_STORED = Path(__file__).with_name("measured.json")
_ABSENT = (
    "Nothing is stored yet. On a machine with GPUs:\n"
    "    python -m overlaplab_course.measure 03 --out FILE"
)


class Table:
    """Stored numbers; it prints as lines, with the machine under them."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __str__(self) -> str:
        return "\n".join(self._lines)

    __repr__ = __str__


def read(path: Path | None = None) -> Mapping[str, Any] | None:
    """The stored file, None where there is none."""
    path = path or _STORED
    if not path.exists():
        return None
    stored: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def measured(question: str, path: Path | None = None) -> Table:
    """The answer to "job", "chains", "feeds", "waits", "priorities", "synchronize" or
    "races", as lines.
    """
    stored = read(path)
    if stored is None:
        return Table([_ABSENT])
    answer = stored["answers"][question]
    if "error" in answer:
        return Table([f"not measured: {answer['error']}", _machine(stored)])
    return Table([*_lines(answer), _machine(stored)])


def measured_ratio(question: str, row: str, to: str, path: Path | None = None) -> str:
    """One stored number of the only table of `question` to another: "0.71"."""
    answer = (read(path) or {}).get("answers", {}).get(question, {})
    for table in answer.values():
        if isinstance(table, Mapping) and row in table and to in table:
            return f"{table[row] / table[to]:.2f}"
    return "not"


def off_by(
    question: str, row: str, predicted_ms: float, path: Path | None = None
) -> str:
    """How far a prediction of a stored row is off: "19 % too long"."""
    answer = (read(path) or {}).get("answers", {}).get(question, {})
    for table in answer.values():
        if isinstance(table, Mapping) and row in table:
            percent = 100 * (predicted_ms / table[row] - 1)
            return f"{abs(percent):.0f} % too {'long' if percent > 0 else 'short'}"
    return "(not measured)"


def sanitizer_report(program: str, path: Path | None = None) -> Table:
    """What torch's stream sanitizer printed of one broken program."""
    stored = read(path)
    if stored is None:
        return Table([_ABSENT])
    said = _of_sanitizer(stored, "broken")
    text = said.get(program) or f"not measured: {said.get('error', 'it did not run')}"
    return Table([text, _machine(stored)])


def beside_the_sanitizer(path: Path | None = None) -> Table:
    """Four races and their repairs: who reports them, the findings or the sanitizer.

    The virtual cluster runs them now; what the sanitizer said on a GPU is stored.
    """
    stored = read(path)
    lines = [f"{'':<10}{'findings here':<32}sanitizer on a GPU"]
    for name, program in PROGRAMS.items():
        here, there = [], []
        for variant in ("broken", "repaired"):
            found = run(program, variant == "repaired", world_size=1).warnings
            here.append(f"{variant}: {'race' if found else 'silent'}")
            text = _of_sanitizer(stored, variant).get(name) if stored else None
            said = "silent" if text and "no report" in text else "race"
            there.append(f"{variant}: {said if text else 'not measured'}")
        lines.append(f"{name:<10}{', '.join(here):<32}{', '.join(there)}")
    return Table([*lines, *([_machine(stored)] if stored else [])])


def _of_sanitizer(stored: Mapping[str, Any], variant: str) -> Mapping[str, str]:
    answer = stored["answers"].get("sanitizer", {})
    said: Mapping[str, str] = answer.get(variant, answer)
    return said


def _machine(stored: Mapping[str, Any]) -> str:
    card = stored.get("card", "CPU")
    nccl = f", NCCL {stored['nccl']}" if stored.get("nccl") else ""
    return (
        f"Measured on {stored['world_size']} x {card}, torch {stored['torch']}{nccl}, "
        f"{stored['date'][:10]}."
    )


def _lines(answer: Mapping[str, Any]) -> list[str]:
    """Scalars on the first line; then a table whose columns are the mappings."""
    first = [f"{k}: {v}" for k, v in answer.items() if not isinstance(v, Mapping)]
    tables = {k: v for k, v in answer.items() if isinstance(v, Mapping)}
    lines = ["; ".join(first)] if first else []
    if not tables:
        return lines
    rows = list(dict.fromkeys(row for column in tables.values() for row in column))
    width = max(len(row) for row in rows) + 2
    lines.append(" " * width + "".join(f"{name:>22}" for name in tables))
    for row in rows:
        cells = "".join(f"{column.get(row, '-')!s:>22}" for column in tables.values())
        lines.append(f"{row:<{width}}{cells}")
    return lines
