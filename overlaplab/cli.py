"""The command line: `overlaplab demo`, `overlaplab grade`.

Reads arguments and prints; what a command does is elsewhere. Heavy modules are imported
inside the commands, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import ParamSpec, TypeVar

import click

from overlaplab.errors import OverlaplabError

P = ParamSpec("P")
R = TypeVar("R")


def _one_error_line(command: Callable[P, R]) -> Callable[P, R]:
    """What the user can repair is told in a message and exit code 2, no traceback."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (OverlaplabError, ValueError, TypeError, OSError) as error:
            click.echo(f"overlaplab: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("overlaplab: interrupted", err=True)
            sys.exit(130)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("overlaplab"), message="%(prog)s %(version)s")
def main() -> None:
    """Hide communication behind computation: a course and its library."""
