"""What lab 03 shows of real GPUs: what `overlaplab_course.lab03.measure` stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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


# Section of the lesson, what, and where its numbers stand: question, column, rows.
_NUMBERS = (
    ("1", "the job on one stream, ms", "job", "ms", ("one stream",)),
    ("1", "{row}, ms", "job", "ms",
     ("two streams that wait for each other", "an event per task")),
    ("3", "a hop to another stream, {row}: us", "waits", "us a hop",
     ("no wait", "event", "event.synchronize")),
    *(("4", "{column}: wrong of 20, {where} GPU", "races", program,
       ("broken, quiet", "broken, busy"))
      for program in ("one event for two", "memory given away")),
    ("5", "{row}, ms per batch", "feeds", "ms per batch",
     ("steps alone", "pageable, same stream", "pinned, same stream",
      "pinned, own stream, ahead", "3.4: the CPU fills two pinned buffers")),
    *(("6", "8 chains of {column} kernels, streams: {row}, ms", "chains", kind,
       ("1", "3"))
      for kind in ("wide", "narrow")),
    ("7", "{row} takes the CPU, ms", "synchronize", "ms",
     ("stream.synchronize", "work and synchronize")),
    ("9", "five small kernels, {row}, ms", "priorities", "ms",
     ("alone", "priority 0", "priority -1")),
)  # fmt: skip


def on_gpus(path: Path | None = None) -> Table:
    """What was measured, by section; section 1's job beside its prediction."""
    found = stored.read("03", path)
    if found is None:
        return Table([stored.nothing("03")], found)
    predicted = {
        "one stream": predicted_ms("h200-nvlink", events=False),
        "an event per task": predicted_ms("h200-nvlink", events=True),
    }
    rows: list[tuple[str, ...]] = []
    for section, text, question, column, names in _NUMBERS:
        numbers = found["answers"].get(question, {}).get(column, {})
        for row in names:
            where = row.removeprefix("broken, ")
            what = text.format(row=row, column=column, where=where)
            told = f"{predicted[row]:.3g}" if row in predicted else ""
            seen = f"{numbers[row]:.3g}" if row in numbers else "-"
            rows.append((section, what, told, seen))
    head = ("section", "", "predicted", "measured")
    return Table(str(view.Table(head, tuple(rows), left=2)).split("\n"), found)


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
