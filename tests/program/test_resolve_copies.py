"""Copies between host and device: engines, turns, and PCIe beside a staged network.

On `chalk` a pinned copy moves 10 bytes a ns, a pageable one 5.
"""

from dataclasses import replace

import pytest

from overlaplab.hardware import Link, find_hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline

CHALK = find_hardware("chalk")
NODES = replace(
    CHALK,
    name="nodes of one GPU",
    gpus_per_node=1,
    network=Link(latency_ns=0, bytes_per_s=10**10),
)
STAGED = replace(NODES, name="staged", network_staged=True)


def rows(timeline: Timeline, rank: int = 0) -> list[tuple[str, str, int, int]]:
    return [
        (s.lane, s.name, s.start_ns, s.end_ns) for s in timeline.spans if s.rank == rank
    ]


def test_copies_of_one_direction_take_turns_whatever_their_streams():
    b = ProgramBuilder()
    b.copy(0, "h2d", bytes=10_000, stream="a", name="first")
    b.copy(0, "h2d", bytes=20_000, stream="b", name="second")
    b.copy(0, "h2d", bytes=10_000, stream="c", name="third")
    timeline = resolve(b.build(), CHALK)
    assert rows(timeline) == [
        ("a", "first", 0, 1_000),
        ("b", "second", 1_000, 3_000),
        ("c", "third", 3_000, 4_000),
    ]
    # On the engine, not in its queue: the one before is what each waited for.
    assert timeline.causes == (None, 0, 1)


def test_opposite_directions_have_an_engine_each():
    b = ProgramBuilder()
    b.copy(0, "h2d", bytes=10_000, stream="a")
    b.copy(0, "d2h", bytes=20_000, stream="b")
    assert rows(resolve(b.build(), CHALK)) == [
        ("a", "copy", 0, 1_000),
        ("b", "copy", 0, 2_000),
    ]


def test_each_rank_has_engines_of_its_own():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.copy(rank, "h2d", bytes=10_000)
    assert {s.end_ns for s in resolve(b.build(), CHALK).spans} == {1_000}


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_pageable_copy_is_slower_either_way(direction):
    b = ProgramBuilder()
    b.copy(0, direction, bytes=10_000, name="pinned", stream="a")
    b.copy(0, direction, bytes=10_000, name="pageable", stream="b", pinned=False)
    assert rows(resolve(b.build(), CHALK)) == [
        ("a", "pinned", 0, 1_000),
        ("b", "pageable", 1_000, 3_000),
    ]


def test_the_bytes_of_a_copy_are_those_that_cross_the_link():
    b = ProgramBuilder()
    b.copy(0, "h2d", bytes=10_000, read_bytes=10_000)  # read there, written here
    (span,) = resolve(b.build(), CHALK).spans
    assert (span.bytes, span.duration_ns) == (10_000, 1_000)


def test_a_copy_of_the_next_batch_hides_behind_kernels():
    b = ProgramBuilder()
    first = b.copy(0, "h2d", bytes=10_000, stream="copies")
    b.copy(0, "h2d", bytes=10_000, stream="copies")
    b.compute(0, "step", ns=5_000, after=[first])
    assert rows(resolve(b.build(), CHALK)) == [
        ("copies", "copy", 0, 1_000),
        ("copies", "copy", 1_000, 2_000),
        ("default", "step", 1_000, 6_000),
    ]


def test_a_copy_back_for_which_the_cpu_waits_stalls_the_launches_behind_it():
    launching = replace(CHALK, name="launching", launch_ns=10)
    b = ProgramBuilder()
    b.compute(0, "loss", ns=100)
    copy = b.copy(0, "d2h", bytes=1_000, pinned=False, name="copy")
    b.host_wait(0, [copy], name="cpu")
    b.compute(0, "next", ns=50)
    assert rows(resolve(b.build(), launching)) == [
        ("cpu", "launch loss", 0, 10),
        ("cpu", "launch copy", 10, 20),
        ("default", "loss", 10, 110),
        ("cpu", "wait cpu", 20, 310),
        ("default", "copy", 110, 310),
        ("cpu", "launch next", 310, 320),
        ("default", "next", 320, 370),
    ]


def test_an_empty_copy_does_not_hold_the_engine():
    b = ProgramBuilder()
    b.copy(0, "h2d", bytes=0, stream="a")
    b.copy(0, "h2d", bytes=10_000, stream="b")
    assert rows(resolve(b.build(), CHALK)) == [
        ("a", "copy", 0, 0),
        ("b", "copy", 0, 1_000),
    ]


def with_a_copy_beside_a_broadcast(hardware, direction="h2d", pinned=True) -> Timeline:
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "broadcast", bytes=40_000)
    b.copy(0, direction, bytes=10_000, stream="side", pinned=pinned)
    return resolve(b.build(), hardware)


def test_a_copy_and_gpudirect_do_not_meet():
    assert rows(with_a_copy_beside_a_broadcast(NODES)) == [
        ("comm", "broadcast", 0, 4_000),
        ("side", "copy", 0, 1_000),
    ]


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_and_a_staged_network_halve_one_another(direction):
    # Both want all of PCIe: at 1/2 the copy ends at 2000, the network did 1000 of 4000.
    expected = [("comm", "broadcast", 0, 5_000), ("side", "copy", 0, 2_000)]
    timeline = with_a_copy_beside_a_broadcast(STAGED, direction)
    assert rows(timeline) == expected
    assert rows(timeline, 1) == expected[:1]


def test_a_pageable_copy_leaves_half_of_pcie_to_a_staged_network():
    # 5 of 10 bytes a ns are all that it wants, and all that it gets: 2000 ns.
    assert rows(with_a_copy_beside_a_broadcast(STAGED, pinned=False)) == [
        ("comm", "broadcast", 0, 5_000),
        ("side", "copy", 0, 2_000),
    ]


def test_a_slow_staged_network_keeps_its_speed_and_leaves_the_rest_to_the_copy():
    # The network wants 2 of PCIe's 10 bytes a ns; the copy gets 8: 1250 ns.
    slow = replace(STAGED, network=Link(latency_ns=0, bytes_per_s=2 * 10**9))
    assert rows(with_a_copy_beside_a_broadcast(slow)) == [
        ("comm", "broadcast", 0, 20_000),
        ("side", "copy", 0, 1_250),
    ]


def test_what_stays_in_a_node_does_not_meet_copies():
    link = Link(latency_ns=0, bytes_per_s=10**10)
    pair = replace(STAGED, gpus_per_node=2, link=link)
    assert rows(with_a_copy_beside_a_broadcast(pair)) == [
        ("comm", "broadcast", 0, 4_000),
        ("side", "copy", 0, 1_000),
    ]


def test_a_staged_send_meets_copies_from_the_device_only():
    b = ProgramBuilder(2)
    b.collective(0, "send", bytes=20_000, group="0-1")
    b.collective(1, "recv", bytes=20_000, group="0-1")
    b.copy(0, "h2d", bytes=10_000, stream="in")
    b.copy(1, "d2h", bytes=10_000, stream="out")
    timeline = resolve(b.build(), STAGED)
    assert {s.end_ns for s in timeline.spans if s.kind == "memcpy"} == {1_000}
    b.copy(1, "h2d", bytes=10_000, stream="in")
    timeline = resolve(b.build(), STAGED)
    assert rows(timeline, 1) == [
        ("comm:0-1", "recv", 0, 3_000),
        ("in", "copy", 0, 2_000),
        ("out", "copy", 0, 1_000),
    ]


def test_a_copy_in_no_known_direction_is_refused():
    with pytest.raises(ValueError, match="direction is 'up'; expected h2d or d2h"):
        ProgramBuilder().copy(0, "up", bytes=1)
