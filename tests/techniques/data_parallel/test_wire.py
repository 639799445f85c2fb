"""Between launch and finish: a wire that fails, copies on it, gradients not as stored.

As in misuse.py, a weight's gradient is its input 1 + rank + 10 step.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.errors import RankError
from overlaplab.techniques.data_parallel import AllReduce, BucketedReducer
from tests.ranks import On, everywhere, run_on
from tests.techniques.data_parallel.misuse import average, batch, mean, weight

EACH_ALONE_MIB = 1e-6  # a bucket for each parameter


class FailsOnce(AllReduce):
    """One call raises on rank 0 before it does anything, as if memory ran out."""

    def __init__(self, method: str, call: int) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)
        self.method = method
        self.left = call if dist.get_rank() == 0 else -1

    def count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == -1:
                raise MemoryError(method)

    def launch(self, tensors: list[Tensor]) -> Any:
        self.count("launch")
        return super().launch(tensors)

    def finish(self, launched: Any) -> None:
        self.count("finish")
        super().finish(launched)


def launch_fails(call: int) -> list[float]:
    net = nn.Sequential(weight(), weight(), weight())
    wire = FailsOnce("launch", call)
    reducer = BucketedReducer(net, bucket_mib=EACH_ALONE_MIB, wire=wire)
    with contextlib.suppress(MemoryError):
        net(batch(0)).sum().backward()
    reducer.abandon()
    net.zero_grad()
    net(batch(1)).sum().backward()
    reducer.wait()
    return average(net)


@everywhere
@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_bucket_whose_launch_failed_is_sent_when_ranks_abandon(
    on: On, call: int
) -> None:
    run = run_on(on, launch_fails, call)
    assert tuple(run.values) == ([mean(on.ranks, 1)] * 3,) * on.ranks


def remove_fails() -> bool:
    net = weight()
    reducer = BucketedReducer(net, wire=FailsOnce("finish", 0))
    net(batch(0)).sum().backward()
    with contextlib.suppress(MemoryError):
        reducer.remove()
    return not net.weight._post_accumulate_grad_hooks


@everywhere
def test_a_reducer_whose_wire_fails_is_removed_all_the_same(on: On) -> None:
    run = run_on(on, remove_fails)
    assert tuple(run.values) == (True,) * on.ranks


def finish_fails() -> list[float]:
    net = weight()
    reducer = BucketedReducer(net, wire=FailsOnce("finish", 0))
    net(batch(0)).sum().backward()
    with contextlib.suppress(MemoryError):
        reducer.wait()
    if dist.get_rank() == 0:
        reducer.wait()
    return average(net)


@everywhere
def test_a_bucket_that_the_wire_could_not_finish_is_not_taken_for_an_average(
    on: On,
) -> None:
    run = run_on(on, finish_fails)
    assert tuple(run.values) == ([mean(on.ranks)],) * on.ranks


class WatchingWire(AllReduce):
    """Notes at each launch how many of the tensors that it was given still live."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD, torch.float32)
        self.given: list[weakref.ref[Tensor]] = []
        self.living: list[int] = []

    def launch(self, tensors: list[Tensor]) -> Any:
        self.given.append(weakref.ref(tensors[0]))
        self.living.append(sum(ref() is not None for ref in self.given))
        return super().launch(tensors)


def living_copies(max_in_flight: int | None) -> list[int]:
    net = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).bfloat16()
    wire = WatchingWire()
    reducer = BucketedReducer(
        net, bucket_mib=EACH_ALONE_MIB, wire=wire, max_in_flight=max_in_flight
    )
    net(torch.ones(2, 8).bfloat16()).sum().backward()
    reducer.wait()
    return wire.living


@everywhere
@pytest.mark.parametrize(
    ("max_in_flight", "living"),
    [(None, [1, 2, 3, 4]), (1, [1, 1, 1, 1]), (2, [1, 2, 2, 2])],
)
def test_no_more_copies_live_than_buckets_are_in_flight(
    on: On, max_in_flight: int | None, living: list[int]
) -> None:
    run = run_on(on, living_copies, max_in_flight)
    assert tuple(run.values) == (living,) * on.ranks and run.warnings == ()


def writes_what_is_finished() -> None:
    """The second bucket's launch finishes the first, whose gradient is then zeroed."""
    net = nn.Sequential(weight(), weight(), weight())

    def zero(_: Tensor) -> None:
        net[2].weight.grad.zero_()

    net[1].weight.register_post_accumulate_grad_hook(zero)
    reducer = BucketedReducer(net, bucket_mib=EACH_ALONE_MIB, max_in_flight=1)
    net(batch(0)).sum().backward()
    reducer.wait()


@everywhere
def test_a_gradient_that_is_touched_after_its_bucket_finished_is_named(on: On) -> None:
    with pytest.raises(RankError, match=r"2\.weight\.grad was replaced, freed or writ"):
        run_on(on, writes_what_is_finished)


class Turned(nn.Module):
    """`used` has the gradient 1 and holds it in memory as -1, with a bit that says so.

    Another one's is in the same bucket: that of an input of 1 + rank.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(shape))
        self.other = nn.Parameter(torch.ones(shape))

    def forward(self) -> Tensor:
        loss = self.other * (1.0 + dist.get_rank())
        if dist.get_rank() == 0:
            number = torch.complex(torch.zeros_like(self.used), self.used)
            loss = loss + (number.conj() * 1j).real
        return loss.sum()


def lazily_negated(shape: tuple[int, ...]) -> tuple[bool, list[float]]:
    net = Turned(shape)
    reducer = BucketedReducer(net)
    net().backward()
    lazy = net.used.grad is not None and net.used.grad.is_neg()
    reducer.wait()
    return lazy, average(net)


@everywhere
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_lazily_negated_gradient_keeps_its_sign_on_other_ranks(
    on: On, shape: tuple[int, ...]
) -> None:
    run = run_on(on, lazily_negated, shape)
    right = pytest.approx([1 / on.ranks, mean(on.ranks)])
    assert tuple(run.values) == tuple((rank == 0, right) for rank in range(on.ranks))
    assert run.warnings == ()


def expanded() -> list[float]:
    """Four elements in one place of memory; the first bucket finishes before `wait`."""
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    reducer = BucketedReducer(net, bucket_mib=EACH_ALONE_MIB, max_in_flight=1)
    for layer in net:
        layer.weight.grad = torch.full((1, 1), 1.0 + dist.get_rank()).expand(2, 2)
    reducer.wait()
    return [p.grad.sum().item() for p in net.parameters()]


@everywhere
def test_a_gradient_that_its_average_replaces_was_not_touched(on: On) -> None:
    run = run_on(on, expanded)
    assert (
        tuple(run.values) == ([4 * mean(on.ranks)] * 2,) * on.ranks
        and run.warnings == ()
    )
