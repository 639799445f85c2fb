"""Threads of a rank: members of it, with its record, groups and generators."""

import queue
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils.data import DataLoader

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.cluster.rank_threads import brief, recorded, start


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
