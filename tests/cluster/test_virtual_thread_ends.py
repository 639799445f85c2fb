"""Threads of a rank end with it, in whichever way it ends."""

import _thread
import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.cluster.rank_threads import brief, recorded, start
from tests.guards import GUARD_S


def test_a_rank_ends_when_its_threads_have_ended():
    def step():
        go = threading.Event()

        def work():
            go.wait()
            dist.all_reduce(torch.ones(1))

        start(work)
        go.set()

    _, program = run_virtual(step, world_size=2)
    for rank in range(2):
        assert [name for name, _ in brief(program, rank)] == ["ones", "all_reduce"]
    assert find_findings(program) == ()


def test_a_pools_work_is_done_before_its_rank_ends():
    pools = []

    def step():
        pools.append(ThreadPoolExecutor(1))
        for _ in range(3):
            pools[0].submit(torch.ones, 1)

    _, program = recorded(step)
    assert [name for name, _ in brief(program)] == ["ones"] * 3


def test_a_daemon_ends_with_its_rank():
    def step():
        ended, items, worked = [], queue.Queue(), threading.Event()

        def work():
            try:
                while True:
                    items.get()
                    torch.ones(1)
                    worked.set()
            finally:
                ended.append(True)

        start(work, daemon=True)
        items.put(1)
        worked.wait()
        return ended

    before = threading.active_count()
    values, program = run_virtual(step, world_size=2)
    assert values == ([True], [True])
    assert ("ones", "default") in brief(program)
    assert threading.active_count() == before


@pytest.mark.parametrize("who", ["rank", "thread", "both"])
def test_waiting_for_what_never_comes_is_named(who):
    def step():
        never = queue.Queue()
        if who != "rank":
            start(never.get, name="the reader")
        if who != "thread":
            never.get()

    with pytest.raises(ol.DeadlockError) as refused:
        run_virtual(step, world_size=1)
    text = str(refused.value)
    assert "no rank can move" in text
    waits = "waits for another thread (a lock, condition, event, queue or future)"
    if who != "thread":
        assert f"rank 0 {waits} [test_virtual_thread_ends.py" in text
    if who != "rank":
        assert f"rank 0, in thread 'the reader', {waits}" in text
    if who == "thread":
        assert "rank 0 waits at its end for the threads that it started" in text


def test_a_deadlock_of_two_locks_is_named():
    def step():
        one, other = threading.Lock(), threading.Lock()

        def work(first, second):
            with first:
                time.sleep(1)
                with second:
                    pass

        for thread in (start(work, one, other), start(work, other, one)):
            thread.join()

    with pytest.raises(ol.DeadlockError) as refused:
        run_virtual(step, world_size=1)
    text = str(refused.value)
    assert text.count("waits for another thread") == 2
    assert "rank 0 waits for thread 'Thread-" in text


@pytest.mark.parametrize("how", ["closure", "class", "pool"])
def test_memory_of_a_thread_is_free_when_it_has_ended(how):
    class Keeping(threading.Thread):
        def run(self):
            self.value = torch.ones(8)

    def step():
        def work(value):
            value.add_(1)

        if how == "closure":
            start(work, torch.ones(8)).join()
        elif how == "class":
            thread = Keeping()
            thread.start()
            thread.join()
            del thread
        else:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(work, torch.ones(8))
        torch.zeros(4)
        dist.barrier()

    _, program = recorded(step)
    zeros = next(o.index for o in program.ranks[0] if o.name == "zeros")
    assert program.storages[0].freed == zeros


def test_what_a_thread_does_not_catch_ends_the_run():
    def step():
        def work():
            raise KeyError("no such item")

        start(work)
        dist.all_reduce(torch.ones(1))
        queue.Queue().get()

    with pytest.raises(ol.RankError, match="no such item") as refused:
        run_virtual(step, world_size=2)
    assert "in work" in refused.value.remote_traceback


def test_a_thread_may_leave_by_exit_and_begins_once():
    def step():
        with pytest.raises(RuntimeError, match="can only be started once"):
            start(sys.exit, 3).start()
        thread = start(sys.exit)
        thread.join()
        with pytest.raises(RuntimeError, match="can only be started once"):
            thread.start()
        return "went on"

    assert recorded(step)[0] == "went on"


def test_pools_of_all_ranks_are_fed_at_once():
    def step():
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(torch.full, (1,), float(n)) for n in range(50)]
            return sum(future.result().item() for future in made)

    values, _ = run_virtual(step, world_size=2, timeout_s=5)
    assert values == (1225, 1225)


def test_an_error_in_a_pool_is_its_futures():
    def step():
        def work():
            raise KeyError("no such item")

        with ThreadPoolExecutor(2) as pool:
            future = pool.submit(work)
            return repr(future.exception())

    assert recorded(step)[0] == "KeyError('no such item')"


@pytest.mark.parametrize("pool", [False, True])
def test_an_error_of_the_rank_ends_its_threads(pool, caplog):
    pools = []

    def step():
        never = threading.Event()
        if pool:
            pools.append(ThreadPoolExecutor(1))
            pools[0].submit(never.wait)
        else:
            start(never.wait)
        dist.barrier()
        raise ValueError("of the rank")

    before = threading.active_count()
    with pytest.raises(ol.RankError, match="of the rank"):
        run_virtual(step, world_size=2)
    assert threading.active_count() == before
    assert caplog.text == ""


def test_a_thread_that_never_stops_computing_is_named_at_the_deadline():
    def step():
        def forever():
            while True:
                pass

        start(forever, name="the spinner").join()

    with pytest.raises(ol.RunTimeoutError) as refused:
        run_virtual(step, world_size=1, timeout_s=1)
    lines = str(refused.value).splitlines()
    assert any("rank 0, in thread 'the spinner', was at" in line for line in lines)
    assert any("(waits for thread 'the spinner' to end)" in line for line in lines)


def test_who_waits_in_the_system_keeps_the_turn_and_the_other_is_named():
    receiver, sender = os.pipe()
    before = set(threading.enumerate())

    def step():
        start(os.write, sender, b"x", name="the writer")
        os.read(receiver, 1)

    with pytest.raises(ol.RunTimeoutError) as refused:
        run_virtual(step, world_size=1, timeout_s=0.05)
    os.write(sender, b"x")  # or its thread would stay, and the next test count it
    for left in set(threading.enumerate()) - before:
        left.join(GUARD_S)
    lines = str(refused.value).splitlines()
    assert any("rank 0 was at" in line and "in step" in line for line in lines)
    assert any("'the writer'" in x and "(waiting for its turn)" in x for x in lines)


@pytest.mark.parametrize("busy", ["thread", "rank", "both"])
def test_an_interrupt_ends_threads_with_their_ranks(busy):
    def step():
        items = queue.Queue(maxsize=1)

        def work():
            while True:
                items.put(1) if busy != "thread" else sum(range(100))

        start(work)
        while True:
            items.get() if busy != "rank" else sum(range(100))

    before = threading.active_count()
    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_virtual(step, world_size=2)
    timer.join()
    assert threading.active_count() == before
    assert run_virtual(lambda: dist.get_rank(), world_size=2)[0] == (0, 1)


def test_threading_is_as_it_was_after_a_run():
    names = ["Lock", "RLock", "_allocate_lock", "_time"]
    before = [getattr(threading, name) for name in names]
    others = queue.SimpleQueue, time.sleep, vars(threading.Thread).copy()

    def step():
        start(lambda: None).join()

    recorded(step)
    assert [getattr(threading, name) for name in names] == before
    assert (queue.SimpleQueue, time.sleep, vars(threading.Thread).copy()) == others


def test_a_librarys_threads_may_answer_a_rank():
    def step():
        answers = queue.Queue()
        with ThreadPool(1) as pool:
            pool.apply_async(sum, ([1, 2],), callback=answers.put)
            return answers.get()

    _, program = recorded(step)
    assert recorded(step) == (3, program)
    assert brief(program) == []


def test_threads_outside_of_ranks_are_pythons_own():
    done, seen = threading.Event(), []

    def look():
        lock = threading.Lock()
        seen.append(type(lock))
        done.set()

    thread = threading.Thread(target=look)

    def step():
        dist.barrier()

    thread.start()
    recorded(step)
    thread.join()
    assert seen == [type(threading.Lock())]
