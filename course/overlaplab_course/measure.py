"""What lessons show of real GPUs, measured: `python -m overlaplab_course.measure 04`.

A lesson's `labNN/measure.py` has `measure() -> dict`: called on every rank of an
initialised process group (NCCL, or gloo to rehearse); rank 0's answer is stored with
the card, the versions, the date and the command.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

import overlaplab_course
from overlaplab.bench.options import SETTINGS, heading, rank_options, run_command
from overlaplab.bench.workload import device_description, write_from_rank_0
from overlaplab.processes import find_world_size, run_ranks

PROGRAM = "overlaplab_course.measure"


def known() -> tuple[str, ...]:
    """The lessons that measure something: "03", "04"."""
    folder = Path(overlaplab_course.__file__).parent
    return tuple(sorted(p.parent.name[3:] for p in folder.glob("lab*/measure.py")))


def measure(lesson: str) -> dict[str, Any]:
    """Measure what lesson "NN" shows. Collective: call it on all ranks together.

    Raises:
        ValueError: no such lesson measures anything.
    """
    if lesson not in known():
        raise ValueError(
            f"lesson {lesson!r} measures nothing; expected one of {', '.join(known())}"
        )
    module = importlib.import_module(f"overlaplab_course.lab{lesson}.measure")
    answer: dict[str, Any] = module.measure()
    return answer


@click.command(context_settings=SETTINGS)
@click.argument("lesson")
@rank_options
def command(
    lesson: str, backend: str, world_size: int | None, out: Path | None
) -> None:
    """What LESSON (such as 03) measures for its text, on your GPUs."""
    run_ranks(
        _measure,
        heading("lessons", backend, PROGRAM) | {"lesson": lesson},
        out,
        backend=backend,
        world_size=find_world_size(backend, world_size),
    )


def _measure(results: dict[str, Any], out: Path | None) -> None:
    results |= {"world_size": dist.get_world_size(), **device_description()}
    write_from_rank_0(results | measure(results["lesson"]), out)


if __name__ == "__main__":
    sys.exit(run_command(command, PROGRAM))
