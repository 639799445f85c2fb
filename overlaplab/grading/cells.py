"""The code cells of a learner's notebook, and which lab they are of."""

from __future__ import annotations

import json
import re
from collections import Counter
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
    is_check: bool = False  # the course made it to check the exercise
    printed: str = ""  # the text of its saved outputs


def find_lab(cells: Sequence[NotebookCell], path: Path) -> str:
    """The lab whose exercises most cells name: "06".

    What editors keep of a cell beside its text says so; where that is lost, the checks
    that it calls.

    Raises:
        NotebookError: they name none, or two labs as often.
    """
    named = [cell.exercise for cell in cells if cell.exercise]
    named = named or [id for cell in cells for id in checks_in(cell.source)]
    if not named:
        raise NotebookError(
            f"{path}: no exercise in any of its {len(cells)} code cells; expected a "
            "notebook made from labs/, such as labs/06_bucketing.ipynb"
        )
    labs = Counter(name.split(".")[0].zfill(2) for name in named)
    (lab, most), *others = labs.most_common()
    if others and others[0][1] == most:
        known = ", ".join(sorted(labs))
        raise NotebookError(
            f"{path}: as many exercises of one lab as of another ({known}); expected "
            "those of one"
        )
    return lab


def checks_in(source: str) -> list[str]:
    """The exercises whose check it calls; the comments are not read."""
    lines = (line.partition("#")[0] for line in source.splitlines())
    return _CHECK_CALL.findall("\n".join(lines))


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
    return NotebookCell(number, source, str(exercise), locked, _read_outputs(cell))


def _read_outputs(cell: Mapping[str, Any]) -> str:
    """What it printed, and the message of what it raised; pictures are left out."""
    printed = []
    outputs = cell.get("outputs")
    for output in outputs if isinstance(outputs, list) else ():
        if not isinstance(output, dict):
            continue
        text = output.get("text", output.get("evalue", ""))
        lines = text if isinstance(text, list) else [text]
        printed.append("".join(str(line) for line in lines))
    return "\n".join(printed)
