"""Our reader beside HTA's, from a checkout: `python -m tests.trace_peers`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from overlaplab.bench.options import SETTINGS, heading, out_option, run_command
from overlaplab.bench.workload import write_json
from tests.trace_peers.measure import Plan, known_files, measure

PROGRAM = "tests.trace_peers"


@click.command(context_settings=SETTINGS)
@click.argument(
    "files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--hta-python", help="Python of an environment with HTA.  [default: none]"
)
@click.option("--rounds", default=5, help="Processes a side.")
@click.option("--large", type=int, help="Also a file of so many MiB.")
@click.option("--limit-gib", default=12, help="Memory a process.")
@out_option
def command(
    files: Sequence[Path],
    hta_python: str | None,
    rounds: int,
    large: int | None,
    limit_gib: int,
    out: Path | None,
) -> None:
    """From a trace on disk to its overlap: ours beside HTA's; no GPU is needed.

    FILES are traces of one rank; without any, the six of this repository.
    """
    results = heading("read-traces", "none", PROGRAM)
    results["command"] = without_paths(results["command"])
    plan = Plan(hta_python, rounds, large or 0, limit_gib * 2**30)
    results |= measure(files or known_files(), plan, click.echo)
    write_json(results, out)


def without_paths(command: str) -> str:
    """Files by their names alone: results speak of no machine's folders."""
    return " ".join(word.rpartition("/")[2] for word in command.split(" "))


if __name__ == "__main__":
    sys.exit(run_command(command, PROGRAM))
