"""Faults that people reported in public, in their smallest form, and what is right."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from overlaplab.streams import current_stream, stream


def findings(step, *args, world_size=2):
    _, program = run_virtual(step, args, world_size=world_size)
    found = []
    for finding in find_findings(program):
        ops = [program.ranks[finding.rank][index] for index in finding.ops[:2]]
        if finding.rank == 0:
            found.append((finding.kind, *((op.name, op.stream) for op in ops)))
    return found


# -- B01: a tensor of stream 0, reduced and waited for under stream 1, then dropped
# https://github.com/pytorch/pytorch/issues/188655


def three_streams(repair):
    side = streams.Stream()
    big = torch.ones(2**20)
    side.wait_stream(current_stream())
    with stream(side):
        work = dist.all_reduce(big, async_op=True)
        work.wait()
        if repair == "record_stream":
            big.record_stream(side)
        if repair != "keep":
            del big, work
    if repair == "wait before the next allocation":
        current_stream().wait_stream(side)
    fresh = torch.full((2**20,), 7.0)
    if repair == "keep":
        current_stream().wait_stream(side)
        del big, work
        fresh = torch.full((2**20,), 7.0)
    return fresh


def test_b01_a_block_goes_back_to_a_stream_that_did_not_wait():
    race = ("hazard", ("all_reduce", "comm"), ("full", "default"))
    assert findings(three_streams, "") == [race]


@pytest.mark.parametrize(
    "repair", ["record_stream", "keep", "wait before the next allocation"]
)
def test_b01_repaired(repair):
    assert findings(three_streams, repair) == []


def test_a_launched_work_holds_input_and_output_until_its_wait():
    def step():
        full = torch.empty(8)
        work = dist.all_gather(list(full.chunk(2)), torch.ones(4), async_op=True)
        torch.zeros(1)
        work.wait()
        torch.zeros(1)
        return full

    _, program = run_virtual(step, world_size=2)
    names = [op.name for op in program.ranks[0]]
    assert names == ["ones", "all_gather", "zeros", "zeros"]
    shard = next(s for s in program.storages if s.bytes == 16)
    assert (shard.born, shard.freed) == (0, 3)


# -- B03: a bucket filled from several streams
# https://github.com/deepspeedai/DeepSpeed/issues/8061


def two_branches(events):
    left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    flat, filled, works = torch.zeros(32), [], []
    for part, linear in zip(flat.chunk(2), (left, right), strict=True):
        side = streams.Stream()

        def hook(param, part=part, packing=side):
            packing.wait_stream(current_stream())
            with stream(packing):
                part.copy_(param.grad.view(-1))
                filled.append(packing.record_event())
                if len(filled) == 2:
                    for event in filled if events else ():
                        event.wait()
                    works.append(dist.all_reduce(flat, async_op=True))

        linear.weight.register_post_accumulate_grad_hook(hook)
    (left(torch.ones(2, 4)) * right(torch.ones(2, 4))).sum().backward()
    for work in works:
        work.wait()
    return flat


def test_b03_a_bucket_waits_only_for_the_stream_of_the_last_copy():
    race = ("hazard", ("copy_", "stream 2"), ("all_reduce", "comm"))
    assert findings(two_branches, False) == [race]


def test_b03_with_an_event_for_each_copy_nothing_is_missing():
    assert findings(two_branches, True) == []


def branches_on_two_streams(events):
    left, right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    flat, filled, works, side = torch.zeros(32), [], [], streams.Stream()
    for part, linear in zip(flat.chunk(2), (left, right), strict=True):

        def hook(param, part=part):
            part.copy_(param.grad.view(-1))
            filled.append(current_stream().record_event())
            if len(filled) == 2:
                for event in filled if events else ():
                    event.wait()
                works.append(dist.all_reduce(flat, async_op=True))

        linear.weight.register_post_accumulate_grad_hook(hook)
    x = torch.ones(2, 4)
    side.wait_stream(current_stream())
    with stream(side):
        one = left(x)
    two = right(x)
    current_stream().wait_stream(side)
    (one * two).sum().backward()
    for work in works:
        work.wait()
    return flat


def test_b03_branches_whose_backward_runs_on_two_streams_fill_one_bucket():
    race = ("hazard", ("copy_", "default"), ("all_reduce", "comm"))
    assert findings(branches_on_two_streams, False) == [race]
    assert findings(branches_on_two_streams, True) == []


@pytest.mark.parametrize("make", [ol.BucketedReducer, ol.HookReducer, ol.SerialReducer])
def test_b03_our_reducers_take_gradients_from_any_stream(make):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            side = streams.Stream()
            side.wait_stream(current_stream())
            with stream(side):
                one = self.left(x)
            two = self.right(x)
            current_stream().wait_stream(side)
            return one * two

    def step():
        model = Branches()
        reducer = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            reducer.wait()
            optimizer.step()
            optimizer.zero_grad()

    assert findings(step) == []


# -- B04: asynchronous all-reduce, then a division
# https://github.com/OpenNMT/OpenNMT-py/issues/2295


def average(waits):
    grad = torch.ones(2**12)
    work = dist.all_reduce(grad, async_op=True)
    if waits:
        work.wait()
    grad.div_(2)
    if not waits:
        work.wait()
    return grad


def test_b04_a_division_without_a_wait_is_found():
    race = ("hazard", ("all_reduce", "comm"), ("div_", "default"))
    assert findings(average, False) == [race]


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_b04_with_the_wait_before_the_first_writer_every_element_is_one(cluster):
    run = ol.run(average, True, world_size=2, cluster=cluster)
    assert run.warnings == ()
    assert all(bool((grad == 1.0).all()) for grad in run.values)


# B05 is in test_events.py.


# -- B10: the false alarm: ordered by the caller, before every allocation
# https://github.com/NVIDIA/Megatron-LM/issues/5788


def gather_stream(waits):
    gather, shard, x = streams.Stream(), torch.ones(4, 8), torch.ones(8, 8)

    def gathered():  # looks as if a record_stream were missing
        with stream(gather):
            full = torch.empty(8, 8)
            work = dist.all_gather(list(full.chunk(2)), shard, async_op=True)
            work.wait()
        current_stream().wait_stream(gather)
        return full

    for layer in range(3):
        if waits or layer == 0:
            gather.wait_stream(current_stream())
        x = x.mm(gathered())
    return x


def test_b10_a_buffer_that_only_the_gather_stream_allocates_is_fine():
    assert findings(gather_stream, True) == []


def test_b10_without_the_callers_wait_it_would_be_a_race():
    race = ("hazard", ("mm", "default"), ("all_gather", "comm"))
    assert findings(gather_stream, False) == [race]


# -- Code that readers meet


def test_a_cap_by_waiting_for_the_oldest_work_has_right_values_and_serialises():
    def step():
        grads, works = [torch.full((8,), float(i)) for i in range(4)], []
        for grad in grads:
            works.append(dist.all_reduce(grad, async_op=True))
            if len(works) > 1:
                works.pop(0).wait()
            torch.ones(8, 8).mm(torch.ones(8, 8))
        works.pop().wait()
        return [grad[0].item() for grad in grads]

    values, program = run_virtual(step, world_size=2)
    assert values[0] == [0.0, 2.0, 4.0, 6.0]
    assert find_findings(program) == ()
    # The computation after the cap waits for a collective: that is the price.
    ops = program.ranks[0]
    waiting = [op for op in ops if any(ops[a].name == "all_reduce" for a in op.after)]
    assert [op.name for op in waiting[:3]] == ["ones"] * 3


def test_three_collectives_on_one_tensor_in_flight_run_in_order():
    def step():
        grad = torch.ones(8)
        works = [dist.all_reduce(grad, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        return grad

    assert findings(step) == []
    values, _ = run_virtual(step, world_size=2)
    assert values[0].tolist() == [8.0] * 8


def test_a_receive_that_nobody_waits_for_is_told_and_its_use_is_a_race():
    def step():
        if dist.get_rank() == 1:
            dist.isend(torch.ones(8), 0).wait()
        else:
            buffer = torch.zeros(8)
            dist.irecv(buffer, 1)
            return buffer * 2

    found = findings(step)
    assert [kind for kind, *_ in found] == ["unwaited", "hazard"]
    assert found[1][1:] == (("recv", "comm:0<->1"), ("mul", "default"))
