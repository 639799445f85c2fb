"""Programs whose order is unusual and sufficient: nothing is to be found in them."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from overlaplab import streams
from overlaplab.streams import current_stream, stream

RIGHT: list[Callable[[], object]] = []


def right(program):
    RIGHT.append(program)
    return program


def behind(other=None):
    """A new stream behind all that `other` (the current one) has."""
    new = streams.Stream()
    new.wait_stream(current_stream() if other is None else other)
    return new


# -- waits


@right
def a_chain_of_events_over_three_streams():
    value = torch.ones(8)
    one, two, three = behind(), streams.Stream(), streams.Stream()
    with stream(one):
        value.add_(1)
        first = one.record_event()
    with stream(two):
        first.wait()
        torch.ones(1)
        second = two.record_event()
    with stream(three):
        second.wait()
        value.mul_(2)
    current_stream().wait_stream(three)
    return value + 1


@right
def a_chain_through_a_stream_that_launches_nothing():
    value = torch.ones(8)
    writer, middle = behind(), streams.Stream()
    with stream(writer):
        value.add_(1)
    middle.wait_stream(writer)
    current_stream().wait_stream(middle)
    return value + 1


@right
def two_works_through_a_third_stream():
    one, two, third = torch.ones(8), torch.ones(8), streams.Stream()
    works = [dist.all_reduce(t, async_op=True) for t in (one, two)]
    with stream(third):
        for work in works:
            work.wait()
    current_stream().wait_stream(third)
    return one + two


@right
def works_waited_for_in_another_order():
    grads = [torch.ones(8) for _ in range(3)]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    for work in reversed(works):
        work.wait()
    return sum(grads)


@right
def the_last_work_of_a_communicator_stands_for_those_before_it():
    grads = [torch.ones(8) for _ in range(3)]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    works[-1].wait()
    total = sum(grads)
    for work in works:
        work.wait()
    return total


@right
def collectives_of_one_communicator_pass_a_tensor_on_without_a_wait():
    shard, whole = torch.ones(4), torch.ones(8)
    dist.reduce_scatter(shard, list(whole.chunk(2)), async_op=True)
    work = dist.all_gather(list(whole.chunk(2)), shard, async_op=True)
    work.wait()
    streams.synchronize()
    return whole * 2


@right
def a_wait_on_both_streams_that_read():
    side, grad = behind(), torch.ones(8)
    side.wait_stream(current_stream())
    work = dist.all_reduce(grad, async_op=True)
    work.wait()
    with stream(side):
        work.wait()
        doubled = grad * 2
    current_stream().wait_stream(side)
    return doubled + grad


@right
def a_future_instead_of_a_wait():
    grad = torch.ones(8)
    dist.all_reduce(grad, async_op=True).get_future().wait()
    return grad / 2


@right
def a_functional_collective_waits_at_its_first_use():
    total = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
    return total * 2


@right
def a_reduction_that_stays_on_the_communication_stream():
    grad = torch.ones(8)
    comm = behind()
    with stream(comm):
        dist.all_reduce(grad)
        grad.div_(2)
        dist.all_reduce(grad)
    current_stream().wait_stream(comm)
    return grad + 1


@right
def received_before_it_is_sent_on():
    rank, size = dist.get_rank(), dist.get_world_size()
    buffer, payload = torch.empty(8), torch.full((8,), float(rank))
    ops = [
        dist.P2POp(dist.isend, payload, (rank + 1) % size),
        dist.P2POp(dist.irecv, buffer, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    payload.copy_(buffer)
    return payload


@right
def an_order_that_only_the_other_rank_makes():
    token, value = torch.ones(1), torch.zeros(8)
    if dist.get_rank() == 0:
        value.fill_(1)
        sent = dist.isend(token, 1)
        side, back = streams.Stream(), torch.empty(1)
        side.wait_stream(current_stream())
        with stream(side):
            dist.recv(back, 1)
            value.mul_(2)
        sent.wait()
        current_stream().wait_stream(side)
    else:
        dist.recv(token, 0)
        dist.send(token, 0)
    return value


# -- the CPU


@right
def a_synchronize_before_another_stream_reads():
    value, side = torch.ones(8), streams.Stream()
    streams.synchronize()
    with stream(side):
        doubled = value * 2
    side.synchronize()
    return doubled + 1


@right
def the_cpu_waits_for_an_event_and_launches_elsewhere():
    value, side = torch.ones(8), streams.Stream()
    current_stream().record_event().synchronize()
    with stream(side):
        value.mul_(2)
        side.record_event().synchronize()
    return value + 1


@right
def item_orders_whatever_is_launched_after_it():
    value, side = torch.ones(1), streams.Stream()
    value.item()
    with stream(side):
        value.mul_(2)
    side.synchronize()
    return value + 1


@right
def a_work_is_polled():
    grad = torch.ones(8)
    work = dist.all_reduce(grad, async_op=True)
    while not work.is_completed():
        pass
    return grad * 2


@right
def an_event_is_polled():
    grad, side = torch.ones(8), streams.Stream()
    work = dist.all_reduce(grad, async_op=True)
    with stream(side):
        work.wait()
        event = side.record_event()
    while not event.query():
        pass
    return grad * 2


@right
def a_barrier_comes_after_what_its_communicator_did():
    grad = torch.ones(8)
    dist.all_reduce(grad, async_op=True)
    dist.barrier()
    return grad * 2


# -- bytes


@right
def halves_of_a_flat_buffer_on_two_streams():
    flat = torch.zeros(16)
    side = behind()
    with stream(side):
        flat[:8].fill_(1)
    flat[8:].fill_(2)
    current_stream().wait_stream(side)
    return flat.sum()


@right
def columns_that_interleave():
    table = torch.zeros(6, 8)
    side = behind()
    with stream(side):
        table[:, ::2].fill_(1)
    table[:, 1::2].fill_(2)
    current_stream().wait_stream(side)
    return table.sum()


@right
def rows_of_a_transpose_beside_other_columns():
    table = torch.zeros(6, 8)
    side = behind()
    with stream(side):
        table.t()[2:4].fill_(1)
    table[:, 4:].fill_(2)
    table[1:, :2].fill_(3)
    current_stream().wait_stream(side)
    return table.sum()


@right
def gradients_of_one_flat_buffer_are_reduced_one_by_one():
    flat = torch.ones(16)
    works = []
    for part in flat.chunk(4):
        part.mul_(2)
        works.append(dist.all_reduce(part, async_op=True))
    for part, work in zip(flat.chunk(4), works, strict=True):
        work.wait()
        part.div_(2)
    return flat


@right
def both_streams_only_read():
    weight, side = torch.ones(8, 8), behind()
    side.wait_stream(current_stream())
    with stream(side):
        left = weight.mm(weight)
    right = weight.mm(weight)
    current_stream().wait_stream(side)
    return left + right


# -- memory


@right
def a_buffer_that_lives_and_dies_on_the_gather_stream():
    # The gather stream waits for the computation before every allocation.
    gather, shard, weight = streams.Stream(), torch.ones(4, 8), torch.ones(8, 8)
    for _ in range(3):
        gather.wait_stream(current_stream())
        with stream(gather):
            full = torch.empty(8, 8)
            dist.all_gather(list(full.chunk(2)), shard)
        current_stream().wait_stream(gather)
        weight = weight.mm(full)
        del full
    return weight


@right
def a_batch_is_recorded_on_the_stream_that_reads_it():
    copies, weight = streams.Stream(), torch.ones(8, 8)
    for _ in range(3):
        with stream(copies):
            batch = torch.ones(8, 8)
        current_stream().wait_stream(copies)
        weight.mm(batch)
        batch.record_stream(current_stream())
        del batch


@right
def a_batch_is_kept_until_its_stream_is_behind_the_reader():
    copies, weight, kept = streams.Stream(), torch.ones(8, 8), None
    for _ in range(3):
        copies.wait_stream(current_stream())
        kept = None  # after the wait
        with stream(copies):
            batch = torch.ones(8, 8)
        current_stream().wait_stream(copies)
        weight.mm(batch)
        kept = batch
        del batch
    return kept


@right
def double_buffers_with_an_event_each():
    shard, gather = torch.ones(4, 8), streams.Stream()
    buffers = [torch.empty(8, 8), torch.empty(8, 8)]
    gather.wait_stream(current_stream())
    is_free = [current_stream().record_event() for _ in buffers]
    is_full = [streams.Event(), streams.Event()]
    for layer in range(5):
        at = layer % 2
        with stream(gather):
            is_free[at].wait()
            dist.all_gather(list(buffers[at].chunk(2)), shard)
            is_full[at].record()
        is_full[at].wait()
        buffers[at].mm(buffers[at])
        is_free[at].record()


@right
def a_work_holds_its_tensor_until_the_default_stream_waits():
    for _ in range(3):
        work = dist.all_reduce(torch.ones(64), async_op=True)
        torch.ones(64)
        work.wait()
        torch.zeros(64)


@right
def temporaries_of_a_side_stream_that_nobody_else_sees():
    side, total = behind(), torch.zeros(1)
    for _ in range(3):
        side.wait_stream(current_stream())
        with stream(side):
            part = (torch.ones(64) * 2).sum()
            total.add_(part)
        torch.ones(64).mul_(3)
        current_stream().wait_stream(side)
        del part
    return total


@right
def a_backward_pass_over_two_streams():
    weight = torch.ones(8, 8, requires_grad=True)
    for _ in range(2):
        side = behind()
        left = weight.mm(weight)
        with stream(side):
            out = weight.exp()
        current_stream().wait_stream(side)
        (left + out).sum().backward()
        weight.grad.mul_(0.5)
        del left, out
        weight.grad = None


OUTSIDE = torch.ones(64)


@right
def a_tensor_from_outside_the_run_takes_no_freed_block(outside=OUTSIDE):
    side, value = streams.Stream(), torch.ones(64)
    side.wait_stream(current_stream())
    with stream(side):
        value.mul(2)
    del value
    outside.mul_(2)
    current_stream().wait_stream(side)
