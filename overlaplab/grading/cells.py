"""The code cells of a learner's notebook, and which lab they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlaplab.errors import NotebookError

_CHECK_CALL = re.compile(r"\bcheck\(\s*[\"'](\d+\.\d+[a-z]?)[\"']")


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """One code cell."""

    number: int  # position among all cells, from 1, as a person counts
    source: str  # its text
    exercise: str = ""  # the exercise that it solves or checks, "" if none
    is_check: bool = False  # it is an exercise's check; the grader judges in its place


def find_lab(cells: Sequence[NotebookCell], path: Path) -> str:
    """The lab whose exercises the cells name: "06".

    Raises:
        NotebookError: they name none, or those of several.
    """
    named = [cell.exercise for cell in cells if cell.exercise]
    if not named:
        raise NotebookError(
            f"{path}: no exercise in any of its {len(cells)} code cells; expected a "
            "notebook made from labs/, such as labs/06_bucketing.ipynb"
        )
    labs = {name.split(".")[0].zfill(2) for name in named}
    lab = labs.pop()
    if labs:
        raise NotebookError(
            f"{path}: exercises of labs {lab} and {', '.join(sorted(labs))}; expected "
            "those of one lab"
        )
    return lab


def read_notebook(path: Path) -> list[NotebookCell]:
    """The code cells of a notebook.

    Raises:
        NotebookError: no such file, not JSON, or not a notebook of version 4.
    """
    if not path.exists():
        raise NotebookError(f"{path}: there is no such file; expected a notebook")
    if not path.is_file():
        raise NotebookError(f"{path}: is no file; expected a notebook (.ipynb)")
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise NotebookError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also a number that is too long
        raise NotebookError(
            f"{path}: is not a notebook: no JSON ({error}); save it in Jupyter again"
        ) from None
    cells = raw.get("cells") if isinstance(raw, dict) else None
    if not isinstance(cells, list) or raw.get("nbformat") != 4:
        raise NotebookError(
            f"{path}: is not a notebook of format 4: it has no list of cells with "
            '"nbformat": 4; save it in Jupyter again'
        )
    found = []
    for number, cell in enumerate(cells, start=1):
        if not isinstance(cell, dict) or "cell_type" not in cell:
            raise NotebookError(f"{path}, cell {number}: is no cell: {str(cell)[:40]}")
        if cell["cell_type"] == "code":
            found.append(_read_cell(cell, number, path))
    return found


def _read_cell(cell: Mapping[str, Any], number: int, path: Path) -> NotebookCell:
    source = cell.get("source", "")
    if isinstance(source, list):
        source = "".join(str(line) for line in source)
    if not isinstance(source, str):
        raise NotebookError(f"{path}, cell {number}: its source is no text")
    source = source.encode("utf-8", "replace").decode()  # half a pair is no character
    metadata = cell.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    ours, nbgrader = metadata.get("overlaplab"), metadata.get("nbgrader")
    exercise = ours.get("exercise", "") if isinstance(ours, dict) else ""
    locked = isinstance(nbgrader, dict) and nbgrader.get("grade") is True
    call = _CHECK_CALL.search(source)
    if call and not exercise:  # metadata lost on the way through another editor
        exercise, locked = call.group(1), True
    return NotebookCell(number, source, str(exercise), locked)
