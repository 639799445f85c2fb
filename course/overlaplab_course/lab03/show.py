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


# Section of the lesson, what, and where its number stands: question, column, row.
_ROWS = (
    ("1", "the job on one stream, ms", "job", "ms", "one stream"),
    *(
        ("1", f"{name}, ms", "job", "ms", name)
        for name in ("two streams that wait for each other", "an event per task")
    ),
    *(
        ("3", f"a hop to another stream, {name}: us", "waits", "us a hop", name)
        for name in ("no wait", "event", "event.synchronize")
    ),
    *(
        (
            "4",
            f"{program}: wrong of 20, {where} GPU",
            "races",
            program,
            f"broken, {where}",
        )
        for program in ("one event for two", "memory given away")
        for where in ("quiet", "busy")
    ),
    *(
        ("5", f"{name}, ms per batch", "feeds", "ms per batch", name)
        for name in (
            "steps alone",
            "pageable, same stream",
            "pinned, same stream",
            "pinned, own stream, ahead",
            "3.4: the CPU fills two pinned buffers",
        )
    ),
    *(
        ("6", f"8 chains of {kind} kernels, streams: {n}, ms", "chains", kind, n)
        for kind in ("wide", "narrow")
        for n in ("1", "3")
    ),
    *(
        ("7", f"{name} takes the CPU, ms", "synchronize", "ms", name)
        for name in ("stream.synchronize", "work and synchronize")
    ),
    *(
        ("9", f"five small kernels, {name}, ms", "priorities", "ms", name)
        for name in ("alone", "priority 0", "priority -1")
    ),
)


def on_gpus(path: Path | None = None) -> Table:
    """What was measured, by section; section 1's job beside its prediction."""
    found = stored.read("03", path)
    if found is None:
        return Table([stored.nothing("03")], found)
    predicted = {
        "one stream": predicted_ms("h200-nvlink", events=False),
        "an event per task": predicted_ms("h200-nvlink", events=True),
    }
    rows: list[tuple[str, ...]] = [("section", "", "predicted", "measured")]
    for section, what, question, column, row in _ROWS:
        seen = found["answers"].get(question, {}).get(column, {}).get(row)
        told = f"{predicted[row]:.3g}" if row in predicted else ""
        rows.append((section, what, told, "-" if seen is None else f"{seen:.3g}"))
    table = view.Table(rows[0], tuple(rows[1:]), left=2)
    return Table(str(table).split("\n"), found)


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
