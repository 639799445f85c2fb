"""Ctrl-C in the middle of what a run sets up: nothing is left half done."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import overlaplab as ol
from overlaplab.cluster.virtual import run as runs
from overlaplab.cluster.virtual.interrupts import Interrupts, deferred_interrupts


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_it_is_allowed():
    order = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as interrupts:
        interrupt()
        order.append("set up")
        try:
            with interrupts.allowed():
                order.append("never")
        finally:
            order.append("taken down")
    assert order == ["set up", "taken down"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_one_that_is_never_allowed_acts_at_the_end():
    order = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        interrupt()
        order.append("all of it")
    assert order == ["all of it"]


def test_a_second_one_acts_at_once():
    order = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        interrupt()
        order.append("first")
        interrupt()
        order.append("never")
    assert order == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_it_is_allowed_it_acts_at_once():
    order = []
    with (
        pytest.raises(KeyboardInterrupt),
        deferred_interrupts() as interrupts,
        interrupts.allowed(),
    ):
        interrupt()
        order.append("never")
    assert not order


def rank_threads() -> Iterator[str]:
    return (t.name for t in threading.enumerate() if t.name.startswith("virtual"))


@pytest.mark.parametrize("where", ["while a thread starts", "while jobs are copied"])
def test_an_interrupted_start_of_a_run_leaves_no_thread_and_no_setting(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    ol.run(int, world_size=1)  # warm
    owner, name = {
        "while a thread starts": (threading, "_start_new_thread"),
        "while jobs are copied": (runs, "copy_job"),
    }[where]
    original: Callable[..., object] = getattr(owner, name)
    pending = [True]

    def interrupted(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        if pending:
            pending.clear()
            interrupt()
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        ol.run(int, world_size=2)
    assert gc.isenabled()
    for _ in range(500):
        if not list(rank_threads()):
            break
        time.sleep(0.01)
    assert not list(rank_threads())
    assert not isinstance(signal.getsignal(signal.SIGINT), Interrupts)
    assert ol.run(int, world_size=2).values == (0, 0)


def test_runs_leave_no_objects():
    """Thirty of them: less than an object of any kind a run, and no block of memory.

    What a process takes from the system may still vary by tens of MB: the C library
    keeps what threads have freed (600 runs of the README's step: 376 to 409 MB).
    """

    def step() -> None:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        reducer = ol.BucketedReducer(model)
        model(torch.ones(2, 8)).sum().backward()
        reducer.wait()

    def count() -> Counter[str]:
        gc.collect()
        return Counter(type(one).__name__ for one in gc.get_objects())

    gc.unfreeze()  # of conftest.py: all objects count
    for _ in range(10):
        ol.run(step, world_size=2)
    before, blocks = count(), sys.getallocatedblocks()
    for _ in range(30):
        ol.run(step, world_size=2)
    grown = {name: n for name, n in (count() - before).items() if n >= 30}
    assert not grown
    assert sys.getallocatedblocks() - blocks < 30 * 10
