"""Cells that want marks without solving anything, and what each gets: cheats.toml.

Each is pickled as a notebook's objects are, and judged by the processes that judge
notebooks; then an honest solution is judged by the same.
"""

from __future__ import annotations

import re
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from overlaplab.cluster.pool.pickling import dumps
from overlaplab.grading.children import Judge, Objects, Outcome
from overlaplab.grading.exercise import Exercise
from tests.guards import GUARD_S

CHEATS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "cheats" / "cheats.toml").read_text("utf-8")
)
RIGHT = "def double(x):\n    return 2 * x"


@pytest.fixture(scope="module")
def tasks(judge: Judge) -> dict[str, Exercise]:
    labs = {cheat["exercise"].partition(".")[0].zfill(2) for cheat in CHEATS.values()}
    return {task.id: task for lab in sorted(labs) for task in judge.exercises(lab)}


def judged(judge: Judge, task: Exercise, cell: str, folder: Path) -> Outcome:
    """What the objects of a cell get."""
    for name in cloudpickle.list_registry_pickle_by_value():
        # Who plays cells has judged nothing, as tests before these may have.
        if name.endswith(".reference"):
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, "<ipython-input-1>", "exec"), names)
    payload = dumps([names[name] for name in task.solution])
    objects = Objects(payload, {"<ipython-input-1>": cell})
    return judge.judge(task, objects, folder, time.monotonic() + GUARD_S)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gets_what_the_list_says(
    name: str, judge: Judge, tasks: dict[str, Exercise], tmp_path: Path
) -> None:
    cheat = CHEATS[name]
    outcome = judged(judge, tasks[cheat["exercise"]], cheat["cell"], tmp_path)
    verdict = outcome.verdict or {}
    if cheat["gets"] == "full marks":
        assert verdict["passed"] is True
        return
    assert verdict.get("passed", False) is False
    false = [
        check["name"] for check in verdict.get("checks", ()) if not check["passed"]
    ]
    said = "\n".join([outcome.reason, verdict.get("error", ""), *false])
    assert cheat["gets"] in said
    assert outcome.judged is cheat.get("judged", True) or cheat["gets"] == ""
    honest = judged(judge, tasks["98.1"], RIGHT, tmp_path)
    assert honest.verdict is not None and honest.verdict["passed"] is True


READS = """
import os, threading, time
def read(descriptor):
    while os.read(descriptor, 1):
        pass
def sockets():
    for descriptor in range(3, 64):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{descriptor}"):
                yield descriptor
        except OSError:
            pass
def again():
    for descriptor in sockets():
        HOW
    time.sleep(0.02)
    return True
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("read(descriptor)", "most of them waiting|this machine is busy"),
        # Whoever reads first: half a question is none, and none comes after it.
        ("threading.Thread(target=read, args=[descriptor], daemon=True).start()", "."),
    ],
)
def test_who_reads_what_the_judge_asks_gets_a_reason_and_no_endless_wait(
    how: str, says: str, judge: Judge, tasks: dict[str, Exercise], tmp_path: Path
) -> None:
    (task,) = (t for t in judge.exercises("97") if t.id == "97.2")
    outcome = judged(judge, task, READS.replace("HOW", how), tmp_path)
    verdict = outcome.verdict or {}
    assert verdict.get("passed", False) is False
    said = outcome.reason + verdict.get("error", "")
    assert re.search(says, said), said
    honest = judged(judge, tasks["98.1"], RIGHT, tmp_path)
    assert honest.verdict is not None and honest.verdict["passed"] is True
