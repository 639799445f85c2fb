"""One thread of all runs at a time, and goes on where another waits."""

import contextlib
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.cluster.rank_threads import brief, recorded, start

LONG_S = 1000.0  # that nobody waits for on the wall


def test_a_queue_hands_over_where_one_waits():
    def step():
        batches = queue.Queue(maxsize=1)

        def produce():
            for index in range(3):
                batches.put(torch.full((2,), float(index)))
            batches.put(None)

        start(produce)
        total = torch.zeros(2)
        while (batch := batches.get()) is not None:
            total += batch
        return total.tolist()

    value, program = recorded(step)
    assert value == [3, 3]
    assert [name for name, _ in brief(program)] == [
        "zeros",
        "full",  # the queue is full with it
        "full",
        "add_",
        "full",
        "add_",
        "add_",
        "tolist",
    ]


def everything():
    """Ranks and threads that wait for one another in many ways."""
    side = streams.Stream()
    results, gate, lock = queue.SimpleQueue(), threading.Barrier(3), threading.RLock()
    total = torch.zeros(1)

    def work(number):
        gate.wait()
        for _ in range(3):
            side.wait_stream(streams.current_stream())
            with lock, streams.stream(side):
                total.add_(number)
            time.sleep(0.01 * (2 - number))
        results.put(number)

    threads = [start(work, number) for number in range(2)]
    gate.wait()
    dist.barrier()
    with ThreadPoolExecutor(2) as pool:
        sums = [pool.submit(lambda n=n: torch.ones(n).sum()) for n in range(70)]
        first = [future.result().item() for future in as_completed(sums)]
    order = [results.get(timeout=LONG_S) for _ in threads]
    streams.current_stream().wait_stream(side)
    dist.all_reduce(total)
    return first, order, total.item()


def test_two_runs_are_equal():
    one, other = (run_virtual(everything, world_size=3) for _ in range(2))
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert {total for _, _, total in one[0]} == {9}
    assert find_findings(one[1]) == ()


def plan_of(threads, items):
    """Threads that hand `items` on from queue to queue, each in its own way."""

    def step():
        queues = [queue.Queue(maxsize=size) for size, _, _ in threads]
        queues.append(queue.Queue())
        lock, passed = threading.Lock(), []

        def work(number, sleeps, locks):
            while (item := queues[number].get()) is not None:
                for _ in range(sleeps):
                    time.sleep(0.1 * item.item())
                with lock if locks else contextlib.nullcontext():
                    passed.append((number, item.item()))
                    queues[number + 1].put(item + 1)
            queues[number + 1].put(None)

        for number, (_, sleeps, locks) in enumerate(threads):
            start(work, number, sleeps, locks)
        for item in range(items):
            queues[0].put(torch.tensor([float(item)]) + 0)
            if item % 2:
                dist.barrier()
        queues[0].put(None)
        return [item.item() for item in iter(queues[-1].get, None)], passed

    return step


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=4
    ),
    st.integers(0, 5),
)
@settings(max_examples=30, deadline=None)
def test_lines_of_threads_lose_nothing_and_repeat_exactly(threads, items):
    step = plan_of(threads, items)
    one, other = (run_virtual(step, world_size=2) for _ in range(2))
    assert one == other
    for arrived, passed in one[0]:
        assert arrived == [item + len(threads) for item in range(items)]
        assert len(passed) == len(threads) * items


def test_nobody_sleeps_and_who_sleeps_shorter_wakes_first():
    def step():
        woken = []

        def work(seconds):
            time.sleep(seconds)
            woken.append(seconds)

        threads = [start(work, LONG_S * n) for n in (3, 1, 2)]
        time.sleep(2.5 * LONG_S)
        woken.append("rank")
        for thread in threads:
            thread.join()
        return woken

    value, _ = recorded(step)
    assert value == [LONG_S, 2 * LONG_S, "rank", 3 * LONG_S]


def test_a_time_out_comes_when_nobody_else_can_move():
    def step():
        seen, empty, event = [], queue.Queue(), threading.Event()

        def work():
            try:
                empty.get(timeout=LONG_S)
            except queue.Empty:
                seen.append("empty")
            seen.append(threading.Condition().acquire(timeout=1))
            event.set()

        thread = start(work)
        thread.join(timeout=LONG_S / 2)
        seen.append(thread.is_alive())
        seen.append(event.wait(2 * LONG_S))
        threading.Timer(LONG_S, seen.append, ["timer"]).start()
        time.sleep(2 * LONG_S)
        return seen

    value, _ = recorded(step)
    assert value == [True, "empty", True, True, "timer"]


@pytest.mark.parametrize("poll", ["is_set", "is_alive", "empty", "done", "acquire"])
def test_who_asks_in_a_loop_lets_others_go_on(poll):
    def step():
        lock = threading.Lock()
        done, items = threading.Event(), queue.Queue()
        with ThreadPoolExecutor(1) as pool:
            lock.acquire()

            def work():
                torch.ones(1)
                done.set()
                items.put(1)
                lock.release()

            thread = start(work) if poll != "done" else None
            future = pool.submit(work) if poll == "done" else None
            waits = {
                "is_set": lambda: not done.is_set(),
                "is_alive": lambda: thread.is_alive(),
                "empty": lambda: items.empty(),
                "done": lambda: not future.done(),
                "acquire": lambda: not lock.acquire(False),
            }[poll]
            while waits():
                pass
            torch.zeros(1)

    _, program = recorded(step)
    assert [name for name, _ in brief(program)] == ["ones", "zeros"]


def test_locks_keep_threads_out():
    def step():
        state, lock = {"count": 0}, threading.Lock()

        def work():
            for _ in range(50):
                with lock:
                    count = state["count"]
                    time.sleep(0.001)
                    state["count"] = count + 1

        for thread in [start(work) for _ in range(3)]:
            thread.join()
        return state["count"]

    assert recorded(step)[0] == 150
