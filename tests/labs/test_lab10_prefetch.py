"""10.3: what is late, too much or unordered is refused; any design of a ring passes."""

from __future__ import annotations

from collections import deque

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab10 as lab
from overlaplab_course.lab10 import step_checks as checks


def ring(
    units, depth, *, num_slots=None, ahead=None, late=False, wait=True, slots=None
):
    """What the exercise asks for, with a knob for each mistake."""
    num_slots = depth + 1 if num_slots is None else num_slots
    ahead = depth if ahead is None else ahead
    slots = slots or lab.new_slots(units, num_slots)
    works = {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(ahead):
        launch(i)
    for i in range(len(units)):
        if not late:
            launch(i + ahead)
        if wait:
            works.pop(i).wait()
        yield slots[i % len(slots)]
        if late:
            launch(i + ahead)


def everything_at_once(units, depth):
    """As fast as can be; the bytes give it away."""
    yield from ring(units, depth, num_slots=len(units), ahead=len(units))


def never_freed(units, depth):
    yield from ring(units, depth, num_slots=len(units))


def one_slot_more(units, depth):
    yield from ring(units, depth, num_slots=depth + 2, ahead=depth + 1)


def always_depth_one(units, depth):
    """The constant that suits most models; the uneven stack shows it."""
    yield from ring(units, depth, num_slots=min(depth, 1) + 1, ahead=min(depth, 1))


def on_demand(units, depth):
    yield from ring(units, depth, num_slots=1, ahead=0)


def launched_behind_the_layer(units, depth):
    """The prefetch that prefetches nothing."""
    slots, works = lab.new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    launch(0)
    for i in range(len(units)):
        works.pop(i).wait()
        yield slots[i % len(slots)]
        launch(i + 1)


def waits_for_all_that_is_on_its_way(units, depth):
    slots, works = lab.new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        for work in works.values():
            work.wait()
        works.clear()
        yield slots[i % len(slots)]


def never_waits(units, depth):
    yield from ring(units, depth, wait=False)


def one_slot_too_few(units, depth):
    """The gather overwrites the layer that computes."""
    yield from ring(units, depth, num_slots=max(depth, 1))


def launched_one_turn_too_early(units, depth):
    """The gather of use i + depth + 1 takes the slot from which use i will read."""
    slots, works = lab.new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth + 1):
        launch(i)
    for i in range(len(units)):
        works.pop(i).wait()
        launch(i + depth + 1)
        yield slots[i % len(slots)]


def overwrites_on_another_stream(units, depth):
    """Nothing orders the gather behind the layer that was in the slot."""
    slots, side = lab.new_slots(units, depth + 1), streams.Stream()
    works = {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            with streams.stream(side):
                works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        works.pop(i).wait()
        yield slots[i % len(slots)]


def the_cpu_waits(units, depth):
    slots, works = lab.new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        while not works[i].is_completed():
            pass
        works.pop(i).wait()
        yield slots[i % len(slots)]


def gathers_full_times_ranks(units, depth):
    """Errata: numel * world_size elements; right weights, far too many bytes."""
    rank, n = dist.get_rank(), dist.get_world_size()
    slots = [s.new_empty(n * s.numel()) for s in lab.new_slots(units, depth + 1)]
    works = {}

    def launch(i):
        if i < len(units):
            unit = units[i]
            mine = unit.shard.new_zeros(n, unit.shard.numel())
            mine[rank] = unit.shard
            full = slots[i % len(slots)][: n * unit.numel]
            works[i] = lab.all_gather(full, mine.flatten(), async_op=True)

    for i in range(depth):
        launch(i)
    for i, unit in enumerate(units):
        launch(i + depth)
        works.pop(i).wait()
        full = slots[i % len(slots)][: n * unit.numel]
        yield full.view(n, unit.numel).sum(0)


def each_is_gathered_twice(units, depth):
    slots, works = lab.new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            full = slots[i % len(slots)][: units[i].numel]
            lab.all_gather(full, units[i].shard, async_op=True).wait()
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        works.pop(i).wait()
        yield slots[i % len(slots)]


def copied_out_of_the_ring(units, depth):
    """Each layer's weights in a tensor of their own, for good."""
    kept = []
    for slot in ring(units, depth):
        kept.append(slot.clone())
        yield kept[-1]


def the_last_units_are_forgotten(units, depth):
    """The slot has what was in it before."""
    slots = lab.new_slots(units, depth + 1)
    half = units[: len(units) // 2]
    for i, slot in enumerate(ring(half, depth, slots=slots)):
        del i
        yield slot
    for i in range(len(half), len(units)):
        yield slots[i % len(slots)]


def ranks_disagree(units, depth):
    """Rank 1 launches in another order than the others."""
    slots, works = lab.new_slots(units, depth + 1), {}
    order = list(range(len(units)))
    if dist.get_rank() == 1 and depth:
        order[0], order[1] = 1, 0

    def launch(i):
        full = slots[i % len(slots)][: units[i].numel]
        works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in order[: depth + 1]:
        launch(i)
    for i in range(len(units)):
        works.pop(i).wait()
        yield slots[i % len(slots)]
        if i + depth + 1 < len(units):
            launch(i + depth + 1)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (everything_at_once, checks.SLOTS),
        (never_freed, checks.SLOTS),
        (one_slot_more, checks.SLOTS),
        (copied_out_of_the_ring, checks.SLOTS),
        (always_depth_one, checks.PROMPT),
        (on_demand, checks.PROMPT),
        (launched_behind_the_layer, checks.PROMPT),
        (waits_for_all_that_is_on_its_way, checks.PROMPT),
        (never_waits, checks.SAFE),
        (one_slot_too_few, checks.SAFE),
        (launched_one_turn_too_early, checks.SAFE),
        (overwrites_on_another_stream, checks.SAFE),
        (the_cpu_waits, checks.CPU),
        (gathers_full_times_ranks, checks.ONCE),
        (each_is_gathered_twice, checks.ONCE),
        (the_last_units_are_forgotten, checks.VALUES),
        (ranks_disagree, checks.VALUES),
    ],
)
def test_a_wrong_prefetcher_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("10.3"), wrong)
    assert sentence in faults(verdict), str(verdict)
    assert verdict.timeline is not None


def test_everything_at_once_is_refused_by_its_bytes_alone(faults):
    found = faults(judge(find_exercise("10.3"), everything_at_once))
    assert set(found) == {checks.SLOTS}
    assert found[checks.SLOTS].startswith("12.0 layers are gathered at once")


def test_a_late_gather_is_told_when_it_could_have_started(faults):
    found = faults(judge(find_exercise("10.3"), launched_behind_the_layer))
    assert set(found) == {checks.PROMPT}
    assert (
        "layer 1 a slot was free from 0.000 ms, the wire from 1.4 ms"
        in found[checks.PROMPT]
    )


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (launched_behind_the_layer, "launch it before the layer"),
        (on_demand, "launch it before the layer"),
        (always_depth_one, "only 1 ahead where the depth is 2: is `depth` used?"),
        (waits_for_all_that_is_on_its_way, "your layers wait for gathers of later"),
    ],
)
def test_each_way_to_be_late_has_its_own_hint(wrong, told):
    assert told in judge(find_exercise("10.3"), wrong).hint


def test_who_fills_a_slot_too_soon_is_told_which_and_no_value_is_praised(faults):
    verdict = judge(find_exercise("10.3"), launched_one_turn_too_early)
    seen = faults(verdict)[checks.SAFE]
    assert seen.startswith("G2 fills the slot that F0 still reads")
    assert "wait()" not in seen + verdict.hint
    assert checks.VALUES in verdict.unjudged


# -- unusual and right


def in_turn(units, depth):
    yield from ring(units, depth)


def launched_at_the_end_of_the_turn(units, depth):
    """depth + 1 gathers before the first layer, then one behind each."""
    yield from ring(units, depth, ahead=depth + 1, late=True)


def a_free_list(units, depth):
    ahead, coming, free = iter(units), deque(), lab.new_slots(units, depth + 1)

    def fetch():
        unit = next(ahead, None)
        if unit is not None:
            slot = free.pop()
            full = slot[: unit.numel]
            coming.append((slot, lab.all_gather(full, unit.shard, async_op=True)))

    for _ in range(depth):
        fetch()
    for _ in units:
        fetch()
        slot, work = coming.popleft()
        work.wait()
        yield slot
        free.append(slot)


def fresh_memory_for_each(units, depth):
    """No ring: the allocator's blocks come round."""
    coming, ahead = deque(), iter(units)

    def fetch():
        unit = next(ahead, None)
        if unit is not None:
            full = unit.shard.new_empty(unit.numel)
            coming.append((full, lab.all_gather(full, unit.shard, async_op=True)))

    for _ in range(depth):
        fetch()
    for _ in units:
        fetch()
        full, work = coming.popleft()
        work.wait()
        del work
        yield full
        del full


def on_a_stream_of_its_own(units, depth):
    slots, side = lab.new_slots(units, depth + 1), streams.Stream()
    arrived = {}

    def launch(i):
        if i < len(units):
            side.wait_stream(streams.current_stream())
            with streams.stream(side):
                lab.all_gather(slots[i % len(slots)][: units[i].numel], units[i].shard)
                arrived[i] = side.record_event()

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        streams.current_stream().wait_event(arrived.pop(i))
        yield slots[i % len(slots)]


class OneBuffer:
    """Views of one large tensor; what is there is not gathered again."""

    def __init__(self, units, depth):
        self.units, self.number = units, 0
        self.inside = [None] * (depth + 1)
        self.uses = []  # places of the uses that are on their way, or None: there
        self.buffer = units[0].shard.new_empty(
            depth + 1, max(unit.numel for unit in units)
        )
        for _ in range(depth):
            self.fetch()

    def fetch(self):
        number = len(self.uses)
        if number >= len(self.units):
            return
        unit = self.units[number]
        before = self.uses[-1][0] if number else 0
        if number and self.inside[before] is unit:
            self.uses.append((before, None))
            return
        place = (before + 1) % len(self.inside) if number else 0
        full = self.buffer[place][: unit.numel]
        self.inside[place] = unit
        work = lab.all_gather(full, unit.shard, async_op=True)
        self.uses.append((place, work))

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == len(self.units):
            raise StopIteration
        self.fetch()
        place, work = self.uses[self.number]
        self.number += 1
        if work is not None:
            work.wait()
        return self.buffer[place]


@pytest.mark.parametrize(
    "right",
    [
        in_turn,
        launched_at_the_end_of_the_turn,
        a_free_list,
        fresh_memory_for_each,
        on_a_stream_of_its_own,
        OneBuffer,
    ],
)
def test_an_unusual_prefetcher_passes(right):
    verdict = judge(find_exercise("10.3"), right)
    assert verdict.passed, str(verdict)


def prefetched_in_numpy(units, depth):
    for slot in ring(units, depth):
        yield torch.from_numpy(slot.numpy().copy())


def test_weights_that_numpy_copied_are_refused(faults):
    found = faults(judge(find_exercise("10.3"), prefetched_in_numpy))
    assert "no operator of the record wrote" in found[checks.VALUES]
