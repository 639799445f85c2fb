"""A step opens once and counts once; what it leaves on the wire is kept alive.

As in misuse.py, a weight's gradient is its input 1 + rank + 10 step.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import RankError
from overlaplab.techniques.data_parallel import AllReduce, BucketedReducer
from tests.ranks import On, everywhere, values_on
from tests.techniques.data_parallel.misuse import batch, weight


class NeverLaunches(AllReduce):
    """Every launch raises before anything is sent."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)

    def launch(self, tensors: list[Tensor]) -> Any:
        raise MemoryError("launch")


def changes_a_weight_between_two_waits() -> None:
    net = weight()
    reducer = BucketedReducer(net, wire=NeverLaunches())
    with contextlib.suppress(MemoryError):
        reducer.wait()  # opens the step: there was no backward
    with torch.no_grad():
        net.weight += 1
    reducer.wait()


@everywhere
def test_a_second_wait_does_not_open_the_step_again(on: On) -> None:
    """It would take the weight as it is now for that of the step's beginning."""
    with pytest.raises(RankError, match="weight was changed while step 0 was open"):
        values_on(on, changes_a_weight_between_two_waits)


class NeverFinishes(AllReduce):
    """Launches nothing, and remembers what it was given."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD, torch.float64)  # so that copies travel
        self.given: list[weakref.ref[Tensor]] = []

    def launch(self, tensors: list[Tensor]) -> Any:
        self.given += map(weakref.ref, tensors)
        return object()

    def finish(self, launched: Any) -> None:
        raise MemoryError("finish")


def lets_go_of_what_travels(how: str) -> tuple[bool, bool]:
    """Whether all that travelled lives still, and whether the model does."""
    net, wire = weight(), NeverFinishes()
    model = weakref.ref(net)
    reducer = BucketedReducer(net, wire=wire)
    net(batch(0)).sum().backward()
    if how == "forgotten":
        reducer.abandon_step()
    elif how == "removed":
        with contextlib.suppress(MemoryError):
            reducer.remove()
    del reducer, net
    gc.collect()
    assert wire.given
    return all(ref() is not None for ref in wire.given), model() is not None


@everywhere
@pytest.mark.parametrize("how", ["forgotten", "removed", "dropped"])
def test_what_nobody_waited_for_outlives_its_step(on: On, how: str) -> None:
    """Threads of the backend may still write it; the model need not stay for that."""
    assert values_on(on, lets_go_of_what_travels, how) == ((True, False),) * on.ranks


def abandons_on_a_destroyed_group(opened: bool) -> None:
    net = weight()
    reducer = BucketedReducer(net)
    if opened:
        net(batch(0)).sum().backward()
    dist.destroy_process_group()
    dist.init_process_group()
    reducer.abandon()


@everywhere
@pytest.mark.parametrize("opened", [False, True])
def test_a_step_cannot_be_given_up_on_a_destroyed_group(on: On, opened: bool) -> None:
    with pytest.raises(RankError, match=r"group has been destroyed.*build a new"):
        values_on(on, abandons_on_a_destroyed_group, opened)


def removed_in_mid_step() -> list[int]:
    net = weight()
    reducer = BucketedReducer(net)
    net(batch(0)).sum().backward()
    reducer.wait()
    net(batch(1)).sum().backward()
    before = reducer.num_steps
    reducer.remove()
    return [before, reducer.num_steps]


@everywhere
def test_to_remove_a_reducer_ends_no_step(on: On) -> None:
    assert values_on(on, removed_in_mid_step) == ([1, 1],) * on.ranks
