"""What is solved in a folder of labs, as the saved notebooks say; nothing is run.

A check prints its verdict below its cell, and Jupyter saves it there. So this answers
at once, and believes the notebook: `overlaplab grade` runs it and judges anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlaplab.errors import NotebookError, on_one_line
from overlaplab.grading.cells import NotebookCell, checks_in, find_lab, read_notebook

_VERDICT = re.compile(r"^(\d+\.\d+[a-z]?) .*: (passed|not yet|not judged)$", re.M)


@dataclass(frozen=True, slots=True)
class LabProgress:
    """One lab's notebook.

    Args:
        notebook: its path.
        solved: numbers of the exercises whose last saved check passed, in order.
        left: numbers of the others, in order.
        tried: whether any check of it was run and saved.
    """

    notebook: Path
    solved: tuple[str, ...]
    left: tuple[str, ...]
    tried: bool

    def __str__(self) -> str:
        total = len(self.solved) + len(self.left)
        name = on_one_line(self.notebook.stem)
        row = f"{name:28} {len(self.solved):2} of {total:2}"
        if not self.left:
            return f"{row}   done"
        return f"{row}   next: {self.left[0]}" if self.tried else row


def read_progress(folder: Path) -> list[LabProgress]:
    """Of every lab in `folder`, in the order of their names.

    Notebooks of something else are left out.

    Raises:
        NotebookError: no such folder, no lab in it, or a lab that cannot be read.
    """
    if not folder.is_dir():
        raise NotebookError(
            f"{folder}: there is no such folder; expected that of your labs"
        )
    labs = [lab for path in sorted(folder.glob("*.ipynb")) if (lab := _read_lab(path))]
    if not labs:
        raise NotebookError(
            f"{folder}: no lab in it; expected notebooks such as 00_start.ipynb. Name "
            "the folder of your labs: overlaplab progress FOLDER"
        )
    return labs


def next_lab(labs: Sequence[LabProgress]) -> LabProgress | None:
    """The first lab with something left, if none of those that were begun has."""
    left = [lab for lab in labs if lab.left]
    return None if any(lab.tried for lab in left) else next(iter(left), None)


def _read_lab(path: Path) -> LabProgress | None:
    cells = read_notebook(path)
    numbers = list(dict.fromkeys(id for cell in cells for id in checks_in(cell.source)))
    if not numbers:
        return None
    find_lab(cells, path)
    last = dict(verdict for cell in cells for verdict in _verdicts(cell))
    solved = tuple(n for n in numbers if last.get(n) == "passed")
    left = tuple(n for n in numbers if n not in solved)
    return LabProgress(path, solved, left, tried=bool(last))


def _verdicts(cell: NotebookCell) -> Iterator[tuple[str, str]]:
    asked = checks_in(cell.source)  # a printed verdict of another cell's is no verdict
    return ((id, said) for id, said in _VERDICT.findall(cell.printed) if id in asked)
