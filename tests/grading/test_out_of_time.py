"""Deadlines: they count the learner's computing, and are no trap for a busy machine."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from overlaplab import deadline
from overlaplab.cluster.run import run
from overlaplab.cluster.virtual import run_virtual
from overlaplab.deadline import Deadline, OutOfTimeError
from overlaplab.errors import RunTimeoutError
from overlaplab.grading import CheckFailed, Sheet, Verdict, check, exercise, judge
from overlaplab.grading.exercise import _REGISTRY, Exercise


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how many programs want to run on this machine; at first, none.

    However many do: the wall is far away for those tests that are not about it.
    """
    monkeypatch.setattr(deadline, "WALL_FACTOR", 1000.0)

    def set_load(programs: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (programs,) * 3)

    set_load(0.0)
    return set_load


@pytest.fixture
def near_wall(load: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is; a right solution may meet it on a machine that is very busy."""
    monkeypatch.setattr(deadline, "WALL_FACTOR", 10.0)


def calls_it(sheet: Sheet, thing: Any) -> None:
    sheet.expect("it is so", thing() is True)


def judged(thing: Any, *, timeout_s: float = 0.3, grade: Any = calls_it) -> Verdict:
    verifies = ("it is so",)
    return judge(
        Exercise("98.9", "Made up", ("thing",), verifies, 1, grade, timeout_s), thing
    )


def line_of(function: Any, number: int) -> str:
    return f"in {function.__name__}, line {function.__code__.co_firstlineno + number}"


def compute(cpu_s: float) -> bool:
    end = time.process_time() + cpu_s
    while time.process_time() < end:
        pass
    return True


def loops() -> None:
    while True:
        with contextlib.suppress(Exception):
            sum(range(10))


def sleeps() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.2)


def test_a_loop_that_computes_is_stopped_and_its_line_named(load):
    load(99.0)  # its computing is its own, whatever runs beside it
    verdict = judged(loops)
    assert verdict.judged
    said, place = verdict.error.splitlines()
    assert said == "your code was stopped after 0.3 s of computing"
    assert place.strip() in [line_of(loops, n) for n in (1, 2, 3)]


def test_code_that_sleeps_is_stopped_by_the_wall(load, near_wall):
    verdict = judged(sleeps)
    assert verdict.judged and not verdict.passed
    said, place = verdict.error.splitlines()
    assert said == "your code was stopped after 3 s, most of them waiting"
    assert place.strip() == line_of(sleeps, 3)


def test_on_a_busy_machine_the_wall_says_nothing(load, near_wall):
    load(99.0)
    verdict = judged(sleeps, timeout_s=0.1)
    assert not verdict.judged and not verdict.passed
    assert str(verdict).splitlines()[0] == "98.9 Made up: not judged"
    assert "machine is busy" in str(verdict) and verdict.to_dict()["judged"] is False


def test_a_run_that_sleeps_is_not_judged_either_on_a_busy_machine(load, near_wall):
    def on_ranks() -> None:
        run_virtual(sleeps, timeout_s=0.1)

    assert "RunTimeoutError" in judged(on_ranks, timeout_s=20).error
    load(99.0)
    assert not judged(on_ranks, timeout_s=20).judged


def test_what_is_not_judged_is_tried_once_more(load, near_wall, capsys):
    tried = []

    def grade(sheet: Sheet, thing: Any) -> None:
        tried.append(load(99.0))
        thing(len(tried))
        sheet.expect("it is so", True)

    exercise("98.7", title="", solution="x", verifies=["it is so"], timeout_s=0.1)(
        grade
    )
    try:
        assert check("98.7", lambda time_: time_ > 1 or sleeps()).passed
        assert len(tried) == 2
        with pytest.raises(CheckFailed, match="could not be judged"):
            check("98.7", lambda time_: sleeps())
        assert len(tried) == 4
    finally:
        del _REGISTRY["98.7"]


def of_ours(source: str, **names: Any) -> dict[str, Any]:
    """What the source defines, as if it stood in a file of this package."""
    exec(compile(source, deadline.__file__, "exec"), names)
    return names


def test_references_cost_the_learner_nothing(load):
    source = """
def grade(sheet, thing):
    end = clock() + 0.6
    while clock() < end: pass
    sheet.expect("it is so", thing())
"""
    grade = of_ours(source, clock=time.process_time)["grade"]
    assert judged(lambda: compute(0.05), grade=grade).passed


def test_a_number_of_the_learners_cannot_make_the_judge_compute_without_end(load):
    """No frame of theirs is on the stack then."""
    source = """
def grade(sheet, number):
    while number:
        pass
"""
    verdict = judged(7, timeout_s=0.1, grade=of_ours(source)["grade"])
    assert not verdict.passed and "after 0.1 s of computing" in verdict.error


@pytest.fixture
def slow_module(tmp_path, monkeypatch) -> Iterator[str]:
    name = "a_module_that_is_slow_to_import"
    (tmp_path / f"{name}.py").write_text(
        "import time\nend = time.process_time() + 0.8\n"
        "while time.process_time() < end: pass\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_an_alarm_never_interrupts_an_import(load, slow_module):
    def imports_and_loops() -> bool:
        module = importlib.import_module(slow_module)
        assert module.whole
        return compute(60)

    verdict = judged(imports_and_loops, timeout_s=0.2)
    assert line_of(compute, 2) in verdict.error or line_of(compute, 3) in verdict.error
    assert sys.modules[slow_module].whole
    assert judged(lambda: importlib.import_module(slow_module).whole).passed


def test_time_of_an_import_is_nobodys(load, slow_module):
    code = lambda: importlib.import_module(slow_module).whole  # noqa: E731
    assert judged(code, timeout_s=0.3).passed


def test_a_rank_that_imports_is_not_stopped_half_way(load, slow_module):
    def on_ranks() -> None:
        run_virtual(importlib.import_module, (slow_module,), timeout_s=0.2)

    with pytest.raises(RunTimeoutError):
        on_ranks()
    assert sys.modules[slow_module].whole


def test_a_loop_in_a_rank_is_named_by_its_own_function(load):
    def hook() -> None:
        while True:
            pass

    def on_ranks() -> None:
        run_virtual(hook)

    verdict = judged(on_ranks)
    assert line_of(hook, 1) in verdict.error or line_of(hook, 2) in verdict.error
    assert judged(lambda: run_virtual(torch.ones, (1,)) and True).passed


def test_code_is_stopped_in_its_own_frame_not_in_what_it_calls(load):
    """In ours, only if it does not return for a second."""
    source = "def ours():\n    for _ in range(10**5): pass\n"
    ours = of_ours(source)["ours"]

    def calls_ours() -> None:
        while True:
            ours()

    assert line_of(calls_ours, 2) in judged(calls_ours).error


def test_an_alarm_that_ran_before_runs_on():
    before = signal.setitimer(signal.ITIMER_REAL, 5000)
    with Deadline(5):
        compute(0.01)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, *before)
    assert 1000 < left_s <= 5000


def test_a_process_that_was_stopped_has_lost_nothing(tmp_path):
    """SIGSTOP for longer than the wall limit; then it computes what it needs."""
    script = """
import time
from overlaplab.deadline import Deadline
with Deadline(0.4):
    print("ready", flush=True)
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
print("done")
"""
    file = tmp_path / "script.py"
    file.write_text(script)
    with subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGSTOP)
        time.sleep(6)
        child.send_signal(signal.SIGCONT)
        assert child.stdout.read() == "done\n"


def test_nobody_looks_at_code_that_is_far_from_its_deadline(monkeypatch):
    """A look holds frames for a moment, which weak references may see."""
    monkeypatch.setattr(Deadline, "_stacks", None)
    assert judged(lambda: compute(0.5), timeout_s=5).passed


def test_in_another_thread_nothing_is_stopped():
    said = []

    def run() -> None:
        with Deadline(0.01):
            said.append(compute(0.1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == [True]


def test_the_deadline_is_no_exception_that_code_may_swallow():
    assert not issubclass(OutOfTimeError, Exception)


class Owned:
    """Something that a function of a rank lets go when it returns."""


def lets_go() -> bool:
    def works() -> Any:
        owned = Owned()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        return weakref.ref(owned)

    return works()() is None


def test_a_look_at_the_stack_keeps_nothing_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadline, "_FREE_SHARE", 0.0)
    gc.disable()
    try:
        with Deadline(60.0):
            values = run(lets_go, world_size=2).values
    finally:
        gc.enable()
    assert values == (True, True)
