"""The package's version: `overlaplab.__version__`."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

UNKNOWN = "0+unknown"


def find_version(tree: Path = Path(__file__).parents[1]) -> str:
    """What is installed; else what the source tree says; else "0+unknown"."""
    try:
        return version("overlaplab")
    except PackageNotFoundError:  # a source tree on the path
        pass
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
        return str(project["version"]) if project["name"] == "overlaplab" else UNKNOWN
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return UNKNOWN
