"""10.2: a layer at a time, by bytes; waits on the right side."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab10 as lab
from overlaplab_course.lab10 import step_checks as checks


def gathered_everything_at_once(units):
    slots = lab.new_slots(units, len(units))
    for slot, unit in zip(slots, units, strict=True):
        lab.all_gather(slot[: unit.numel], unit.shard)
    yield from slots


def never_frees(units):
    kept = []
    for unit in units:
        kept.append(unit.shard.new_empty(unit.numel))
        lab.all_gather(kept[-1], unit.shard)
        yield kept[-1]


def a_new_slot_beside_the_old_one(units):
    """The name still holds the old one while the new one is made."""
    slot = None
    for unit in units:
        slot = unit.shard.new_empty(unit.numel)
        lab.all_gather(slot, unit.shard)
        yield slot
    del slot


def gathers_for_the_forward_only(units):
    """Nothing for the backward pass: the slots of the forward are kept for it."""
    seen = {}
    for unit in units:
        if unit not in seen:
            seen[unit] = unit.shard.new_empty(unit.numel)
            lab.all_gather(seen[unit], unit.shard)
        yield seen[unit]


def never_waits(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        lab.all_gather(slot[: unit.numel], unit.shard, async_op=True)
        yield slot


def waits_after_the_layer(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        work = lab.all_gather(slot[: unit.numel], unit.shard, async_op=True)
        yield slot
        work.wait()


def waits_on_another_stream(units):
    (slot,), other = lab.new_slots(units, 1), streams.Stream()
    for unit in units:
        work = lab.all_gather(slot[: unit.numel], unit.shard, async_op=True)
        with streams.stream(other):
            work.wait()
        yield slot


def the_cpu_waits(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        work = lab.all_gather(slot[: unit.numel], unit.shard, async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        yield slot


def always_the_first_layer(units):
    (slot,) = lab.new_slots(units, 1)
    for _ in units:
        lab.all_gather(slot[: units[0].numel], units[0].shard)
        yield slot


def gathers_twice(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        for _ in range(2):
            lab.all_gather(slot[: unit.numel], unit.shard)
        yield slot


def sums_zero_padded_shards(units):
    """An all-reduce of the whole: right weights, twice the bytes."""
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        full = slot[: unit.numel]
        full.zero_()
        full.view(dist.get_world_size(), -1)[dist.get_rank()] = unit.shard
        dist.all_reduce(full)
        yield slot


def parts_in_reverse(units):
    """Every rank's part is there, in another's place."""
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        parts = list(slot[: unit.numel].chunk(dist.get_world_size()))
        dist.all_gather(parts[::-1], unit.shard)
        yield slot


def nothing_waits_for_the_other_stream(units):
    """The gather waits for the layer, and not the layer for the gather."""
    (slot,), side = lab.new_slots(units, 1), streams.Stream()
    for unit in units:
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            lab.all_gather(slot[: unit.numel], unit.shard)
        yield slot


def overwrites_while_the_layer_reads(units):
    """The layer waits for the gather, and not the gather for the layer before."""
    (slot,), side = lab.new_slots(units, 1), streams.Stream()
    for unit in units:
        with streams.stream(side):
            lab.all_gather(slot[: unit.numel], unit.shard)
        streams.current_stream().wait_stream(side)
        yield slot


def through_the_host(units):
    for unit in units:
        full = unit.shard.new_empty(unit.numel)
        lab.all_gather(full, unit.shard)
        full = torch.from_numpy(full.numpy().copy())
        yield full
        del full


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (gathered_everything_at_once, checks.ONE_SLOT),
        (never_frees, checks.ONE_SLOT),
        (a_new_slot_beside_the_old_one, checks.ONE_SLOT),
        (gathers_for_the_forward_only, checks.ONE_SLOT),
        (never_waits, checks.SAFE),
        (waits_after_the_layer, checks.SAFE),
        (waits_on_another_stream, checks.SAFE),
        (the_cpu_waits, checks.CPU),
        (always_the_first_layer, checks.ONCE),
        (gathers_twice, checks.ONCE),
        (sums_zero_padded_shards, checks.ONCE),
        (through_the_host, checks.VALUES),
        (parts_in_reverse, checks.VALUES),
        (nothing_waits_for_the_other_stream, checks.SAFE),
        (overwrites_while_the_layer_reads, checks.SAFE),
    ],
)
def test_a_wrong_gatherer_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("10.2"), wrong)
    assert sentence in faults(verdict), str(verdict)
    assert verdict.timeline is not None


def test_all_at_once_is_told_how_many_layers_it_holds(faults):
    found = faults(judge(find_exercise("10.2"), gathered_everything_at_once))
    assert found[checks.ONE_SLOT].startswith("12.0 layers are gathered at once")
    assert set(found) == {checks.ONE_SLOT}


def one_slot(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        lab.all_gather(slot[: unit.numel], unit.shard)
        yield slot


def a_new_tensor_each_time(units):
    for unit in units:
        slot = unit.shard.new_empty(unit.numel)
        lab.all_gather(slot, unit.shard)
        yield slot
        del slot


def launched_and_waited_for_at_once(units):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        lab.all_gather(slot[: unit.numel], unit.shard, async_op=True).wait()
        yield slot


class Gatherer:
    """An iterator, no generator; what is there already is not gathered again."""

    def __init__(self, units):
        self.units, (self.slot,) = iter(units), lab.new_slots(units, 1)
        self.inside = None

    def __iter__(self):
        return self

    def __next__(self):
        unit = next(self.units)
        if unit is not self.inside:
            parts = list(self.slot[: unit.numel].chunk(dist.get_world_size()))
            dist.all_gather(parts, unit.shard)
            self.inside = unit
        return self.slot[: unit.numel]


@pytest.mark.parametrize(
    "right",
    [one_slot, a_new_tensor_each_time, launched_and_waited_for_at_once, Gatherer],
)
def test_an_unusual_gatherer_passes(right):
    verdict = judge(find_exercise("10.2"), right)
    assert verdict.passed, str(verdict)
