"""Programs on nodes: who shares which wire, and what a representative rank pays."""

from dataclasses import replace

import pytest

from overlaplab.hardware import Link, collective_ns, find_hardware
from overlaplab.program import PayloadTensor, ProgramBuilder, resolve
from overlaplab.timeline import Timeline

CHALK = find_hardware("chalk")
# In a node of two 100 bytes a ns, between nodes 10; no latency.
NODES = replace(
    CHALK,
    name="nodes of two",
    link=Link(latency_ns=0, bytes_per_s=100 * 10**9),
    gpus_per_node=2,
    network=Link(latency_ns=0, bytes_per_s=10 * 10**9),
)


def ends(timeline: Timeline, rank: int = 0) -> dict[str, int]:
    return {s.lane: s.end_ns for s in timeline.spans if s.rank == rank}


def rows(timeline: Timeline, rank: int = 0) -> list[tuple[str, str, int, int]]:
    return [
        (s.lane, s.name, s.start_ns, s.end_ns) for s in timeline.spans if s.rank == rank
    ]


def with_groups(*groups: tuple[int, ...]) -> ProgramBuilder:
    """Four ranks; each of `groups` broadcasts 10000 bytes."""
    b = ProgramBuilder(4)
    for ranks in groups:
        for rank in ranks:
            name = "".join(map(str, ranks))
            b.collective(rank, "broadcast", bytes=10_000, group=name, ranks=ranks)
    return b


def test_a_collective_costs_by_where_its_group_lies():
    b = with_groups((0, 1))
    assert ends(resolve(b.build(), NODES)) == {"comm:01": 100}
    b = with_groups((0, 2))
    assert ends(resolve(b.build(), NODES)) == {"comm:02": 1_000}
    b = with_groups((0, 1, 2, 3))
    assert ends(resolve(b.build(), NODES)) == {"comm:0123": 500}


def test_the_link_in_the_node_and_the_network_are_two_wires():
    b = with_groups((0, 1), (2, 3), (0, 2), (1, 3))
    assert ends(resolve(b.build(), NODES)) == {"comm:01": 100, "comm:02": 1_000}


def test_what_goes_over_both_meets_what_goes_over_either():
    # The whole world's (500 alone, over both) halves the pair's 100 until 200.
    b = with_groups((0, 1), (0, 1, 2, 3))
    assert ends(resolve(b.build(), NODES)) == {"comm:01": 200, "comm:0123": 600}


def test_a_send_and_a_receive_of_one_rank_pass_each_other():
    b = ProgramBuilder(2)
    for rank, first, second in ((0, "send", "recv"), (1, "recv", "send")):
        b.collective(rank, first, bytes=10_000, group="0->1")
        b.collective(rank, second, bytes=10_000, group="1->0")
    for hardware, end in ((CHALK, 2_000), (NODES, 100)):
        assert set(ends(resolve(b.build(), hardware)).values()) == {end}


def test_two_sends_of_one_rank_share_its_way_out():
    b = ProgramBuilder(3)
    for peer in (1, 2):
        b.collective(0, "send", bytes=10_000, group=f"0->{peer}", ranks=(0, peer))
        b.collective(peer, "recv", bytes=10_000, group=f"0->{peer}", ranks=(0, peer))
    assert set(ends(resolve(b.build(), CHALK)).values()) == {3_000}


def test_a_representative_pays_by_the_real_ranks_of_each_group():
    hw = find_hardware("h100-nvlink")
    hw = replace(hw, gpus_per_node=8, network=Link(10_000, 48 * 10**9, hop_ns=2_000))
    groups = {
        "world": tuple(range(4096)),
        "node": tuple(range(8)),
        "strided": tuple(range(0, 4096, 8)),
    }
    b = ProgramBuilder(represents=4096)
    for name, ranks in groups.items():
        b.collective(0, "all_reduce", bytes=2**30, group=name, ranks=ranks)
        b.host_wait(0)
    spans = [s for s in resolve(b.build(), hw).spans if s.kind == "communication"]
    alone = {s.lane: s.end_ns - s.start_ns for s in spans}
    for name, ranks in groups.items():
        expected = sum(collective_ns(hw, "all_reduce", len(ranks), 2**30, ranks))
        assert alone[f"comm:{name}"] == expected
    assert alone["comm:node"] < alone["comm:world"] < alone["comm:strided"]


def test_launching_in_the_backward_pass_has_a_cost_of_its_own():
    hw = replace(CHALK, launch_ns=10, backward_launch_ns=3)
    b = ProgramBuilder()
    b.compute(0, "forward", ns=1, phase="forward")
    b.compute(0, "backward", ns=1, phase="backward")
    b.compute(0, "step", ns=1)
    cpu = [row for row in rows(resolve(b.build(), hw)) if row[0] == "cpu"]
    assert cpu == [
        ("cpu", "launch forward", 0, 10),
        ("cpu", "launch backward", 10, 13),
        ("cpu", "launch step", 13, 23),
    ]
    same = replace(hw, backward_launch_ns=None)
    assert [row[3] for row in rows(resolve(b.build(), same)) if row[0] == "cpu"] == [
        10,
        20,
        30,
    ]


@pytest.mark.parametrize(("num_parts", "ns"), [(0, 100), (1, 100), (2, 107), (4, 121)])
def test_each_further_tensor_of_a_coalesced_collective_costs_its_launch(num_parts, ns):
    hw = replace(CHALK, collective_launch_ns=100, collective_part_launch_ns=7)
    parts = [PayloadTensor(bytes=4, dtype="float32", ready=None)] * num_parts
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", payload=parts)
    launch = rows(resolve(b.build(), hw))[0]
    assert launch == ("cpu", "launch all_reduce", 0, ns)
