"""10.6: repairs that race, serialise or send as much as before are refused."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab10 as lab
from overlaplab_course.lab10 import repair_checks, repairs, step_checks

WIDE, HASTY = 1, 0  # numbers that draw each


def free_list(units, depth, gather, ready):
    """What both have in common."""
    ahead, coming = iter(units), []
    free = lab.new_slots(units, depth + 1)

    def fetch():
        unit = next(ahead, None)
        if unit is not None:
            slot = free.pop(0)
            coming.append((slot, gather(slot[: unit.numel], unit)))

    for _ in range(depth):
        fetch()
    for _ in units:
        fetch()
        slot, launched = coming.pop(0)
        ready(launched)
        yield slot
        free.append(slot)


def wide_repaired(units, depth):
    def gather(full, unit):
        return lab.all_gather(full, unit.shard, async_op=True)

    yield from free_list(units, depth, gather, lambda work: work.wait())


def hasty_repaired(units, depth):
    side = streams.Stream()

    def gather(full, unit):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            lab.all_gather(full, unit.shard)
        return side.record_event()

    def ready(event):
        streams.current_stream().wait_event(event)

    yield from free_list(units, depth, gather, ready)


def right(number):
    case = repairs.repair_case(number)
    return {"kind": case.kind, "layer": case.layer}


def grade(number, *, wide=wide_repaired, hasty=hasty_repaired, said=None):
    said = right(number) if said is None else said
    return judge(find_exercise("10.6"), number, said, wide, hasty)


@pytest.mark.parametrize("number", [0, 1, 17])
def test_the_repair_passes_whatever_the_number_draws(number):
    assert grade(number).passed, str(grade(number))


def test_numbers_draw_both_and_several_layers():
    cases = [repairs.repair_case(number) for number in range(12)]
    assert {case.name for case in cases} == {"wide", "hasty"}
    assert {case.layer for case in cases} >= {2, 3, 4}


def test_the_two_that_stand_for_each_are_these():
    assert repairs.repair_case(WIDE).name == "wide"
    assert repairs.repair_case(HASTY).name == "hasty"


# -- diagnoses


@pytest.mark.parametrize("number", [WIDE, HASTY])
@pytest.mark.parametrize("slip", ["kind", "layer", "none", "other layer"])
def test_a_wrong_diagnosis_is_refused(number, slip, faults):
    said = right(number)
    if slip == "kind":
        other = {"race": "too many bytes", "too many bytes": "race"}
        said["kind"] = other[said["kind"]]
    elif slip == "layer":
        said["layer"] = 0
    elif slip == "other layer":
        said["layer"] += 1
    else:
        said = {"kind": None, "layer": None}
    verdict = grade(number, said=said)
    assert set(faults(verdict)) == {repair_checks.DIAGNOSIS}
    assert "run the code as it was given" in verdict.hint


# -- wrong repairs of the wide one


def narrower_slots_but_all_sent(units, depth):
    """The memory is mended, the bytes are not: an all-reduce of padded shards."""

    def gather(full, unit):
        full.zero_()
        full.view(dist.get_world_size(), -1)[dist.get_rank()] = unit.shard
        return dist.all_reduce(full, async_op=True)

    yield from free_list(units, depth, gather, lambda work: work.wait())


def only_the_bytes(units, depth):
    """Sends what it should, into slots as large as before."""
    n = dist.get_world_size()
    large = [s.new_empty(n * s.numel()) for s in lab.new_slots(units, depth + 1)]
    works = {}

    def launch(i):
        if i < len(units):
            full = large[i % len(large)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        works.pop(i).wait()
        yield large[i % len(large)]


def on_demand(units, depth):
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        lab.all_gather(slot[: unit.numel], unit.shard)
        yield slot


def the_wrong_part(units, depth):
    """Rank 0's shard in the place of everybody's."""

    def gather(full, unit):
        parts = full.view(dist.get_world_size(), -1)
        parts.copy_(unit.shard.expand_as(parts))
        return lab.all_gather(full.clone(), unit.shard, async_op=True)

    yield from free_list(units, depth, gather, lambda work: work.wait())


def parts_in_reverse(units, depth):
    def gather(full, unit):
        parts = list(full.chunk(dist.get_world_size()))
        return dist.all_gather(parts[::-1], unit.shard, async_op=True)

    yield from free_list(units, depth, gather, lambda work: work.wait())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (parts_in_reverse, step_checks.VALUES),
        (narrower_slots_but_all_sent, step_checks.ONCE),
        (only_the_bytes, step_checks.SLOTS),
        (on_demand, step_checks.PROMPT),
        (the_wrong_part, step_checks.VALUES),
    ],
)
def test_a_wrong_repair_of_the_wide_one_is_refused(wrong, sentence, faults):
    assert sentence in faults(grade(WIDE, wide=wrong))


# -- wrong repairs of the hasty one


def waits_for_the_whole_stream(units, depth):
    """Also for the gather that was launched just now: no overlap is left."""
    side = streams.Stream()

    def gather(full, unit):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            lab.all_gather(full, unit.shard)

    def ready(_):
        streams.current_stream().wait_stream(side)

    yield from free_list(units, depth, gather, ready)


def the_event_before_the_gather(units, depth):
    side = streams.Stream()

    def gather(full, unit):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            event = side.record_event()
            lab.all_gather(full, unit.shard)
        return event

    def ready(event):
        streams.current_stream().wait_event(event)

    yield from free_list(units, depth, gather, ready)


def the_cpu_waits(units, depth):
    side = streams.Stream()

    def gather(full, unit):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            lab.all_gather(full, unit.shard)
        return side.record_event()

    yield from free_list(units, depth, gather, lambda event: event.synchronize())


def one_edge_for_the_other(units, depth):
    """Waits for the weights; overwrites them while they are read."""
    side = streams.Stream()

    def gather(full, unit):
        with streams.stream(side):
            lab.all_gather(full, unit.shard)
        return side.record_event()

    def ready(event):
        streams.current_stream().wait_event(event)

    yield from free_list(units, depth, gather, ready)


def all_on_one_stream(units, depth):
    def gather(full, unit):
        lab.all_gather(full, unit.shard)

    yield from free_list(units, depth, gather, lambda _: None)


def everything_is_synchronised(units, depth):
    for slot in on_demand(units, depth):
        streams.synchronize()
        yield slot


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (waits_for_the_whole_stream, step_checks.PROMPT),
        (all_on_one_stream, step_checks.PROMPT),
        (the_event_before_the_gather, step_checks.SAFE),
        (one_edge_for_the_other, step_checks.SAFE),
        (the_cpu_waits, step_checks.CPU),
        (everything_is_synchronised, step_checks.CPU),
    ],
)
def test_a_wrong_repair_of_the_hasty_one_is_refused(wrong, sentence, faults):
    assert sentence in faults(grade(HASTY, hasty=wrong))


@pytest.mark.parametrize(
    ("number", "repair", "told"),
    [
        (WIDE, {"wide": on_demand}, "launch it before the layer"),
        (HASTY, {"hasty": waits_for_the_whole_stream}, "wait_stream() takes all"),
    ],
)
def test_a_repair_that_is_late_is_told_why(number, repair, told):
    assert told in grade(number, **repair).hint


# -- unusual and right


def hasty_with_works(units, depth):
    """No stream of its own any more."""
    yield from wide_repaired(units, depth)


def hasty_waits_inside_the_stream(units, depth):
    """Async from the side stream; the compute stream waits for the work."""
    side = streams.Stream()

    def gather(full, unit):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            return lab.all_gather(full, unit.shard, async_op=True)

    yield from free_list(units, depth, gather, lambda work: work.wait())


@pytest.mark.parametrize("repaired", [hasty_with_works, hasty_waits_inside_the_stream])
def test_an_unusual_repair_passes(repaired):
    for number in (HASTY, WIDE):
        verdict = grade(number, wide=repaired, hasty=repaired)
        assert verdict.passed, str(verdict)
