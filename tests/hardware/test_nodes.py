"""Collectives over nodes: numbers for the head, and laws.

A link of 100 and a network of 10 bytes a ns, nodes of 4 GPUs, PCIe of 5.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.hardware import OPERATIONS, Hardware, Link, collective_ns, find_hardware
from overlaplab.hardware.collectives import Placement, placement

LINK = Link(latency_ns=10, bytes_per_s=100 * 10**9, hop_ns=1)
NETWORK = Link(latency_ns=1_000, bytes_per_s=10 * 10**9, hop_ns=100)
NODES = replace(
    find_hardware("chalk"),
    name="nodes",
    link=LINK,
    gpus_per_node=4,
    network=NETWORK,
    host_bytes_per_s=5 * 10**9,
)
STAGED = replace(NODES, name="staged", network_staged=True)
FLAT_LINK = replace(NODES, name="all on the link", gpus_per_node=0, network=None)
FLAT_NETWORK = replace(FLAT_LINK, name="all on the network", link=NETWORK)

TWO_NODES = range(8)
ONE_EACH = (0, 4, 8, 12)  # one rank a node: strided
UNEVEN = (0, 1, 2, 3, 4)  # four and one
A_NODE = (4, 5, 6, 7)


def test_placement_counts_the_ranks_of_a_group_node_by_node():
    assert placement(NODES, TWO_NODES) == Placement(8, 2, 4, 4)
    assert placement(NODES, ONE_EACH) == Placement(4, 4, 1, 1)
    assert placement(NODES, UNEVEN) == Placement(5, 2, 1, 4)
    assert placement(NODES, A_NODE) == Placement(4, 1, 4, 4)
    assert placement(NODES, (3, 4)) == Placement(2, 2, 1, 1)


@pytest.mark.parametrize(
    ("operation", "ranks", "expected"),
    [
        # In a node: the link's 10 + one doubling, bytes x 2 x 3/4 / 100.
        ("all_reduce", A_NODE, (11, 1_200)),
        # Two nodes of 4: the network's 1000 and the link's hop. The link would need
        # 80000 x 2 x 7/8 / 100 = 1400; each card has a quarter of it: 35000 / 10.
        ("all_reduce", TWO_NODES, (1_001, 3_500)),
        ("all_gather", TWO_NODES, (1_001, 1_750)),
        ("reduce_scatter", TWO_NODES, (1_001, 1_750)),
        ("broadcast", TWO_NODES, (1_001, 2_000)),
        ("reduce", TWO_NODES, (1_001, 2_000)),
        # Each rank sends half of its bytes to the other node, by its own card.
        ("all_to_all", TWO_NODES, (1_001, 4_000)),
        ("gather", TWO_NODES, (1_001, 4_000)),
        ("scatter", TWO_NODES, (1_001, 4_000)),
        ("barrier", TWO_NODES, (1_001, 0)),
        # One rank a node: its own card only, and 4 nodes are one doubling.
        ("all_reduce", ONE_EACH, (1_100, 12_000)),
        ("all_to_all", ONE_EACH, (1_100, 6_000)),
        ("barrier", ONE_EACH, (1_100, 0)),
        # Four and one: all goes through the one's card: 80000 x 2 x 4/5 / 10.
        ("all_reduce", UNEVEN, (1_001, 12_800)),
        # The one sends 4/5 of its bytes to the other node.
        ("all_to_all", UNEVEN, (1_001, 6_400)),
        ("send", (3, 4), (1_000, 8_000)),
        ("recv", (3, 4), (1_000, 8_000)),
        ("send", (4, 5), (10, 800)),
    ],
)
def test_eighty_kilobytes(operation, ranks, expected):
    assert collective_ns(NODES, operation, len(ranks), 80_000, ranks) == expected


def test_staged_bytes_cross_pcie_where_that_is_the_slowest_of_the_way():
    # PCIe has half of the network's bandwidth; nothing of a node's own goes there.
    for operation, twice in (("all_reduce", 7_000), ("all_to_all", 8_000)):
        assert collective_ns(STAGED, operation, 8, 80_000)[1] == twice
    assert collective_ns(STAGED, "all_reduce", 4, 80_000)[1] == 1_200
    fast = replace(STAGED, host_bytes_per_s=10**12)
    assert collective_ns(fast, "all_reduce", 8, 80_000)[1] == 3_500


def test_without_ranks_the_first_ones_are_meant():
    for num_ranks in (4, 5, 8, 13):
        assert collective_ns(NODES, "all_reduce", num_ranks, 999) == collective_ns(
            NODES, "all_reduce", num_ranks, 999, range(num_ranks)
        )


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 1)])
def test_ranks_that_are_not_as_many_different_ones_are_refused(ranks):
    with pytest.raises(ValueError, match=r"num_ranks is 3, but ranks are \[0, 1"):
        collective_ns(NODES, "all_reduce", 3, 1, ranks)


def test_each_doubling_beyond_two_ranks_costs_a_hop():
    latencies = [
        collective_ns(FLAT_LINK, "barrier", n, 0)[0] for n in (2, 3, 4, 5, 8, 9, 4096)
    ]
    assert latencies == [10, 11, 11, 12, 12, 13, 21]


def test_measured_points_of_a_link_stand_instead_of_its_bandwidth():
    curve = ((1_000, 500), (11_000, 600))
    measured = replace(NODES, link=replace(LINK, times=curve))
    # An all-reduce over 4 ranks puts 3/2 of its bytes on each link.
    wires = [
        collective_ns(measured, "all_reduce", 4, bytes)[1]
        for bytes in (0, 1, 667, 4_000, 44_000)
    ]
    assert wires == [0, 500, 501, 550, 3_600]


groups = st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True)
sizes = st.integers(0, 10**12)
operations = st.sampled_from(OPERATIONS)
hardwares = st.builds(
    lambda link, network, pcie, staged: replace(
        NODES,
        link=replace(LINK, bytes_per_s=max(link, network)),
        network=replace(NETWORK, bytes_per_s=min(link, network)),
        host_bytes_per_s=pcie,
        network_staged=staged,
    ),
    st.integers(1, 10**12),
    st.integers(1, 10**12),
    st.integers(1, 10**12),
    st.booleans(),
)


def flat(hw: Hardware, link: Link | None) -> Hardware:
    assert link is not None
    return replace(hw, link=link, gpus_per_node=0, network=None, network_staged=False)


@given(hardwares, operations, groups, sizes)
def test_more_bytes_never_take_less_time(hw, operation, ranks, bytes):
    one = collective_ns(hw, operation, len(ranks), bytes, ranks)
    more = collective_ns(hw, operation, len(ranks), bytes + 1, ranks)
    assert one[0] == more[0] and one[1] <= more[1]


@given(hardwares, operations, st.integers(1, 40), st.integers(1, 40), sizes)
def test_more_whole_nodes_never_take_less_time(hw, operation, few, more, bytes):
    few, more = sorted((few, more))
    one = collective_ns(hw, operation, 4 * few, bytes)
    other = collective_ns(hw, operation, 4 * more, bytes)
    assert one[0] <= other[0] and one[1] <= other[1]


@given(hardwares, operations, groups, sizes)
def test_nodes_are_between_all_on_the_faster_and_all_on_the_slower_link(
    hw, operation, ranks, bytes
):
    hw = replace(hw, network_staged=False)
    wire = collective_ns(hw, operation, len(ranks), bytes, ranks)[1]
    least = collective_ns(flat(hw, hw.link), operation, len(ranks), bytes)[1]
    most = collective_ns(flat(hw, hw.network), operation, len(ranks), bytes)[1]
    assert least <= wire <= most


@given(hardwares, groups, sizes)
def test_a_reduce_scatter_and_an_all_gather_carry_what_an_all_reduce_does(
    hw, ranks, bytes
):
    def wire(operation: str) -> int:
        return collective_ns(hw, operation, len(ranks), bytes, ranks)[1]

    # Two are rounded up, where one is.
    assert 0 <= wire("reduce_scatter") + wire("all_gather") - wire("all_reduce") <= 1


@given(hardwares, operations, st.integers(0, 4), st.integers(1, 4), sizes)
def test_a_group_inside_one_node_does_not_know_of_the_network(
    hw, operation, node, num_ranks, bytes
):
    ranks = [4 * node + place for place in range(num_ranks)]
    assert collective_ns(hw, operation, num_ranks, bytes, ranks) == collective_ns(
        flat(hw, hw.link), operation, num_ranks, bytes
    )


@given(hardwares, operations, groups, sizes)
def test_gpudirect_is_never_slower_than_staging(hw, operation, ranks, bytes):
    direct = collective_ns(
        replace(hw, network_staged=False), operation, len(ranks), bytes, ranks
    )
    staged = collective_ns(
        replace(hw, network_staged=True), operation, len(ranks), bytes, ranks
    )
    assert direct[0] == staged[0] and direct[1] <= staged[1]


@given(hardwares, operations, groups, sizes)
def test_the_order_of_the_ranks_does_not_matter(hw, operation, ranks, bytes):
    assert collective_ns(hw, operation, len(ranks), bytes, ranks) == collective_ns(
        hw, operation, len(ranks), bytes, sorted(ranks)
    )
