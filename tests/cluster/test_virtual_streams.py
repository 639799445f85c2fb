"""Streams, events and works: who comes after whom, as a literal list."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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
