"""What is wrong in a run is visible in its record, exactly, and nothing else is."""

from operator import methodcaller

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings


def findings(fn, world_size=2):
    _, program = run_virtual(fn, world_size=world_size)
    return [(f.kind, f.rank) for f in find_findings(program)]


def test_a_result_that_is_used_before_its_wait_is_a_hazard():
    def step():
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        doubled = grad * 2
        work.wait()
        return doubled

    assert findings(step) == [("hazard", 0), ("hazard", 1)]


def test_a_result_that_is_used_after_its_wait_is_none():
    def step():
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        work.wait()
        return grad * 2

    assert findings(step) == []


def test_a_wait_on_another_stream_than_the_reader_is_a_hazard():
    def step():
        side, grad = streams.Stream(), torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        with streams.stream(side):
            work.wait()
        return grad * 2

    assert findings(step, 1) == [("hazard", 0)]


def test_a_flat_buffer_filled_on_one_stream_and_sent_from_another_is_a_hazard():
    def step(event=False):
        comm = streams.Stream()
        flat = torch.zeros(4)
        comm.wait_stream(streams.current_stream())
        flat.copy_(torch.ones(4))
        if event:
            comm.wait_stream(streams.current_stream())
        with streams.stream(comm):
            work = dist.all_reduce(flat, async_op=True)
        work.wait()
        return flat + 1

    assert findings(step, 1) == [("hazard", 0)]
    assert findings(lambda: step(event=True), 1) == []


def test_neighbouring_parts_of_one_buffer_do_not_meet():
    def step():
        table = torch.zeros(4, 6)
        work = dist.all_reduce(table[0], async_op=True)
        columns = table[1:, 2:4].mul_(2)
        work.wait()
        return columns

    assert findings(step) == []


def test_a_work_that_nobody_waits_for_and_a_launch_that_meets_nobody_are_found():
    def step():
        dist.all_reduce(torch.ones(4), async_op=True)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4), async_op=True)

    kinds = findings(step)
    assert ("unwaited", 1) in kinds and ("unmatched", 0) in kinds


def test_correct_hooks_have_no_findings_and_a_missing_wait_has():
    def step(wait):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        works = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: works.append(dist.all_reduce(p.grad, async_op=True))
            )
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            if wait:
                for work in works:
                    work.wait()
            works.clear()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None

    assert findings(lambda: step(True)) == []
    assert {kind for kind, _ in findings(lambda: step(False))} == {
        "hazard",
        "unwaited",
    }


def test_backward_on_several_streams_has_no_findings():
    def step():
        side = streams.Stream()
        w = torch.randn(4, 4, requires_grad=True)
        main = streams.current_stream()
        left = w.mm(w)
        side.wait_stream(main)
        with streams.stream(side):
            right = w.exp()
        main.wait_stream(side)
        (left + right).sum().backward()
        return w.grad + 1

    assert findings(step, 1) == []


def test_the_cpu_may_not_read_what_is_still_on_the_wire():
    def step(read):
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        read(grad)
        work.wait()

    readers = (*map(methodcaller, ("tolist", "numpy", "cpu")), repr)
    for read in readers:
        kinds = findings(lambda read=read: step(read))
        assert kinds == [("hazard", 0), ("hazard", 1)], read


def test_the_cpu_may_not_read_what_another_stream_writes():
    def step(synchronize):
        side, value = streams.Stream(), torch.ones(1)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            value.add_(1)
        if synchronize:
            side.synchronize()
        return value.item()

    assert findings(lambda: step(True), 1) == []
    assert findings(lambda: step(False), 1) == [("hazard", 0)]


def test_what_a_poll_has_seen_to_be_done_needs_no_other_wait():
    def poll_work():
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        while not work.is_completed():
            pass
        return grad * 2

    def poll_event():
        grad, side = torch.ones(4), streams.Stream()
        work = dist.all_reduce(grad, async_op=True)
        with streams.stream(side):
            work.wait()
            event = side.record_event()
        while not event.query():
            pass
        return grad * 2

    def poll_stream():
        side, grad = streams.Stream(), torch.ones(4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            grad.add_(1)
        while not side.query():
            pass
        return grad * 2

    for step in (poll_work, poll_event, poll_stream):
        kinds = {kind for kind, _ in findings(step)}
        assert kinds <= {"unwaited"}, step.__name__
