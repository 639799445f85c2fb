"""What is ours: this package and the courses installed beside it, decided here alone;
and what is neither ours nor a library's, but the user's.

Checks, copies between ranks, source lines, frames and pickling all ask whether code is
the user's. A course is a package that announces labs (entry points of `LABS`): its
functions are no more a learner's answer than those of this package.
"""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

# Entry points "labNN = package.labNN.checks": a module that declares exercises.
LABS = "overlaplab.labs"


@cache
def lab_entry_points() -> tuple[EntryPoint, ...]:
    """The labs that are installed, by name: "lab00", "lab01"."""
    return tuple(sorted(entry_points(group=LABS), key=lambda point: point.name))


@cache
def packages() -> tuple[str, ...]:
    """The top-level names of what is ours: "overlaplab", and those of courses."""
    courses = {point.module.partition(".")[0] for point in lab_entry_points()}
    return ("overlaplab", *sorted(courses - {"overlaplab"}))


@cache
def folders() -> tuple[str, ...]:
    """Where our source files lie, each path with a separator at its end."""
    specs = [find_spec(name) for name in packages()]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin]
    return tuple(os.path.dirname(os.path.abspath(o)) + os.sep for o in origins)


def is_our_module(name: str) -> bool:
    """Whether a module's dotted name, such as `__module__`, is ours.

    >>> is_our_module("overlaplab.streams"), is_our_module("overlaplab_of_mine")
    (True, False)
    """
    return name.partition(".")[0] in packages()


def is_our_file(path: str) -> bool:
    """Whether a source file is ours."""
    return path.startswith(folders())


@cache
def libraries() -> tuple[str, ...]:
    """How source files of Python, of installed packages and of what is installed beside
    torch begin."""
    torch = find_spec("torch")
    beside = os.path.dirname(os.path.dirname((torch and torch.origin) or ""))
    schemes = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {*map(sysconfig.get_path, schemes), *([beside] if beside else [])}
    return (*(path + os.sep for path in sorted(paths)), "<frozen")


@cache
def is_users_file(path: str) -> bool:
    """Whether it is neither ours, nor Python's, nor an installed package's."""
    return not path.startswith((*folders(), *libraries(), "<string>"))
