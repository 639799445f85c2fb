"""Streams, events and works: who comes after whom, as a literal list."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings


def order(program, rank=0):
    """(index, name, stream, after) of one rank."""
    return [(o.index, o.name, o.stream, o.after) for o in program.ranks[rank]]


def test_a_work_makes_the_stream_wait_that_is_current_at_the_call():
    def step():
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        other = torch.full((4,), 2.0)
        work.wait()
        return other + grad

    values, program = run_virtual(step, world_size=2)
    assert order(program) == [
        (0, "ones", "default", ()),
        (1, "all_reduce", "comm", (0,)),
        (2, "full", "default", ()),
        (3, "add", "default", (1,)),
    ]
    assert [(w.op, w.stream, w.before) for w in program.waits if w.rank == 0] == [
        (1, "default", 3)
    ]
    assert values[0].tolist() == [4.0] * 4


def test_a_work_waited_for_on_a_side_stream_leaves_the_current_one_alone():
    def step():
        side = streams.Stream()
        grad = torch.ones(4)
        work = dist.all_reduce(grad, async_op=True)
        with streams.stream(side):
            work.wait()
            grad.mul_(2)
        return torch.zeros(1)

    _, program = run_virtual(step, world_size=2)
    assert order(program) == [
        (0, "ones", "default", ()),
        (1, "all_reduce", "comm", (0,)),
        (2, "mul_", "stream 1", (1,)),
        (3, "zeros", "default", ()),
    ]


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
    assert order(program) == [
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


def test_wait_stream_orders_what_follows_after_all_that_was_launched():
    def step():
        side = streams.Stream()
        a = torch.ones(2)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            b = a + 1
        c = a * 3
        streams.current_stream().wait_stream(side)
        return b + c

    _, program = run_virtual(step, world_size=1)
    assert order(program) == [
        (0, "ones", "default", ()),
        (1, "add", "stream 1", (0,)),
        (2, "mul", "default", ()),
        (3, "add", "default", (1,)),
    ]


def test_an_event_stands_for_the_moment_of_its_record_and_not_for_later_work():
    def step():
        side, event = streams.Stream(), streams.Event()
        with streams.stream(side):
            a = torch.ones(2)
            event.record()
            torch.ones(3)
        event.wait()
        return a + 1

    _, program = run_virtual(step, world_size=1)
    assert order(program) == [
        (0, "ones", "stream 1", ()),
        (1, "ones", "stream 1", ()),
        (2, "add", "default", (0,)),
    ]


def test_a_wait_that_an_earlier_wait_implies_is_not_recorded_again():
    def step():
        side = streams.Stream()
        with streams.stream(side):
            a = torch.ones(2)
        main = streams.current_stream()
        main.wait_stream(side)
        b = a + 1
        main.wait_stream(side)
        return b + 1

    _, program = run_virtual(step, world_size=1)
    assert [o.after for o in program.ranks[0]] == [(), (0,), ()]


def test_a_launch_from_a_side_stream_comes_after_that_stream():
    def step():
        side = streams.Stream()
        a = torch.ones(2)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            b = a + 1
            work = dist.all_reduce(b, async_op=True)
        work.wait()
        return a + b

    _, program = run_virtual(step, world_size=2)
    launch = program.ranks[0][2]
    assert (launch.name, launch.stream, launch.launch_stream, launch.after) == (
        "all_reduce",
        "comm",
        "stream 1",
        (1,),
    )


def test_host_syncs_that_dispatch_nothing_on_a_cpu_tensor_are_recorded():
    def step():
        a = torch.ones(2)
        a.tolist()
        a.numpy()
        a.cpu()
        a.to("cpu")
        str(a)
        float(a[0])
        bool(a[0] > 0)
        streams.current_stream().synchronize()
        streams.synchronize()

    _, program = run_virtual(step, world_size=1)
    waits = [o.name for o in program.ranks[0] if o.kind == "host_wait"]
    assert waits == [
        "tolist",
        "numpy",
        "cpu",
        "to",
        "print",
        "item",
        "item",
        "stream.synchronize",
        "synchronize",
    ]


def test_moving_to_the_device_where_a_tensor_is_makes_nobody_wait():
    def step():
        return torch.ones(2).to(streams.device()).to(torch.float32)

    _, program = run_virtual(step, world_size=1)
    assert order(program) == [(0, "ones", "default", ())]


def test_a_number_that_no_operator_made_is_on_the_host_already():
    _, program = run_virtual(lambda: torch.tensor(3.0).item(), world_size=1)
    assert program.ranks[0] == ()


def test_a_host_sync_waits_for_the_collective_whose_result_it_reads():
    def step():
        grad = torch.ones(()) + dist.get_rank()
        dist.all_reduce(grad)
        return grad.item()

    values, program = run_virtual(step, world_size=3)
    assert values == (6.0, 6.0, 6.0)
    last = program.ranks[0][-1]
    assert (last.kind, last.stream, last.after) == ("host_wait", "cpu", (2,))


def test_views_and_empty_tensors_launch_nothing():
    def step():
        a = torch.empty(4, 4)
        return a.t().reshape(16).view(2, 8)[0].detach().expand(3, 8).contiguous()

    _, program = run_virtual(step, world_size=1)
    # A transpose is copied by reshape, expand by contiguous.
    assert [o.name for o in program.ranks[0]] == ["clone", "clone"]


def test_bytes_flops_and_ranges_are_those_of_the_operator():
    def step():
        a = torch.ones(8, 4)
        return a[2:4] @ a.t()

    _, program = run_virtual(step, world_size=1)
    matmul = program.ranks[0][1]
    assert (matmul.name, matmul.flops, matmul.dtype) == ("mm", 2 * 2 * 4 * 8, "float32")
    assert (matmul.read_bytes, matmul.write_bytes) == (2 * 16 + 8 * 16, 2 * 8 * 4)
    assert [(r.offset_bytes, r.run_bytes, r.dims) for r in matmul.reads] == [
        (32, 32, ()),
        (0, 128, ()),
    ]


def test_the_access_of_a_column_slice_is_exact():
    def step():
        a = torch.zeros(4, 6)
        a[:, 2:4].fill_(1)

    _, program = run_virtual(step, world_size=1)
    (write,) = program.ranks[0][1].writes
    assert (write.offset_bytes, write.run_bytes, write.dims) == (8, 8, ((4, 24),))
    assert program.ranks[0][1].reads == ()


def test_labels_are_the_innermost_annotation_at_the_launch():
    def step():
        with streams.annotate("step"):
            a = torch.ones(2)
            with torch.profiler.record_function("inner"):
                b = a + 1
            return b + 1

    _, program = run_virtual(step, world_size=1)
    assert [o.label for o in program.ranks[0]] == ["step", "inner", "step"]


def test_names_are_those_of_the_bytes_at_the_launch():
    def step():
        flat = torch.zeros(4)
        streams.name_tensor(flat[:2], "first")
        streams.name_tensor(flat, "flat")
        dist.all_reduce(flat[:2])

    _, program = run_virtual(step, world_size=1)
    (part,) = program.ranks[0][1].collective.payload
    assert (part.bytes, part.dtype, part.ready, part.name) == (8, "float32", 0, "first")
    assert [n.name for n in program.names] == ["first", "flat"]
    assert program.storages[0].name == "flat"


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced.*:FutureWarning")
def test_a_part_is_ready_when_its_last_writer_is_and_not_its_neighbours():
    def step():
        flat = torch.zeros(4)
        flat[:2].add_(1)
        flat[2:].add_(1)
        dist.all_reduce_coalesced([flat[:2], flat[2:]], async_op=True).wait()

    _, program = run_virtual(step, world_size=2)
    collective = program.ranks[0][3].collective
    assert [part.ready for part in collective.payload] == [1, 2]
    assert collective.bytes == 16


def test_storages_live_from_allocation_to_their_last_reference():
    def step() -> Tensor:
        a = torch.ones(256)
        b = a + 1
        del a
        c = b + 1
        return c

    _, program = run_virtual(step, world_size=1)
    assert [(s.bytes, s.born, s.freed) for s in program.storages] == [
        (1024, 0, 2),
        (1024, 1, 3),
        (1024, 2, None),
    ]


def test_a_line_of_the_users_code_stands_at_every_operator():
    def step():
        return torch.ones(2) + 1

    _, program = run_virtual(step, world_size=1)
    first = step.__code__.co_firstlineno + 1
    assert {o.source for o in program.ranks[0]} == {
        f"test_virtual_streams.py:{first} in step"
    }


def test_taking_the_shape_of_a_tensor_in_flight_is_no_read():
    def step():
        flight = torch.ones(8)
        work = dist.all_reduce(flight, async_op=True)
        fresh = flight.new_ones(8) + torch.zeros_like(flight)
        work.wait()
        return fresh

    _, program = run_virtual(step, world_size=2)
    assert find_findings(program) == ()


def test_the_last_writer_is_found_by_exact_bytes_and_not_by_first_and_last():
    def step():
        table = torch.zeros(4, 6)
        table[1:3].add_(1)
        table[:, 3:].add_(1)
        dist.all_reduce(table[0, :3])

    _, program = run_virtual(step, world_size=2)
    assert program.ranks[0][3].collective.payload[0].ready == 0


def test_numbers_on_the_host_launch_nothing_until_a_kernel_writes_them():
    def step():
        count = torch.tensor(0.0)
        count += 1
        total = torch.tensor(0.0)
        total += torch.ones(2).sum()
        return count.item(), total.item()

    values, program = run_virtual(step, world_size=1)
    assert values == ((1.0, 2.0),)
    assert [o.name for o in program.ranks[0]] == ["ones", "sum", "add_", "item"]


def test_the_step_counters_of_an_optimizer_make_nobody_wait():
    def step():
        weight = torch.ones(4, requires_grad=True)
        weight.grad = torch.ones(4)
        for foreach in (False, True):
            torch.optim.AdamW([weight], lr=0.1, foreach=foreach).step()

    _, program = run_virtual(step, world_size=1)
    assert not [o for o in program.ranks[0] if o.kind == "host_wait"]
    assert all(o.write_bytes >= 16 for o in program.ranks[0])
