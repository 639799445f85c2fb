"""Lab 10's given parts: the same step on gloo, bytes in order, stored numbers."""

from __future__ import annotations

import json

import pytest
import torch

import overlaplab as ol
from overlaplab_course import lab10 as lab
from overlaplab_course import peaks
from overlaplab_course.lab10 import broken, given, measured, reference, ring, store
from overlaplab_course.lab10.given import Stack, split

STACK = Stack(num_layers=3, width=9, rows=5, tables=(0, 7, 0), dtype=torch.float64)


def arguments(num_ranks):
    shards = [split(layer, num_ranks) for layer in STACK.weights()]
    grads = [[torch.zeros_like(part) for part in layer] for layer in shards]
    return shards, grads, STACK.inputs(num_ranks)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize(
    ("cluster", "num_ranks"),
    [("virtual", 1), ("virtual", 3), ("virtual", 4), ("gloo", 2), ("gloo", 3)],
)
def test_a_step_is_that_of_one_process(cluster, num_ranks, depth):
    run = ol.run(
        given.step_on_rank,
        STACK,
        *arguments(num_ranks),
        reference.prefetched,
        (depth,),
        reference.forward,
        reference.backward,
        world_size=num_ranks,
        cluster=cluster,
    )
    outputs, grads = STACK.right(num_ranks)
    for rank, held in enumerate(run.values):
        y, mine = held.value
        torch.testing.assert_close(y, outputs[rank])
        for whole, part in zip(grads, mine, strict=True):
            torch.testing.assert_close(part, split(whole, num_ranks)[rank])


def test_a_gather_takes_2_ms_and_a_layer_8():
    report = lab.play_ours(0, lab.EQUAL).run.timeline.of_rank(0).report()
    assert report.communication_ns / 24 == pytest.approx(2e6, rel=1e-3)
    assert report.compute_ns / 24 == pytest.approx(8e6, rel=1e-3)


def test_depth_1_hides_all_but_the_first_gather_of_24():
    """24 layers, 2 ms a gather, 8 ms a layer: deeper costs memory for nothing."""
    steps = {d: round(lab.play_ours(d).step_ns / 1e6) for d in (0, 1, 2, 5)}
    assert steps == {0: 240, 1: 194, 2: 194, 5: 194}
    slots = [lab.slots_alive(lab.play_ours(d)) for d in (0, 1, 2, 5)]
    assert slots == [1, 2, 3, 6]


def test_a_slot_is_filled_used_and_filled_again():
    timeline = lab.drawn(lab.play_ours(1, lab.SMALL))
    rows = [s.name for s in timeline.spans if s.lane == "slot 0"]
    assert rows == ["G0", "F0", "G2", "F2", "G4", "F4"]
    rows = [s.name for s in timeline.spans if s.lane == "slot 1"]
    assert rows == ["G1", "F1", "G3", "F3", "G5", "F5"]


def lanes_of(timeline, word):
    rows = {}
    for span in timeline.spans:
        if span.lane.startswith(word):
            rows.setdefault(span.lane, []).append(span.name)
    return rows


def test_a_buffer_is_written_sent_and_written_again():
    timeline = lab.drawn(lab.play_ours(1, lab.THREE, backward=True))
    buffers = {"buffer 0": ["B2", "S2", "B0", "S0"], "buffer 1": ["B1", "S1"]}
    assert lanes_of(timeline, "buffer") == buffers


def test_a_race_has_a_lane_for_what_fills_a_slot_and_one_for_what_reads_it():
    """In one lane the layer would cover the gather that is still under way."""
    case = next(c for n in range(9) if (c := lab.repair_case(n)).name == "hasty")
    raced = lanes_of(lab.drawn(case.play(broken.hasty)), "slot 1")
    assert raced == {"slot 1": ["G1", "G3", "G5"], "slot 1, read": ["F1", "F3", "F5"]}
    ordered = lanes_of(lab.drawn(case.play(reference.hasty)), "slot 1")
    assert ordered == {"slot 1": ["G1", "F1", "G3", "F3", "G5", "F5"]}


def backward_that_never_waits(grad, units, weights):
    buffers, works = given.new_slots(units, 2), []
    for i, unit in enumerate(units):
        full = buffers[i % 2][: unit.numel]
        grad = unit.backward(grad, next(weights), full)
        works.append(lab.reduce_scatter(unit.grad, full, async_op=True))
    for work in works:
        work.wait()


def test_a_buffer_that_is_written_while_it_is_sent_has_two_lanes():
    """Three gathers ahead stand before the first gradient on the wire."""
    stack = given.Stack(num_layers=4, tables=(600, 600, 0, 0))
    played = lab.play(
        reference.prefetched, 3, stack=stack, backward=backward_that_never_waits
    )
    rows = lanes_of(lab.drawn(played), "buffer 0")
    assert rows == {"buffer 0": ["S3", "S1"], "buffer 0, written": ["B3", "B1"]}


def test_layers_that_take_as_long_share_a_row():
    _, *rows = lab.layers_table(lab.play_ours(0, lab.UNEVEN)).splitlines()
    cells = [tuple(row.rsplit(None, 2)) for row in rows]
    assert cells == [("0, 1, 2, 4, 5, 7", "2", "8"), ("3, 6", "13", "8")]


def made_before_the_old_is_released():
    old = torch.ones(100)
    new = torch.empty(100)
    del old
    return new.fill_(1)


def made_after_the_old_is_released():
    old = torch.ones(100)
    del old
    return torch.empty(100).fill_(1)


def test_what_is_made_before_the_old_is_released_lives_beside_it():
    both = [
        peaks.most_bytes(ol.run(function, world_size=1).program)
        for function in (
            made_before_the_old_is_released,
            made_after_the_old_is_released,
        )
    ]
    assert both == [800, 400]


def copied_shard():
    unit = given.Unit("layer 5", [(4,)], torch.ones(2), torch.zeros(2))
    sent = unit.shard.clone()
    lab.all_gather(torch.empty(4), sent)
    lab.all_gather(torch.empty(4), torch.ones(2))


def test_a_gather_is_known_by_the_shard_that_it_sends():
    program = ol.run(copied_shard, world_size=2).program
    assert [g.layer for g in ring.find_gathers(program, 0)] == [5, None]


def test_a_backward_without_a_forward_is_an_error():
    def backward():
        unit = given.Unit("layer 0", [(2, 2), (2,)], torch.ones(6), torch.zeros(6))
        unit.backward(torch.ones(1, 2), torch.ones(6), torch.ones(6))

    with pytest.raises(ol.RankError, match="backward of layer 0 without a forward"):
        ol.run(backward, world_size=1)


# -- stored numbers of GPUs


def results():
    row = {"median_ms": 10.5, "peak_allocated_bytes": 2**31}
    other = {"median_ms": 20.0, "kernels": {"exposed_ms": 3.0}}
    cases = [
        {"batch": 2, "variants": {"ours": row, "fsdp2": other}},
        {"batch": 8, "variants": {"ours": row}},
    ]
    head = {"world_size": 2, "card": "a card", "torch": "2.11.0", "date": "2026-12-01T"}
    return head | {"models": [{"model": "gpt-738m", "cases": cases}]}


def test_the_benchmarks_file_becomes_tables(tmp_path, monkeypatch, capsys):
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps(results()))
    monkeypatch.setattr(measured, "STORED", tmp_path / "measured.json")
    store.main([str(path)])
    assert measured.gpu_number("median ms", "fsdp2", 2) == 20
    assert measured.gpu_number("peak GiB", "ours", 8) == 2
    lines = measured.gpu_table("exposed ms").split("\n")
    assert [line.split() for line in lines] == [
        ["exposed", "ms", "batch", "2", "batch", "8"],
        ["ours", "-", "-"],
        ["fsdp2", "3.00", "-"],
    ]
    with pytest.raises(KeyError, match="no median ms of 'fsdp2' at batch 8"):
        measured.gpu_number("median ms", "fsdp2", 8)
    assert "2 x a card, torch 2.11.0, 2026-12-01" in measured.gpu_machine()


def test_an_unknown_model_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gpt-9b'.*there are: gpt-738m"):
        store.from_benchmark(results(), "gpt-9b")
