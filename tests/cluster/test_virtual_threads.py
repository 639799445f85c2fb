"""Threads of a rank: members of it, one of which runs at a time."""

import _thread
import contextlib
import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings

LONG_S = 1000.0  # that nobody waits for on the wall


def recorded(step, world_size=1, **options):
    values, program = run_virtual(step, world_size=world_size, **options)
    return values[0], program


def brief(program, rank=0):
    return [(o.name, o.stream) for o in program.ranks[rank]]


def start(work, *args, **options):
    thread = threading.Thread(target=work, args=args, **options)
    thread.start()
    return thread


# -- what a thread is


def test_a_threads_operators_are_recorded_on_its_rank():
    def step():
        side, seen = streams.Stream(), []

        def work():
            seen.append((dist.get_rank(), dist.get_world_size(), ol.device()))
            seen.append(streams.current_stream().name)
            with streams.stream(side):
                seen.append(torch.ones(2).add_(dist.get_rank()).tolist())

        with streams.stream(side):
            start(work).join()
            torch.zeros(1)
        return seen

    values, program = run_virtual(step, world_size=2)
    for rank in range(2):
        where = (rank, 2, torch.device("cpu", 0))
        assert values[rank] == [where, "default", [1 + rank] * 2]
        assert brief(program, rank) == [
            ("ones", "stream 1"),
            ("add_", "stream 1"),
            ("tolist", "cpu"),
            ("zeros", "stream 1"),
        ]


def test_streams_labels_and_modes_of_a_thread_are_its_own():
    def step():
        seen, side = [], streams.Stream()
        go, done = threading.Event(), threading.Event()

        def work():
            with streams.annotate("inner"), streams.stream(side):
                torch.ones(1)
                done.set()
                go.wait()
                torch.ones(1)
            seen.append(torch.is_grad_enabled())

        with torch.no_grad(), streams.annotate("outer"):
            thread = start(work)
            done.wait()
            torch.zeros(1)
        torch.zeros(1)
        go.set()
        thread.join()
        torch.zeros(1)
        return seen

    value, program = recorded(step)
    assert value == [True]
    assert [(o.name, o.label, o.stream) for o in program.ranks[0]] == [
        ("ones", "inner", "stream 1"),
        ("zeros", "outer", "default"),
        ("zeros", "", "default"),
        ("ones", "inner", "stream 1"),
        ("zeros", "", "default"),
    ]


def test_what_a_thread_launches_is_of_its_ranks_step():
    def step():
        go = queue.Queue()

        def work():
            while go.get():
                torch.ones(1)

        thread = start(work)
        for number in (1, 2):
            with streams.step(number):
                go.put(True)
                dist.barrier()
                while go.qsize():
                    pass
        go.put(False)
        thread.join()

    _, program = recorded(step)
    steps = [o.attributes.get("step") for o in program.ranks[0] if o.name == "ones"]
    assert steps == [1, 2]


def test_a_label_of_a_thread_ends_no_step_of_its_rank():
    def step():
        begun, end = threading.Event(), threading.Event()

        def work():
            with streams.annotate("of the thread"):
                begun.set()
                end.wait()

        with streams.step(1):
            thread = start(work)
            begun.wait()
        with streams.step(2):
            end.set()
            thread.join()
            torch.ones(1)

    _, program = recorded(step)
    assert program.ranks[0][0].attributes == {"step": 2}


def test_a_thread_has_its_ranks_random_generators():
    def numbers():
        return torch.rand(1).item(), random.random()

    def step():
        found = [numbers()]
        dist.barrier()
        start(lambda: found.append(numbers())).join()
        dist.barrier()
        return [*found, numbers()]

    def alone():
        return [numbers() for _ in range(3)]

    values, _ = run_virtual(step, world_size=2)
    (expected,), _ = run_virtual(alone, world_size=1)
    assert values == (expected, expected)


def test_a_thread_may_start_threads_and_have_a_class_of_its_own():
    class Doubling(threading.Thread):
        def __init__(self, value, depth):
            super().__init__(name=f"depth {depth}")
            self.value, self.depth = value, depth

        def run(self):
            self.value = self.value * 2
            if self.depth:
                inner = Doubling(self.value, self.depth - 1)
                inner.start()
                inner.join()
                self.value = inner.value

    def step():
        thread = Doubling(torch.ones(1), 2)
        assert not thread.daemon
        thread.start()
        thread.join()
        return thread.value.item(), thread.is_alive(), thread.name

    value, program = recorded(step)
    assert value == (8, False, "depth 2")
    assert [name for name, _ in brief(program)] == ["ones", *["mul"] * 3, "item"]


def test_tensors_without_values_stay_so_in_threads():
    def step():
        made = []
        start(lambda: made.append(torch.ones(4) * 2)).join()
        dist.all_reduce(made[0])

    (_, real), (_, fake) = recorded(step), recorded(step, fake=True)
    assert brief(real) == brief(fake)


# -- turns


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


# -- collectives, loaders, hazards


@pytest.mark.parametrize("how", ["plain", "async", "functional"])
def test_a_thread_communicates_beside_its_rank(how):
    def step():
        value = torch.ones(2) * (dist.get_rank() + 1)
        out = []

        def work():
            if how == "functional":
                out.append(functional.all_reduce(value, "sum", dist.group.WORLD))
                return
            other = value.clone()
            handle = dist.all_reduce(other, async_op=how == "async")
            if handle is not None:
                handle.wait()
            out.append(other)

        thread = start(work)
        squared = value * value
        thread.join()
        dist.all_reduce(squared)
        return out[0].tolist(), squared.tolist()

    values, program = run_virtual(step, world_size=3)
    assert values == (([6, 6], [14, 14]),) * 3
    assert find_findings(program) == ()


def test_both_threads_of_a_rank_may_wait_for_one_collective():
    def step():
        if dist.get_rank():
            time.sleep(0)
        value = torch.ones(2)
        work = dist.all_reduce(value, async_op=True)
        seen = []

        def wait():
            work.wait()
            seen.append((value + 0).tolist())

        thread = start(wait)
        wait()
        thread.join()
        return seen

    values, _ = run_virtual(step, world_size=2)
    assert values == ([[2, 2]] * 2,) * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_may_load_and_copy_batches_ahead(workers):
    dataset = [torch.full((4,), float(i), device="cpu") for i in range(4)]

    def step():
        ready, copying = queue.Queue(maxsize=1), streams.Stream()

        def prefetch():
            loader = DataLoader(dataset, 2, pin_memory=True, num_workers=workers)
            for batch in loader:
                with streams.stream(copying):
                    moved = batch.to(ol.device(), non_blocking=True)
                    ready.put((moved, copying.record_event()))
            ready.put(None)

        start(prefetch)
        sums = []
        while (item := ready.get()) is not None:
            batch, copied = item
            copied.wait()
            batch.record_stream(streams.current_stream())
            sums.append(batch.sum())
        return [total.item() for total in sums]

    value, program = recorded(step)
    assert value == [4, 20]
    copies = [o.index for o in program.ranks[0] if o.kind == "memcpy"]
    sums = [o.after for o in program.ranks[0] if o.name == "sum"]
    assert sums == [(copy,) for copy in copies] and len(sums) == 2
    assert {program.ranks[0][copy].stream for copy in copies} == {"stream 1"}
    assert find_findings(program) == ()


def test_a_queue_orders_threads_and_no_streams():
    def step():
        ready, side = queue.Queue(), streams.Stream()

        def fill():
            with streams.stream(side):
                ready.put(torch.ones(4))

        thread = start(fill)
        value = ready.get()
        thread.join()
        total = value.sum()
        streams.current_stream().wait_stream(side)
        return total.item()

    _, program = recorded(step)
    (finding,) = find_findings(program)
    assert finding.kind == "hazard"
    names = [program.ranks[0][index].name for index in finding.ops]
    assert names == ["ones", "sum"]


# -- ends and errors


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
        assert f"rank 0 {waits} [test_virtual_threads.py" in text
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
