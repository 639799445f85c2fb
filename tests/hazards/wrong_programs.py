"""Programs with a race that people really write, each with its repair.

Every function takes `right`: False is the program as written, True the repaired one.
`Wrong` says what must be found: the tensor, and both sides as (operator, stream).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.streams import current_stream, name_tensor, stream

Side = tuple[str, str]  # operator, stream


@dataclass(frozen=True)
class Wrong:
    program: Callable[[bool], object]
    tensor: str
    first: Side
    then: Side
    world_size: int = 2


WRONG: list[Wrong] = []


def wrong(tensor: str, first: Side, then: Side, world_size: int = 2):
    def add(program):
        WRONG.append(Wrong(program, tensor, first, then, world_size))
        return program

    return add


def ones(name: str, *shape: int) -> Tensor:
    tensor = torch.ones(*(shape or (64,)))
    name_tensor(tensor, name)
    return tensor


def behind(other=None):
    """A new stream behind all that `other` (the current one) has."""
    new = streams.Stream()
    new.wait_stream(current_stream() if other is None else other)
    return new


# -- works


@wrong("grad", ("all_reduce", "comm"), ("div_", "default"))
def the_sum_is_divided_before_it_is_there(right):
    grad = ones("grad")
    work = dist.all_reduce(grad, async_op=True)
    if right:
        work.wait()
    grad.div_(2)
    work.wait()


@wrong("grad", ("all_reduce", "comm"), ("mul", "default"))
def the_wait_is_on_a_stream_that_does_not_read(right):
    side, grad = streams.Stream(), ones("grad")
    work = dist.all_reduce(grad, async_op=True)
    with stream(current_stream() if right else side):
        work.wait()
    return grad * 2


@wrong("partial", ("all_reduce", "comm"), ("add", "default"))
def the_residual_is_added_to_a_half_reduced_operand(right):
    x, partial = ones("x"), ones("partial")
    work = dist.all_reduce(partial, async_op=True)
    if right:
        work.wait()
    out = x + partial
    work.wait()
    return out


@wrong("grad of hidden", ("all_reduce", "comm"), ("mm", "default"))
def a_tensor_hook_reduces_the_gradient_that_autograd_goes_on_with(right):
    weight = torch.ones(8, 8, requires_grad=True)
    hidden = torch.ones(4, 8).mm(weight)
    works = []

    def hook(grad):
        name_tensor(grad, "grad of hidden")
        works.append(dist.all_reduce(grad, async_op=True))
        if right:
            works[-1].wait()

    hidden.register_hook(hook)
    (hidden * 2).sum().backward()
    for work in works:
        work.wait()


@wrong("grad", ("all_reduce", "comm"), ("add_", "default"))
def the_next_micro_batch_accumulates_into_a_gradient_in_flight(right):
    grad = ones("grad")
    work = dist.all_reduce(grad, async_op=True)
    if right:
        work.wait()
    grad.add_(torch.ones(64))
    work.wait()


@wrong("grad", ("all_reduce", "comm"), ("zero_", "default"))
def the_gradient_is_cleared_while_it_is_still_sent(right):
    grad = ones("grad")
    out = torch.empty(64)
    work = dist.all_reduce(grad, async_op=True)
    if right:
        work.wait()
    grad.zero_()
    work.wait()
    return out


@wrong("grad", ("all_reduce", "comm:left"), ("all_reduce", "comm:right"))
def two_communicators_reduce_one_tensor_at_once(right):
    left = dist.new_group([0, 1], group_desc="left")
    other = dist.new_group([0, 1], group_desc="right")
    grad = ones("grad")
    one = dist.all_reduce(grad, group=left, async_op=True)
    if right:
        one.wait()
    two = dist.all_reduce(grad, group=other, async_op=True)
    one.wait()
    two.wait()


@wrong("payload", ("send", "comm:0<->1"), ("fill_", "default"))
def the_send_buffer_is_filled_again_before_the_send_is_done(right):
    payload = ones("payload")
    if dist.get_rank() == 0:
        work = dist.isend(payload, 1)
        if right:
            work.wait()
        payload.fill_(2)
        work.wait()
    else:
        dist.recv(payload, 0)


@wrong("activation", ("recv", "comm:0<->1"), ("mul", "stream 1"))
def a_receive_is_waited_for_on_one_stream_and_used_on_another(right):
    activation = ones("activation")
    if dist.get_rank() == 0:
        dist.send(activation, 1)
    else:
        side = behind()
        dist.irecv(activation, 0).wait()
        if right:
            side.wait_stream(current_stream())
        with stream(side):
            return activation * 2


@wrong("weight", ("all_gather", "comm"), ("mm", "default"))
def a_gathered_weight_is_used_before_the_gather_is_over(right):
    shard, weight = torch.ones(4, 8), ones("weight", 8, 8)
    parts = list(weight.chunk(2))
    work = dist.all_gather(parts, shard, async_op=True)
    if right:
        work.wait()
    out = torch.ones(8, 8).mm(weight)
    work.wait()
    return out


@wrong("loss", ("all_reduce", "comm"), ("item", "cpu"))
def synchronize_of_the_launching_stream_does_not_wait_for_the_collective(right):
    comm, loss = behind(), ones("loss", 1)
    comm.wait_stream(current_stream())
    with stream(comm):
        work = dist.all_reduce(loss, async_op=True)
        if right:
            work.wait()
    comm.synchronize()
    value = loss.item()
    work.wait()
    return value


# -- streams and events


@wrong("flat", ("copy_", "default"), ("all_reduce", "comm"))
def a_flat_buffer_is_filled_on_one_stream_and_sent_from_another(right):
    flat = ones("flat")
    comm = behind()
    flat.copy_(torch.zeros(64))
    if right:
        comm.wait_stream(current_stream())
    with stream(comm):
        work = dist.all_reduce(flat, async_op=True)
    work.wait()


@wrong("flat", ("copy_", "stream 1"), ("all_reduce", "default"))
def a_bucket_is_filled_from_two_streams_and_sent_behind_one(right):
    flat, branch = ones("flat"), behind()
    with stream(branch):
        flat[:32].copy_(torch.zeros(32))
    flat[32:].copy_(torch.zeros(32))
    if right:
        current_stream().wait_stream(branch)
    dist.all_reduce(flat)


@wrong("flat", ("fill_", "stream 1"), ("mul", "stream 3"))
def one_event_for_two_producers_keeps_only_the_last(right):
    flat = ones("flat")
    producers = behind(), behind()
    shared = streams.Event()
    events = [streams.Event(), streams.Event()] if right else [shared, shared]
    reader = streams.Stream()
    for producer, event, part in zip(producers, events, flat.chunk(2), strict=True):
        with stream(producer):
            part.fill_(2)
            event.record()
    for event in events:
        reader.wait_event(event)
    with stream(reader):
        return flat * 2


@wrong("value", ("mul_", "stream 1"), ("add", "default"))
def an_event_is_recorded_before_the_last_write(right):
    value, event = ones("value"), streams.Event()
    side = behind()
    with stream(side):
        value.add_(1)
        if not right:
            event.record()
        value.mul_(2)
        if right:
            event.record()
    event.wait()
    return value + 1


@wrong("x", ("ones", "default"), ("mm", "stream 1"))
def a_side_stream_starts_before_its_input_is_made(right):
    side = streams.Stream()
    x = ones("x", 8, 8)
    if right:
        side.wait_stream(current_stream())
    with stream(side):
        y = x.mm(x)
    current_stream().wait_stream(side)
    return y


@wrong("weight", ("lerp_", "stream 1"), ("sub_", "default"))
def an_average_of_the_weights_is_taken_while_the_next_step_changes_them(right):
    # The average is the tensor that is written; the weights are read.
    weight, average = torch.ones(64), torch.zeros(64)
    name_tensor(weight, "weight")
    side = streams.Stream()
    for _ in range(2):
        if right:
            current_stream().wait_stream(side)
        weight.sub_(0.1)
        side.wait_stream(current_stream())
        with stream(side):
            average.lerp_(weight, 0.1)


@wrong("buffer", ("mm", "default"), ("all_gather", "comm"))
def a_double_buffer_is_gathered_into_while_its_reader_still_reads(right):
    shard = torch.ones(4, 8)
    gather, buffers = streams.Stream(), []
    for _ in range(2):
        buffers.append(ones("buffer", 8, 8))
    gather.wait_stream(current_stream())
    read = [streams.Event(), streams.Event()]
    for layer in range(3):
        buffer = buffers[layer % 2]
        with stream(gather):
            if right and layer >= 2:
                read[layer % 2].wait()
            work = dist.all_gather(list(buffer.chunk(2)), shard, async_op=True)
        work.wait()
        torch.ones(8, 8).mm(buffer)
        read[layer % 2].record()


@wrong("shard", ("sub_", "stream 1"), ("all_gather", "default"))
def updated_weights_are_gathered_before_the_update_on_the_side_is_over(right):
    shard = ones("shard", 4, 8)
    side = behind()
    with stream(side):
        shard.sub_(0.1)
    if right:
        current_stream().wait_stream(side)
    full = torch.empty(8, 8)
    dist.all_gather(list(full.chunk(2)), shard)
    return full


@wrong("norm", ("linalg_vector_norm", "stream 1"), ("item", "cpu"), 1)
def the_cpu_reads_a_norm_that_a_side_stream_computes(right):
    grads, side = torch.ones(64), streams.Stream()
    norm = ones("norm", 1)
    side.wait_stream(current_stream())
    with stream(side):
        torch.linalg.vector_norm(grads, out=norm.squeeze())
    if right:
        side.synchronize()
    return norm.item()


@wrong("activation", ("all_reduce", "comm"), ("relu_", "default"))
def a_module_works_in_place_on_what_is_being_reduced(right):
    activation = ones("activation")
    work = dist.all_reduce(activation, async_op=True)
    if right:
        work.wait()
    nn.ReLU(inplace=True)(activation)
    work.wait()


# -- the host's memory


@wrong("pinned", ("copy h2d", "default"), ("fill_", "cpu"), 1)
def a_pinned_batch_is_filled_again_while_it_is_copied(right):
    pinned = torch.ones(64, device="cpu", pin_memory=True)
    name_tensor(pinned, "pinned")
    batch = torch.empty(64, device=streams.device())
    batch.copy_(pinned, non_blocking=True)
    if right:
        current_stream().synchronize()
    pinned.fill_(2)
    return batch


@wrong("metrics", ("copy d2h", "default"), ("sum", "cpu"), 1)
def the_cpu_reads_a_result_that_is_still_copied(right):
    value = torch.ones(64, device=streams.device())
    metrics = torch.empty(64, device="cpu", pin_memory=True)
    name_tensor(metrics, "metrics")
    metrics.copy_(value, non_blocking=True)
    if right:
        current_stream().record_event().synchronize()
    return metrics.sum()


# -- memory


@wrong("batch", ("mm", "default"), ("ones", "stream 1"))
def a_prefetched_batch_is_dropped_while_it_is_still_read(right):
    copies = streams.Stream()
    weight = torch.ones(32, 32)
    for _ in range(3):
        with stream(copies):
            batch = ones("batch", 32, 32)
        current_stream().wait_stream(copies)
        weight.mm(batch)
        if right:
            batch.record_stream(current_stream())
        del batch


@wrong("grad", ("all_reduce", "comm"), ("zeros", "default"))
def a_reduced_tensor_goes_back_to_a_stream_that_did_not_wait(right):
    side = streams.Stream()
    grad = ones("grad")
    side.wait_stream(current_stream())
    with stream(side):
        work = dist.all_reduce(grad, async_op=True)
        work.wait()
        if right:
            grad.record_stream(side)
    del grad, work
    return torch.zeros(64)


@wrong("input", ("mul", "stream 1"), ("zeros", "default"), 1)
def a_temporary_for_a_side_stream_is_dropped_at_once(right):
    side = streams.Stream()
    value = ones("input")
    side.wait_stream(current_stream())
    with stream(side):
        out = value * 2
    if right:
        current_stream().wait_stream(side)
    del value
    return out, torch.zeros(64)


@wrong("old", ("mul", "default"), ("fill_", "stream 1"), 1)
def new_memory_is_filled_on_a_stream_that_is_not_behind_the_old_owner(right):
    side, old = streams.Stream(), ones("old")
    out = old * 2
    del old
    new = torch.empty(64)
    if right:
        side.wait_stream(current_stream())
    with stream(side):
        new.fill_(1)
    return out, new


@wrong("full", ("mm", "default"), ("all_gather", "comm"))
def a_gathered_weight_is_dropped_before_its_reader_is_done(right):
    gather, shard = behind(), torch.ones(4, 8)
    gather.wait_stream(current_stream())
    for _ in range(2):
        with stream(gather):
            full = torch.empty(8, 8)
            name_tensor(full, "full")
            work = dist.all_gather(list(full.chunk(2)), shard, async_op=True)
        work.wait()
        torch.ones(8, 8).mm(full)
        if right:
            gather.wait_stream(current_stream())
        del full, work


@wrong("grad", ("all_reduce", "comm"), ("mul", "default"))
def asking_for_the_future_is_taken_for_a_wait(right):
    grad = ones("grad", 4096)
    future = dist.all_reduce(grad, async_op=True).get_future()
    if right:
        future.wait()
    doubled = grad * 2
    if not right:
        future.wait()
    return doubled.sum().item()


@wrong("mean", ("native_batch_norm", "stream 1"), ("mul", "default"), world_size=1)
def running_statistics_are_read_while_another_stream_updates_them(right):
    norm, x, side = nn.BatchNorm1d(8), torch.randn(4, 8), behind()
    name_tensor(norm.running_mean, "mean")
    with stream(side):
        norm(x)
    if right:
        current_stream().wait_stream(side)
    return norm.running_mean * 2
