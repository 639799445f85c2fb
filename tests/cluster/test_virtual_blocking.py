"""Blocking collectives run on the current stream; results are seen after the wait."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_blocking_collective_runs_on_the_stream_that_launches_it(asynchronous):
    def step():
        side, grad = streams.Stream(), torch.ones(4)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            work = dist.all_reduce(grad, async_op=asynchronous)
            if asynchronous:
                work.wait()
            grad.mul_(2)
        return torch.zeros(1)

    _, program = run_virtual(step, world_size=2)
    assert [(o.index, o.name, o.stream, o.after) for o in program.ranks[0]] == [
        (0, "ones", "default", ()),
        (1, "all_reduce", "comm" if asynchronous else "stream 1", (0,)),
        (2, "mul_", "stream 1", (0, 1) if asynchronous else ()),
        (3, "zeros", "default", ()),
    ]
    assert find_findings(program) == ()


BLOCKING = {
    "all_reduce": lambda x, xs: dist.all_reduce(x),
    "broadcast": lambda x, xs: dist.broadcast(x, 0),
    "reduce": lambda x, xs: dist.reduce(x, 0),
    "all_gather": lambda x, xs: dist.all_gather(xs, x),
    "all_gather into": lambda x, xs: dist.all_gather_into_tensor(torch.cat(xs), x),
    "reduce_scatter": lambda x, xs: dist.reduce_scatter(x, xs),
    "reduce_scatter from": lambda x, xs: dist.reduce_scatter_tensor(x, torch.cat(xs)),
    "all_to_all": lambda x, xs: dist.all_to_all(xs, [x, x + 1]),
    "all_to_all single": lambda x, xs: dist.all_to_all_single(torch.zeros(4), x),
    "gather": lambda x, xs: dist.gather(x, None if dist.get_rank() else xs),
    "scatter": lambda x, xs: dist.scatter(x, None if dist.get_rank() else xs),
    "barrier": lambda x, xs: dist.barrier(),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", BLOCKING)
def test_every_blocking_collective_runs_on_the_current_stream(name):
    def step():
        BLOCKING[name](torch.ones(4), [torch.ones(4), torch.ones(4)])

    _, program = run_virtual(step, world_size=2)
    for rank in range(2):
        (sent,) = [op for op in program.ranks[rank] if op.collective]
        assert (sent.name, sent.stream) == (name.split()[0], "default")


def test_functional_collectives_and_messages_have_streams_of_their_own():
    def step():
        x = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) * 2
        (dist.recv if dist.get_rank() else dist.send)(x, 1 - dist.get_rank())

    _, program = run_virtual(step, world_size=2)
    sent = [(op.name, op.stream) for op in program.ranks[0] if op.collective]
    assert sent == [("all_reduce", "comm"), ("send", "comm:0<->1")]


def test_a_blocking_all_reduce_hides_nothing_and_times_are_literal():
    """On "chalk": 1 us and 4,000 bytes at 10 bytes a ns; kernels move 1,000 a ns."""

    def step():
        x, y = torch.ones(1000), torch.ones(1000)
        dist.all_reduce(x)
        y.exp_()

    run = ol.run(step, world_size=2, hardware="chalk")
    spans = run.timeline.of_rank(0).spans
    rows = [(s.lane, s.name, s.start_ns, s.end_ns) for s in spans if s.lane != "cpu"]
    assert rows == [
        ("default", "ones", 0, 4),
        ("default", "ones", 4, 8),
        ("default", "all_reduce", 8, 1_408),
        ("default", "exp_", 1_408, 1_416),
    ]
    assert run.timeline.report().hidden_ns == 0


# -- what is seen of a collective that nobody has waited for yet


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_read_before_the_wait_sees_the_old_value_on_every_rank(world_size):
    def step():
        x = torch.full((2,), 1.0 + dist.get_rank())
        work = dist.all_reduce(x, async_op=True)
        early = x * 1
        work.wait()
        return early.tolist(), x.tolist()

    values, program = run_virtual(step, world_size=world_size)
    total = sum(range(world_size + 1)) * 1.0
    assert values == tuple(
        ([1.0 + rank] * 2, [total] * 2) for rank in range(world_size)
    )
    kinds = [finding.kind for finding in find_findings(program)]
    assert kinds == ["hazard"] * world_size


def test_a_write_before_the_wait_is_lost_on_every_rank():
    def step():
        x = torch.full((2,), 1.0 + dist.get_rank())
        work = dist.all_reduce(x, async_op=True)
        x /= 2
        work.wait()
        return x.tolist()

    values, program = run_virtual(step, world_size=3)
    assert values == ([6.0, 6.0],) * 3
    assert [f.kind for f in find_findings(program)] == ["hazard"] * 3


def test_a_wait_shows_also_what_came_before_on_its_communicator():
    def step():
        x, y = torch.full((2,), 1.0 + dist.get_rank()), torch.ones(2)
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(y)
        return (x + y).tolist()

    values, program = run_virtual(step, world_size=2)
    assert values == ([5.0, 5.0],) * 2
    assert find_findings(program) == ()


def test_a_wait_shows_nothing_of_another_communicator():
    def step():
        group = dist.new_group([0, 1])
        x, y = torch.full((2,), 1.0 + dist.get_rank()), torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(y, group=group)
        early = (x + y).tolist()
        work.wait()
        return early

    values, program = run_virtual(step, world_size=2)
    assert values == ([3.0, 3.0], [4.0, 4.0])
    assert [f.kind for f in find_findings(program)] == ["hazard"] * 2


def test_a_collective_reads_what_those_before_it_on_its_communicator_have_not_shown():
    def step():
        x = torch.full((2,), 1.0 + dist.get_rank())
        works = [dist.all_reduce(part, async_op=True) for part in (x[:1], x[1:], x)]
        early = (x * 1).tolist()
        works[-1].wait()
        return early, x.tolist()

    values, _ = run_virtual(step, world_size=3)
    assert values == tuple(([1.0 + r] * 2, [18.0, 18.0]) for r in range(3))


def test_synchronize_shows_the_results_of_all_collectives():
    def step():
        x = torch.full((2,), 1.0 + dist.get_rank())
        dist.all_reduce(x, async_op=True)
        streams.synchronize()
        return x.tolist()

    values, program = run_virtual(step, world_size=2)
    assert values == ([3.0, 3.0],) * 2
    assert find_findings(program) == ()


def test_what_nobody_waited_for_is_there_when_the_run_has_ended():
    def step():
        x = torch.full((2,), 1.0 + dist.get_rank())
        dist.all_reduce(x, async_op=True)
        return x

    values, _ = run_virtual(step, world_size=3)
    assert [x.tolist() for x in values] == [[6.0, 6.0]] * 3
