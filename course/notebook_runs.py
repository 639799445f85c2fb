"""Run notebooks, and keep of their outputs what is the same in the next run.

Used by build.py. Knows nothing of lessons, markers or what a check checks.
"""

from __future__ import annotations

import base64
import copy
import io
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from numpy.typing import NDArray
from PIL import Image

CELL_TIMEOUT_S = 900  # a guard: a busy machine does not come near it
Bytes = NDArray[np.uint8]
PNG_LIMIT_BYTES = 100_000
PALETTE = 256  # colours of a stored picture, transparent ones among them
WIDGETS = "application/vnd.jupyter.widget-view+json"
# What a check raises that has come to a verdict; anything else is a fault in the lab.
VERDICTS = ("CheckFailed", "AssertionError", "NotImplementedError")
ERROR_LINES = 25  # of a traceback in a message
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYTHONHASHSEED": "0",
    "JUPYTER_PLATFORM_DIRS": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
UNSTABLE = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),  # colours
    (re.compile(r"\bat 0x[0-9a-f]+"), "at 0x..."),
    (re.compile(r"(?:/[\w.-]+)*/ipykernel_\d+/\d+\.py"), "<cell>"),
)


class BuildError(Exception):
    """The course cannot be built, has drifted or proves nothing; says where and why."""


def text(notebook: NotebookNode) -> str:
    """The notebook as it is stored: the same for equal notebooks."""
    return str(nbformat.writes(notebook, version=4)).rstrip("\n") + "\n"


def write(notebook: NotebookNode, path: Path) -> None:
    """Store a notebook; a reader never sees half of one."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text(notebook), encoding="utf-8")
    part.replace(path)


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    """A copy with sources, ids and metadata only."""
    bare = copy.deepcopy(notebook)
    for cell in bare.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return bare


def execute(notebook: NotebookNode, folder: Path, *, allow_errors: bool) -> None:
    """Run the cells in `folder`, in a kernel of their own; outputs go into `notebook`.

    Raises:
        BuildError: for a cell that raises (unless allowed), hangs, or kills its kernel.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        allow_errors=allow_errors,
        record_timing=False,
        coalesce_streams=True,
        store_widget_state=False,
        extra_arguments=["--log-level=40"],  # no warnings among the build's own lines
        resources={"metadata": {"path": str(folder)}},
    )
    folder.mkdir(exist_ok=True)
    try:
        client.execute(env=os.environ | ENVIRONMENT)
    except CellExecutionError as error:
        said = "\n".join(_plain(str(error)).rstrip().splitlines()[-ERROR_LINES:])
        raise BuildError(f"{_reached(notebook)}:\n{said}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        said = str(error).splitlines()[0]
        raise BuildError(f"after {_reached(notebook)}: {said}") from None


def _reached(notebook: NotebookNode) -> str:
    done = [cell.id for cell in notebook.cells if cell.get("execution_count")]
    return f"cell {done[-1]!r}" if done else "no cell"


def execute_solution(notebook: NotebookNode, folder: Path, root: Path) -> None:
    """Run a solved notebook and make its outputs fit to be stored.

    Raises:
        BuildError: as `execute`, or for outputs that must not be stored.
    """
    metadata = copy.deepcopy(notebook.metadata)
    execute(notebook, folder, allow_errors=False)
    notebook.metadata = metadata  # the run added its Python's version
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [_stable(output) for output in cell.outputs]
            cell.outputs = [output for output in cell.outputs if output is not None]
    if problems := stored_problems(notebook, "the solution", root):
        raise BuildError("\n".join(problems))


def stored_problems(notebook: NotebookNode, name: str, root: Path) -> list[str]:
    """What must not be stored in a solution: a gap, an error, a path, a widget."""
    problems: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        where = f"{name}, cell {cell.id!r}"
        if cell.source.strip() and not cell.execution_count:
            problems.append(f"{where}: not executed")
        for output in cell.outputs:
            if output.output_type == "error" and "raises-exception" not in (
                cell.metadata.get("tags", ())
            ):
                problems.append(f"{where}: stores an error, {output.ename}")
            data = output.get("data", {})
            words = [output.get("text", ""), *output.get("traceback", ())]
            words += [v for k, v in data.items() if k.startswith("text/")]
            if any(str(path) in word for word in words for path in (root, Path.home())):
                problems.append(f"{where}: shows a path of this machine")
            if len(data.get("image/png", "")) * 3 // 4 > PNG_LIMIT_BYTES:
                problems.append(f"{where}: a picture over {PNG_LIMIT_BYTES} bytes")
            words = output.get("metadata", {}).get("image/png", {}).get("alt", "")
            if "image/png" in data and not words.strip():
                problems.append(f"{where}: a figure without words (alt)")
            if WIDGETS in data:
                problems.append(f"{where}: a widget's view; it is blank when stored")
    return problems


def prove_unsolved(folder: Path, topics: Sequence[str] = ()) -> None:
    """Run labs as handed out, two at a time: each check must raise, no other cell.

    And where a prediction was left as it was handed out, none may be shown.

    Args:
        folder: of the labs.
        topics: only those whose names start so; all by default.

    Raises:
        BuildError: for the labs where that is not so, or if there is no lab.
    """
    labs = [
        path
        for path in sorted(folder.glob("*.ipynb"))
        if not topics or path.name.startswith(tuple(topics))
    ]
    if not labs:
        named = f" that starts with {' or '.join(topics)}" if topics else ""
        raise BuildError(f"nothing to prove: no lab{named} in {folder}")
    with ThreadPoolExecutor(max_workers=2) as both:  # each has a kernel of its own
        executed = list(both.map(partial(_execute_unsolved, folder), labs))
    problems: list[str] = []
    for path, lab in zip(labs, executed, strict=True):
        found = unsolved_problems(lab)
        problems += [f"labs/{path.name}, {problem}" for problem in found]
        checks = sum(_has_tag(cell, "check") for cell in lab.cells)
        if not found:
            said = "check raises" if checks == 1 else "checks raise"
            print(f"labs/{path.name}: its {checks} {said}, and nothing else")
    if problems:
        raise BuildError("\n".join(problems))


def _execute_unsolved(folder: Path, path: Path) -> NotebookNode:
    lab: NotebookNode = nbformat.read(path, as_version=4)
    execute(lab, folder, allow_errors=True)
    return lab


def unsolved_problems(lab: NotebookNode) -> list[str]:
    """Where an executed, unsolved lab does not fail as it should."""
    problems: list[str] = []
    if not any(_has_tag(cell, "check") for cell in lab.cells):
        problems.append("no cell: no check")
    for cell in lab.cells:
        errors = [o for o in cell.get("outputs", ()) if o.output_type == "error"]
        said = f"{errors[0].ename}: {errors[0].evalue}"[:200] if errors else ""
        where = f"cell {cell.id!r}"
        if _has_tag(cell, "check"):
            if not errors:
                problems.append(f"{where}: this check passes on the bare stub")
            elif errors[0].ename not in VERDICTS:
                problems.append(f"{where}: raises for the wrong reason, {said}")
        elif errors and not _has_tag(cell, "raises-exception"):
            problems.append(f"{where}: raises, and is no check: {said}")
        printed = [output.get("text", "") for output in cell.get("outputs", ())]
        if any("your guess:" in text for text in printed):
            problems.append(f"{where}: shows a guess that nobody made")
    return problems


def _has_tag(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", ())


def _stable(output: NotebookNode) -> NotebookNode | None:
    """The output without what changes from run to run, None if nothing is left."""
    if output.output_type == "stream":
        output.text = _plain(output.text)
        return output
    if output.output_type == "error":
        output.traceback = [_plain(line) for line in output.traceback]
        return output
    data = output.data
    if data.pop(WIDGETS, None) is not None:
        return None
    if "image/png" in data:  # in the HTML beside it is the same picture again
        data.pop("text/html", None)
    for kind, value in data.items():
        if kind.startswith("text/"):
            data[kind] = _plain(value)
        elif kind == "image/png":
            data[kind] = _small_png(value)
    return output


def _plain(words: str) -> str:
    for pattern, instead in UNSTABLE:
        words = pattern.sub(instead, words)
    return words


def _small_png(encoded: str) -> str:
    """A drawing needs few colours, transparent ones too: a palette makes it a third."""
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    pixels = np.asarray(picture).reshape(-1, 4).view(np.uint32).ravel()
    colors, place, times = np.unique(pixels, return_inverse=True, return_counts=True)
    table, numbers = _palette(colors.view(np.uint8).reshape(-1, 4), times)
    shape = picture.height, picture.width
    packed = Image.fromarray(numbers[place].reshape(shape))
    packed.putpalette(table[:, :3].tobytes())  # a grey picture becomes one of numbers
    smaller = io.BytesIO()
    packed.save(
        smaller, format="PNG", optimize=True, transparency=table[:, 3].tobytes()
    )
    again = base64.b64encode(smaller.getvalue()).decode()
    return again if len(again) < len(encoded) else encoded


def _palette(colors: Bytes, times: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
    """The colours that are kept, and for each of `colors` the number of the nearest.

    One after the other that is kept which is farthest from those before, for as many
    pixels as have it: words of a rare colour keep theirs.
    """
    every = colors.astype(np.float64) * (1, 1, 1, 2)
    nearest = np.zeros(len(colors), dtype=np.uint8)
    far = np.full(len(colors), np.inf)
    kept = [int(times.argmax())]
    while True:
        distance = ((every - every[kept[-1]]) ** 2).sum(1)
        nearest[distance < far] = len(kept) - 1
        far = np.minimum(far, distance)
        if len(kept) == PALETTE or not far.any():
            return colors[kept], nearest
        kept.append(int((far * times).argmax()))
