"""What lessons show of real GPUs: `labNN/measured.json`, read in one way.

    NOTHING = stored.nothing("04")
    found = stored.read("04")          # None: print NOTHING
    lines = stored.columns([("ms", "median"), ("wait late", "1.234")])
    print("\\n".join([*lines, f"Measured on {stored.machine(found)}."]))

The schema: "world_size", "card", "torch", "nccl", "date", "backend" and "command" say
where and how; all other keys are what the lesson's `measure()` returned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch

from overlaplab.hardware import Hardware, find_hardware
from overlaplab.view import Table

P = ParamSpec("P")
Stored = Mapping[str, Any]
Lines = Callable[Concatenate[Stored, P], Iterable[str]]


def read(
    lesson: str, path: Path | None = None, *, on_gpus: bool = False
) -> Stored | None:
    """What is stored of lesson "NN", None if nothing is.

    Args:
        path: of the file; None: the lesson's own.
        on_gpus: what CPU processes measured counts as nothing.
    """
    path = path or Path(__file__).parent / f"lab{lesson}" / "measured.json"
    if not path.exists():
        return None
    stored: Stored = json.loads(path.read_text(encoding="utf-8"))
    return stored if stored.get("backend") == "nccl" or not on_gpus else None


def machine(stored: Stored) -> str:
    """Where and when: "2 x NVIDIA H200, torch 2.11.0, NCCL 2.28.9, 2026-11-28"."""
    several = f"{stored['world_size']} x " if "world_size" in stored else ""
    nccl = f", NCCL {stored['nccl']}" if stored.get("nccl") else ""
    return (
        f"{several}{stored.get('card', 'CPU')}, torch {stored['torch']}{nccl}, "
        f"{stored['date'][:10]}"
    )


def profile_of(stored: Stored) -> Hardware:
    """The hardware profile that stands for the card."""
    card = str(stored.get("card", ""))
    return find_hardware("h200-nvlink" if "H200" in card else "h100-nvlink")


def command(lesson: str) -> str:
    """What measures a lesson's numbers."""
    return f"python -m overlaplab_course.measure {lesson} --out mine.json"


def nothing(lesson: str) -> str:
    """What is shown where nothing is stored."""
    return (
        "Nothing is stored yet. On a machine with two GPUs or more:\n"
        f"    {command(lesson)}"
    )


def shown(lesson: str) -> Callable[[Lines[P]], Callable[P, str]]:
    """Turn `table(found, ...) -> lines` into `table(...) -> text`.

    The text is that of `nothing` where no GPU's measurement is stored.
    """

    def decorate(table: Lines[P]) -> Callable[P, str]:
        @wraps(table)
        def text(*args: P.args, **options: P.kwargs) -> str:
            found = read(lesson, on_gpus=True)
            return (
                "\n".join(table(found, *args, **options)) if found else nothing(lesson)
            )

        return text

    return decorate


def measure_it_here(command: str) -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        has = "1 GPU" if count == 1 else f"{count} GPUs"
        return f"This machine has {has}. Two or more could measure here."
    return (
        f"This machine has {count} GPUs. To measure here, run in a terminal:\n"
        f"    {command}"
    )


def columns(rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table: names to the left, all else to the right of its column.

    Args:
        rows: a name and its cells, of any values; the head is one, some are shorter.
    """
    every = [tuple(map(str, row)) for row in rows]
    most = max(map(len, every))
    head, *others = (row + ("",) * (most - len(row)) for row in every)
    return str(Table(head, tuple(others))).split("\n")


def text_table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """The same as a text."""
    return "\n".join(columns([head, *lines]))
