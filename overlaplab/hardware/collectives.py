"""What a collective costs alone: alpha-beta, inside a node and over nodes.

[Note: one link] With all ranks on one link, a collective of payload B over n ranks
takes `latency_ns` plus `hop_ns` for each doubling beyond two ranks (a tree of n leaves
is that deep), then its bytes cross each rank's link c(n) B / `bytes_per_s`, where c is
the ring's: 2 (n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter,
all_to_all, gather and scatter, 1 for broadcast, reduce, send and recv, 0 for barrier
(Patarasuk and Yuan 2009; the "bus bandwidth" of nccl-tests, doc/PERFORMANCE.md). So a
reduce-scatter and an all-gather carry what an all-reduce does.

[Note: nodes] Where a group is on several nodes, NCCL lays as many rings through all of
its N ranks as a node has network cards, each ring with its share of the bytes and
leaving the node by another GPU's own card. Pieces follow one another through a ring, so
the slowest part of the way sets the pace. Let k be the number of ranks on that node
which has the fewest. Then the wire takes the longest of

- the link in the node: c(N) B / link.bytes_per_s, where some node has two ranks;
- the network: c(N) B / k / network.bytes_per_s for all_reduce, all_gather,
  reduce_scatter, broadcast and reduce. What goes from one rank to another instead of
  round a ring (all_to_all, gather, scatter) passes that rank's own card, unless it
  stays in the node: (N-k)/N B / network.bytes_per_s. send and recv pass it whole, and
  nothing else;
- if staged through the host (no GPUDirect RDMA): the network's bytes over PCIe at
  `host_bytes_per_s`, which carries one direction down and the other up at once.

Latency: the larger of the two links' `latency_ns` (most of it is starting a collective,
which is done once), plus the hops of the network (doublings of the nodes beyond two)
and of the link (doublings of the ranks on the fullest node). Inside one node all of
this is [Note: one link]. With one rank on each node it is that of the network alone.

It is as NCCL behaves in the large. 8 cards of 25 GB/s a node reach 192 GB/s of bus
bandwidth (NVIDIA/nccl issue 812, DGX A100), 4 reach 91 of 100 (NVIDIA/nccl-tests issue
100).

[Note: where it lies] Left out: NCCL's trees and NVLink SHARP, which beat the ring on
two nodes (NVIDIA/nccl issue 812) and inside an H100 node (NVIDIA/nccl-tests issue 290:
476 GB/s, where rings reached 340 on the machines of `h200-nvlink`); protocols that
change with the size, so a collective of some 100 KiB takes longer than this says
(measure `Link.times`); switches, their depth and their congestion; stragglers; the
host's own memory, which a staged network and 8 GPUs' copies share; and that GPUDirect
RDMA, too, passes the GPU's own PCIe port, where it meets copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlaplab.hardware.cost import NS_PER_S
from overlaplab.hardware.model import Hardware, Link
from overlaplab.hardware.points import interpolate

# Times that the payload crosses one rank's link, as (numerator, denominator) of n.
_CROSSINGS: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1), n),  # a reduce-scatter and an all-gather
    "all_gather": lambda n: (n - 1, n),
    "reduce_scatter": lambda n: (n - 1, n),
    "all_to_all": lambda n: (n - 1, n),  # 1/n of it stays at home
    "gather": lambda n: (n - 1, n),  # what passes the root's link
    "scatter": lambda n: (n - 1, n),
    "broadcast": lambda n: (1, 1),  # pipelined round the ring
    "reduce": lambda n: (1, 1),
    "send": lambda n: (1, 1),
    "recv": lambda n: (1, 1),
    "barrier": lambda n: (0, 1),  # latency only
}
OPERATIONS: tuple[str, ...] = tuple(_CROSSINGS)
POINT_TO_POINT = ("send", "recv")
_PAIRWISE = ("all_to_all", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Placement:
    """How a group lies on the nodes."""

    num_ranks: int  # in all
    num_nodes: int  # with at least one of them
    fewest: int  # ranks on the node that has the fewest
    most: int

    @property
    def uses_link(self) -> bool:
        """Are there two ranks on one node?"""
        return self.most > 1

    @property
    def uses_network(self) -> bool:
        return self.num_nodes > 1


def placement(hw: Hardware, ranks: Sequence[int]) -> Placement:
    """Where `ranks` (global, at least one) are: rank r is on node r // gpus_per_node.

    >>> from overlaplab.hardware import find_hardware
    >>> placement(find_hardware("chalk"), range(12))  # no nodes: one link for all
    Placement(num_ranks=12, num_nodes=1, fewest=12, most=12)
    """
    num = len(ranks)
    if not hw.gpus_per_node:
        return Placement(num, 1, num, num)
    nodes = Counter(rank // hw.gpus_per_node for rank in ranks).values()
    return Placement(num, len(nodes), min(nodes), max(nodes))


def collective_ns(
    hw: Hardware,
    operation: str,
    num_ranks: int,
    bytes: int,
    ranks: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Latency and wire time of one collective alone, once all ranks have arrived.

    The formulas are in this module's [Note: one link] and [Note: nodes].

    Args:
        hw: the profile; its links give alpha and beta.
        operation: one of `OPERATIONS`.
        num_ranks: ranks of the communicator; one rank sends nothing and costs nothing.
        bytes: payload: the full tensor for all_reduce, broadcast and reduce, what one
            rank sends in all for send and all_to_all, the gathered size (ranks times
            shard) for all_gather, reduce_scatter, gather and scatter.
        ranks: the global ranks, which say who shares a node; by default 0 to
            `num_ranks` - 1.

    Returns:
        (latency_ns, wire_ns), the second rounded up.

    Raises:
        ValueError: unknown operation, fewer than one rank, negative bytes, or `ranks`
            that are not `num_ranks` different ones.

    A gigabyte crosses 100 Gbit/s in 80 ms; two ranks all-reduce it in the same time,
    many in nearly twice that:

    >>> from overlaplab.hardware import find_hardware
    >>> ethernet = find_hardware("ethernet-100g")
    >>> collective_ns(ethernet, "send", 2, 10**9)
    (100000, 80000000)
    >>> collective_ns(ethernet, "all_reduce", 2, 10**9)
    (100000, 80000000)
    >>> collective_ns(ethernet, "all_reduce", 4, 10**9)
    (100000, 120000000)
    >>> collective_ns(ethernet, "all_gather", 4, 10**9)
    (100000, 60000000)
    >>> collective_ns(ethernet, "all_reduce", 1, 10**9)
    (0, 0)
    """
    if num_ranks < 1 or bytes < 0:
        raise ValueError(
            f"{operation}: num_ranks is {num_ranks} and bytes {bytes}; expected at "
            "least 1 rank and 0 bytes"
        )
    if ranks is None:
        ranks = range(num_ranks)
    elif len(ranks) != num_ranks or len(set(ranks)) != num_ranks:
        raise ValueError(
            f"{operation}: num_ranks is {num_ranks}, but ranks are {list(ranks)}; "
            "expected as many different global ranks"
        )
    return placed_ns(hw, operation, placement(hw, ranks), bytes)


def crossing_bytes(operation: str, num_ranks: int, bytes: int) -> int:
    """Bytes that cross one rank's link: c(n) B of [Note: one link], rounded up.

    Divided by the time it is the "bus bandwidth" of nccl-tests, which is comparable
    with `Link.bytes_per_s` whatever the operation and the number of ranks.

    Raises:
        ValueError: unknown operation, fewer than one rank, negative bytes.

    >>> crossing_bytes("all_reduce", 4, 100), crossing_bytes("all_gather", 4, 100)
    (150, 75)
    """
    if operation not in _CROSSINGS or num_ranks < 1 or bytes < 0:
        raise ValueError(
            f"crossing_bytes({operation!r}, {num_ranks}, {bytes}): expected one of "
            f"{', '.join(OPERATIONS)}, at least 1 rank and 0 bytes"
        )
    numerator, denominator = _CROSSINGS[operation](num_ranks)
    return -(-bytes * numerator // denominator)


def placed_ns(
    hw: Hardware, operation: str, place: Placement, bytes: int
) -> tuple[int, int]:
    """`collective_ns` for a group of which it is known where it lies.

    Raises:
        ValueError: unknown operation.
    """
    if operation not in _CROSSINGS:
        raise ValueError(
            f"unknown collective {operation!r}; expected one of {', '.join(OPERATIONS)}"
        )
    if place.num_ranks == 1:
        return 0, 0
    numerator, denominator = _CROSSINGS[operation](place.num_ranks)
    crossing = bytes * numerator
    if not place.uses_network:
        latency = hw.link.latency_ns + _hops_ns(hw.link, place.num_ranks)
        return latency, _wire_ns(hw.link, crossing, denominator)
    network = hw.network
    assert network is not None  # there are no nodes without
    start, hops, wire = network.latency_ns, _hops_ns(network, place.num_nodes), 0
    if place.uses_link:
        start = max(start, hw.link.latency_ns)
        hops += _hops_ns(hw.link, place.most)
        wire = _wire_ns(hw.link, crossing, denominator)
    if operation in _PAIRWISE:
        # What stays in the node never meets the card.
        crossing = bytes * (place.num_ranks - place.fewest)
    elif operation not in POINT_TO_POINT:
        denominator *= place.fewest
    wire = max(wire, _wire_ns(network, crossing, denominator))
    if hw.network_staged:
        pcie = -(-crossing * NS_PER_S // (denominator * hw.host_bytes_per_s))
        wire = max(wire, pcie)
    return start + hops, wire


def _hops_ns(link: Link, num: int) -> int:
    """Doublings beyond two: none for 2, one for 3 and 4, two for 5 to 8."""
    return link.hop_ns * max(0, (num - 1).bit_length() - 1)


def _wire_ns(link: Link, crossing: int, denominator: int) -> int:
    """Time of crossing / denominator bytes over one rank's link, rounded up."""
    if link.times and crossing:
        return interpolate(link.times, -(-crossing // denominator))
    return -(-crossing * NS_PER_S // (denominator * link.bytes_per_s))
