"""Graders ask the same of objects that are here and of handles of those elsewhere."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.grading.lab97
import tests.grading.lab98  # noqa: F401
from overlaplab.deadline import OutOfTimeError
from overlaplab.grading import hosting, remote, stage
from overlaplab.grading.children import Judge
from overlaplab.grading.exercise import find_exercise
from overlaplab.grading.stage import Handle
from overlaplab_course.lab06 import reference
from tests.grading.hosted import Hosts

Hold = Callable[..., Any]


@pytest.fixture(scope="module")
def hosts(judge: Judge) -> Hosts:
    return Hosts(judge)


@pytest.fixture(params=["here", "elsewhere"])
def hold(request: pytest.FixtureRequest, hosts: Hosts) -> Iterator[Hold]:
    """Gives the objects, or handles of them."""
    if request.param == "here":
        yield lambda *objects: objects
        return
    opened: list[Any] = []

    def elsewhere(*objects: object) -> list[Any]:
        opened.append(hosts.holding(find_exercise("98.3"), *objects))
        found: list[Any] = opened[-1].__enter__().objects()
        return found

    yield elsewhere
    for context in opened:
        context.__exit__(None, None, None)


def step(x: torch.Tensor, factor: float) -> dict[str, torch.Tensor]:
    work = dist.all_reduce(x, async_op=True)
    y = x @ x
    work.wait()
    return {"sum": x * factor, "product": y}


def on_rank(program: Callable[..., Any], factor: float) -> Any:
    return program(torch.full((8, 8), 1.0 + dist.get_rank()), factor)


def test_a_run_leaves_the_same_values_record_and_times_wherever_it_was(hold) -> None:
    (program,) = hold(step)
    seen = stage.run(on_rank, program, 0.5, world_size=3, hardware="chalk")
    right = stage.run(on_rank, step, 0.5, world_size=3, hardware="chalk")
    assert seen.program == right.program and seen.timeline == right.timeline
    assert seen.warnings == right.warnings and len(seen.warnings) == 3
    for mine, ours in zip(seen.values, right.values, strict=True):
        assert {k: v.tolist() for k, v in mine.items()} == {
            k: v.tolist() for k, v in ours.items()
        }


def test_an_object_may_stand_anywhere_in_what_a_job_is_given(hold) -> None:
    (double,) = hold(lambda x: 2 * x)
    assert double(4) == 8
    assert stage.job(list, map(double, [1])) == [2]
    assert stage.job(_apply, functools.partial(double, 3)) == 6
    assert stage.job(_apply, {"deep": [(double, 5)]}) == 10


def _apply(call: Any) -> Any:
    if isinstance(call, dict):
        fn, argument = call["deep"][0]
        return fn(argument)
    return call()


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self) -> None:
        self.value += 1


def test_an_instance_keeps_its_state_between_jobs(hold) -> None:
    made, plain = hold(Counter, {"answer": [1, (2, 3.5)]})
    counter = made(start=6)
    stage.job(getattr, counter, "add")()
    assert stage.job(getattr, counter, "value") == 7
    assert plain == {"answer": [1, (2, 3.5)]}


def test_what_code_does_to_its_argument_is_seen_by_who_asks_for_it(hold) -> None:
    (sort,) = hold(lambda items: items.sort())
    answer, (left,) = stage.job(stage.call_and_return, sort, [3, 1, 2])
    assert answer is None and left == [1, 2, 3]


def shares_memory(tensors: list[torch.Tensor]) -> bool:
    tensors[0].zero_()
    return bool((tensors[1] == 0).all())


def test_tensors_that_share_memory_share_it_where_they_are_sent(hold) -> None:
    (shares,) = hold(shares_memory)
    flat = torch.ones(4)
    assert shares([flat, flat[1:3]]) is True


def refuses(x: object) -> None:
    raise KeyError("no such thing")


def test_an_error_is_caught_by_its_class_and_names_the_learners_line(hold) -> None:
    (code,) = hold(refuses)
    with pytest.raises(LookupError) as caught:
        code(1)
    assert str(caught.value) == "'no such thing'"
    assert type(caught.value).__name__ == "KeyError"


def test_only_what_needs_the_learners_objects_is_done_elsewhere(hosts) -> None:
    with hosts.holding(find_exercise("98.3"), os.getpid) as host:
        (there,) = host.objects()
        assert there() != os.getpid() == stage.job(os.getpid)
        assert repr(there) == "<built-in function getpid>"
    with pytest.raises(LookupError, match="is in no process that could be asked"):
        there()
    with pytest.raises(AttributeError, match=r"ask stage\.job\(getattr, it, 'x'\)"):
        there.x  # noqa: B018


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def test_what_is_iterated_over_comes_as_a_list_that_has_an_end(hosts) -> None:
    with hosts.holding(find_exercise("98.3"), Counter, Endless()) as host:
        made, endless = host.objects()
        with pytest.raises(TypeError, match="not iterable"):
            list(made)
        with pytest.raises(ValueError, match="more than 10000 items"):
            list(endless)


def test_the_references_other_half_goes_where_the_reference_is_hidden(hosts) -> None:
    with hosts.holding(find_exercise("6.2"), lambda plan: plan([], 4)) as host:
        (calls,) = host.objects()
        assert calls(reference.plan_buckets) == []
        with pytest.raises(LookupError, match="the course's own solution is not here"):
            calls(_by_import)


def _by_import(*args: object) -> object:
    named = "overlaplab_course.lab06.reference"
    return sys.modules[named].plan_buckets(*args)


def burns() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads a clock that Linux has")
def test_who_swallows_its_deadline_is_left_when_its_cpu_clock_says_so(
    hosts, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "ALL_FACTOR", 0.0)
    monkeypatch.setattr(remote, "_GRACE_S", 0.5)
    monkeypatch.setattr(remote, "WALL_FACTOR", 1000.0)
    with hosts.holding(find_exercise("98.2"), burns) as host:
        (code,) = host.objects()
        with pytest.raises(OutOfTimeError, match="after 3 s of computing"):
            code()


def test_a_handle_of_nothing_is_refused(hosts) -> None:
    with hosts.holding(find_exercise("98.3"), 1) as host:
        host.objects()
        with pytest.raises(IndexError):
            Handle(7, "nothing")()


# -- hiding


def _functions() -> dict[str, Any]:
    """A module's worth, made anew: they are spoilt."""
    names: dict[str, Any] = {"functools": functools}
    exec(
        "def plain(x): return x\n"
        "@functools.lru_cache\ndef cached(x): return x\n"
        "class Base:\n"
        "    def __init__(self): self.x = 1\n"
        "class Kind(Base):\n"
        "    def __init__(self): super().__init__()\n"
        "    @staticmethod\n    def static(): return 1\n"
        "    @classmethod\n    def of(cls): return cls()\n"
        "    @property\n    def value(self): return 1\n",
        names,
    )
    return names


def test_hidden_code_refuses_to_work_whoever_has_kept_it() -> None:
    names = _functions()
    kept, kind = [names["plain"]], names["Kind"]
    made = kind()
    for name in ("plain", "cached", "Kind"):
        hosting._empty(names[name])
    assert isinstance(kept[0], FunctionType)
    for call in (
        lambda: kept[0](1),
        lambda: names["cached"](1),
        kind,
        kind.static,
        kind.of,
        lambda: made.value,
    ):
        with pytest.raises(LookupError, match="is not here, where yours is judged"):
            call()
    assert names["Base"]().x == 1


def test_a_process_that_ends_by_a_fault_of_ours_says_which(hosts: Hosts) -> None:
    child = hosts._judge._fork("host")
    try:
        child.send({"exercise": "97.9", "directory": "", "sources": {}}, b"")
        with pytest.raises(EOFError):
            child.receive_bytes(600)  # a guard
        reason, _ = child.how_it_ended()
    finally:
        child.close()
    assert reason.startswith("ended the process with code 1 (AttributeError: ")
    assert "nowhere" in reason
