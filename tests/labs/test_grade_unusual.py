"""`overlaplab grade` of a solved lab 00 whose answers are numpy's and functional."""

from __future__ import annotations

import json
from pathlib import Path

from overlaplab.grading.children import Judge
from overlaplab.grading.notebook import grade_notebook
from tests.guards import GUARD_S

SOLVED = Path(__file__).parents[2] / "solutions" / "00_start.ipynb"
MORE = {  # below the solution, in its cell
    "0.1": """
import numpy as np
pairs = schedule
def schedule(launches, launch_us):
    return np.array(pairs(launches, launch_us))  # then: check("0.6", found)
""",
    "0.2": "\ncounts = {k: np.int64(round(v)) for k, v in counts.items()}",
    "0.3": """
trained = train
def train(model, batches):
    losses, worst = trained(model, batches)
    return np.array(losses), np.float32(worst)
""",
    "0.4": """
import torch.distributed._functional_collectives as functional
def step(x, a):
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    return a @ a + total
check("0.4", step)
""",
}


def test_answers_of_numpy_and_functional_collectives_get_full_marks(
    judge: Judge, tmp_path: Path
) -> None:
    notebook = json.loads(SOLVED.read_text("utf-8"))
    for cell in notebook["cells"]:
        exercise = cell["metadata"].get("overlaplab", {}).get("exercise")
        if exercise and not cell["metadata"]["nbgrader"]["grade"]:
            cell["source"] = "".join(cell["source"]) + "\n" + MORE.pop(exercise, "")
    assert not MORE
    path = tmp_path / "lab.ipynb"
    path.write_text(json.dumps(notebook), "utf-8")
    report = grade_notebook(path, judge=judge, timeout_s=GUARD_S)
    assert report.full_marks, str(report)
