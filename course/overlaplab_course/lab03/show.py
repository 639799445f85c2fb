"""What lab 03 shows of real GPUs: what `overlaplab_course.lab03.measure` stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlaplab import view
from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab_course import stored
from overlaplab_course.lab03.four_races import PROGRAMS
from overlaplab_course.lab03.jobs import COMPUTE, backward_job

# As `overlaplab_course.lab03.measure` measures section 1's job: what a unit of work is.
MATMUL = 4096
MESSAGE_BYTES = 64 * 2**20


class Table:
    """Stored numbers; it prints as lines, with the machine under them."""

    def __init__(self, lines: Sequence[str], found: stored.Stored | None) -> None:
        measured = [f"Measured on {stored.machine(found)}."] if found else []
        self._text = "\n".join([*lines, *measured])

    def __repr__(self) -> str:
        return self._text


def measured(question: str, path: Path | None = None) -> Table:
    """The answer to "job", "chains", "feeds", "waits", "priorities", "synchronize" or
    "races": scalars on the first line; then a table whose columns are the mappings.
    """
    found = stored.read("03", path)
    if found is None:
        return Table([stored.nothing("03")], found)
    answer = found["answers"][question]
    if "error" in answer:
        return Table([f"not measured: {answer['error']}"], found)
    first = [f"{k}: {v}" for k, v in answer.items() if not isinstance(v, Mapping)]
    tables = {k: v for k, v in answer.items() if isinstance(v, Mapping)}
    lines = ["; ".join(first)] if first else []
    if tables:
        rows = list(dict.fromkeys(row for column in tables.values() for row in column))
        cells = [
            [row, *(str(t.get(row, "-")) for t in tables.values())] for row in rows
        ]
        lines += stored.columns([["", *tables], *cells])
    return Table(lines, found)


def _row(question: str, row: str, path: Path | None, *others: str) -> Any:
    """The only table of `question` that has these rows, None if it was not measured."""
    answer = (stored.read("03", path) or {}).get("answers", {}).get(question, {})
    tables = (table for table in answer.values() if isinstance(table, Mapping))
    return next((t for t in tables if all(r in t for r in (row, *others))), None)


def measured_ratio(question: str, row: str, to: str, path: Path | None = None) -> str:
    """One stored number of the only table of `question` to another: "0.71"."""
    table = _row(question, row, path, to)
    return "not" if table is None else f"{table[row] / table[to]:.2f}"


def off_by(
    question: str, row: str, predicted_ms: float, path: Path | None = None
) -> str:
    """How far a prediction of a stored row is off: "19 % too long"."""
    table = _row(question, row, path)
    if table is None:
        return "(not measured)"
    percent = 100 * (predicted_ms / table[row] - 1)
    return f"{abs(percent):.0f} % too {'long' if percent > 0 else 'short'}"


def predicted_ms(
    hardware: str | Hardware, *, events: bool, num_ranks: int = 2
) -> float:
    """Section 1's job as measured, in ms: on one stream, or on two with events."""
    job = backward_job()
    builder = ProgramBuilder(num_ranks=1, represents=num_ranks)
    ended: dict[str, tuple[int, ...]] = {}
    for piece in job.pieces:
        stream = "wire" if events and piece.on != COMPUTE else "default"
        for need in job.needs[piece.name]:
            builder.wait_event(0, stream, ended[need])
        if piece.on == COMPUTE:
            for _ in range(piece.ms):
                builder.compute(0, "mm", flops=2 * MATMUL**3, dtype="bfloat16")
        else:
            size = MESSAGE_BYTES * piece.ms
            builder.collective(
                0, "all_reduce", bytes=size, stream=stream, async_op=False
            )
        ended[piece.name] = builder.record_event(0, stream)
    return resolve(builder.build(), hardware).step_ns / 1e6


def sanitizer_report(program: str, path: Path | None = None) -> Table:
    """What torch's stream sanitizer printed of one broken program."""
    found = stored.read("03", path)
    if found is None:
        return Table([stored.nothing("03")], found)
    said = _of_sanitizer(found, "broken")
    text = said.get(program) or f"not measured: {said.get('error', 'it did not run')}"
    return Table([text], found)


def beside_the_sanitizer(path: Path | None = None) -> Table:
    """Four races and their repairs: who reports them, the findings or the sanitizer.

    The virtual cluster runs them now; what the sanitizer said on a GPU is stored.
    """
    found = stored.read("03", path)
    rows = []
    for name, program in PROGRAMS.items():
        here, there = [], []
        for variant in ("broken", "repaired"):
            warnings = run(program, variant == "repaired", world_size=1).warnings
            here.append(f"{variant}: {'race' if warnings else 'silent'}")
            text = _of_sanitizer(found, variant).get(name) if found else None
            said = "silent" if text and "no report" in text else "race"
            there.append(f"{variant}: {said if text else 'not measured'}")
        rows.append((name, ", ".join(here), ", ".join(there)))
    head = ("", "findings here", "sanitizer on a GPU")
    return Table(str(view.Table(head, tuple(rows), left=3)).split("\n"), found)


def _of_sanitizer(found: stored.Stored, variant: str) -> Mapping[str, str]:
    answer = found["answers"].get("sanitizer", {})
    said: Mapping[str, str] = answer.get(variant, answer)
    return said
