"""A result counts if operators of the record made it, from what the step was given."""

from __future__ import annotations

import _thread

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.run import run
from overlaplab.grading import laws, origins

NUM_BYTES = 4 * 16 * 16


def faults(step, world_size=2):
    """(what was wrong with the result of each rank that `step` returned)."""

    def on_rank():
        draw = torch.Generator().manual_seed(dist.get_rank())
        with _disable_current_modes():
            x, w = torch.randn(2, 16, 16, generator=draw).unbind()
        return origins.hold(step, x.clone(), w.clone())

    recorded = origins.release(run(on_rank, world_size=world_size))
    assert recorded.program is not None
    found = laws.origin_law(recorded.program)
    assert all(v.law == "origin" for v in found)
    return [v.message for v in found]


def in_numpy(x, w):
    return torch.from_numpy(x.numpy() @ w.numpy())


def in_numpy_and_then_added_to(x, w):
    return in_numpy(x, w) + 0 * x


def in_numpy_summed_by_a_collective(x, w):
    y = in_numpy(x, w)
    dist.all_reduce(y)
    return y


def from_a_list(x, w):
    return torch.tensor((x.numpy() @ w.numpy()).tolist())


def copied_into_a_given_tensor(x, w):
    return x.copy_(in_numpy(x, w))


def with_the_record_switched_off(x, w):
    with _disable_current_modes():
        return x @ w


def in_a_thread_beside_the_rank(x, w):
    made, done = [], _thread.allocate_lock()

    def compute():
        made.append(x @ w)
        done.release()

    done.acquire()
    _thread.start_new_thread(compute, ())
    done.acquire()
    return made[0]


NOBODY = f"{NUM_BYTES} bytes that no operator of the record wrote"


@pytest.mark.parametrize(
    ("step", "via"),
    [
        (in_numpy, ""),
        (in_numpy_and_then_added_to, "add"),
        (in_numpy_summed_by_a_collective, "all_reduce"),
        (from_a_list, ""),
        (copied_into_a_given_tensor, "copy_"),
        (with_the_record_switched_off, ""),
        (in_a_thread_beside_the_rank, ""),
    ],
)
def test_what_the_record_does_not_know_is_no_result(step, via):

    first, *_ = faults(step)
    went = f" went into {via} " if via else ""
    assert f"the result on rank 0: {NOBODY}{went}" in first


def on_the_cpu(x, w):
    return (x.cpu() @ w.cpu()).to(ol.device())


def test_what_the_cpu_computes_is_no_result():
    first, _ = faults(on_the_cpu)
    assert "what mm [" in first and "computed on the CPU went into copy h2d" in first


def test_one_rank_that_cheats_is_named():
    def step(x, w):
        return in_numpy(x, w) if dist.get_rank() == 1 else x @ w

    assert faults(step) == [f"the result on rank 1: {NOBODY}"]


def product(x, w):
    return x @ w


def in_place(x, w):
    return x.mul_(2).add_(w)


def what_it_was_given(x, w):
    return x


def a_view_of_a_sum(x, w):
    dist.all_reduce(x)
    return x[:, ::2].t()


def factories(x, w):
    mask = torch.arange(16, device=x.device) % 2
    return torch.where(mask > 0, x, torch.full_like(x, 3.0))


def factors_and_indices_from_the_host(x, w):
    order = torch.tensor([3, 1, 2, 0])
    return x[order] * torch.tensor([0.5]) + torch.tensor(1.0)


def padding_that_nobody_wrote(x, w):
    flat = x.new_empty(x.numel() + 8)
    flat[: x.numel()].copy_(x.reshape(-1))
    dist.all_reduce(flat)
    return flat[: x.numel()].view_as(x)


def in_two_halves(x, w):
    size = x.numel() // dist.get_world_size()
    part = x.new_empty(size)
    dist.reduce_scatter_tensor(part, x.reshape(-1))
    whole = x.new_empty(x.numel())
    dist.all_gather_into_tensor(whole, part)
    return whole


def received(x, w):
    box = torch.empty_like(x)
    dist.broadcast(x, src=0)
    peer = 1 - dist.get_rank()
    works = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, box, peer)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return box


def by_autograd(x, w):
    w.requires_grad_()
    (x @ w).square().mean().backward()
    return w.grad


def staged_through_pinned_memory(x, w):
    back = torch.empty(16, 16, pin_memory=True)
    back.copy_(x, non_blocking=True)
    streams.synchronize()
    return back.clone().to(ol.device()) + w


def a_number_on_its_way_through_python(x, w):
    return w * x.sum().item()


def nested(x, w):
    return {"a": [x + 1], "b": (w, None, 3)}


@pytest.mark.parametrize(
    "step",
    [
        product,
        in_place,
        what_it_was_given,
        a_view_of_a_sum,
        factories,
        factors_and_indices_from_the_host,
        padding_that_nobody_wrote,
        in_two_halves,
        received,
        by_autograd,
        staged_through_pinned_memory,
        a_number_on_its_way_through_python,
        nested,
    ],
)
def test_what_operators_made_is_a_result_however_they_did(step):
    assert faults(step) == []


def test_what_is_noted_early_is_judged_as_it_was_then():
    def on_rank():
        x = torch.zeros(64)
        notes = origins.given(x)
        y = torch.from_numpy(np.ones(64, dtype=np.float32))
        early = origins.returned(y)
        y.copy_(x)
        return origins.Held(None, (*notes, *early))

    recorded = origins.release(run(on_rank, world_size=1))
    assert recorded.program is not None and recorded.values == (None,)
    assert len(laws.origin_law(recorded.program)) == 1


def test_noting_both_ends_costs_no_operator_and_no_time():
    def plain():
        return product(torch.ones(16, 16), torch.ones(16, 16))

    def noted():
        return origins.hold(plain)

    bare, held = run(plain, world_size=1), origins.release(run(noted, world_size=1))
    assert held.program is not None and bare.program is not None
    assert [o.name for o in held.program.ranks[0]] == [
        o.name for o in bare.program.ranks[0]
    ]
    assert held.timeline.step_ns == bare.timeline.step_ns
    assert torch.equal(held.values[0], bare.values[0])


def test_an_array_of_a_tensor_on_the_device_is_a_copy():
    def step():
        x = torch.ones(4)
        x.numpy()[:] = 7
        host = torch.ones(4, device="cpu")
        host.numpy()[:] = 7
        return x.tolist(), host.tolist()

    assert run(step, world_size=1).values == (([1.0] * 4, [7.0] * 4),)
