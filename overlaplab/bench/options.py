"""What the benchmarks' commands share: options, and what their results begin with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from overlaplab import streams
from overlaplab.errors import printable
from overlaplab.version import find_version

Command = TypeVar("Command", bound=Callable[..., object])

POSITIVE = click.IntRange(1)
backend_option = click.option(
    "--backend",
    type=click.Choice(["nccl", "gloo"]),
    default="nccl",
    help="gloo rehearses on the CPU.",
)
world_size_option = click.option(
    "--world-size", type=POSITIVE, help="Processes.  [default: all GPUs]"
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the results as JSON.",
)


def rank_options(command: Command) -> Command:
    """On what, by how many, and where the results go."""
    return backend_option(world_size_option(out_option(command)))


def check_device(backend: str) -> bool:
    """For what runs in this process: whether it measures a GPU.

    Raises:
        ValueError: the backend and the machine do not fit.
    """
    on_gpu = backend == "nccl"
    if on_gpu != (streams.device().type == "cuda"):
        raise ValueError(
            f"--backend {backend} and a process on {streams.device()}: nccl measures "
            "a GPU, gloo rehearses on the CPU of a machine without one"
        )
    return on_gpu


SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


def heading(
    benchmark: str, backend: str, program: str = "overlaplab.bench"
) -> dict[str, Any]:
    """What every file of results begins with, as far as the parent knows it."""
    return {
        "benchmark": benchmark,
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "overlaplab": find_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": backend,
    }


@contextmanager
def results_of(path: Path, benchmark: str) -> Iterator[dict[str, Any]]:
    """The results that `benchmark` wrote; inside, what they lack is an error of theirs.

    Raises:
        ValueError: another file; the message names it.
    """
    expected = f"expected what python -m overlaplab.bench {benchmark} --out wrote"
    try:
        stored = json.loads(path.read_text("utf-8-sig"))
        if not isinstance(stored, dict):
            raise ValueError("no JSON object")
        yield stored
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: no such results ({type(error).__name__}: {error}); {expected}"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); {expected}") from error


def run_command(command: click.Command, program: str) -> int:
    """Run a command line; the exit code. Errors are one line."""
    try:
        command.main(prog_name=f"python -m {program}", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (ValueError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except click.Abort:
        return 130
    return 0
