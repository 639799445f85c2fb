"""What each operator of a program costs alone on given hardware, and what it occupies.

The link between records and `overlaplab.hardware`; who runs beside whom is the business
of `overlaplab.program.rates`.
"""

from __future__ import annotations

from functools import cache, partial

from overlaplab.errors import MismatchError
from overlaplab.hardware import Hardware, compute_ns, host_ns, kernel_kind, memcpy_ns
from overlaplab.hardware.collectives import Placement, placed_ns, placement
from overlaplab.program.graph import Graph, Meeting
from overlaplab.program.record import Collective, Op

# Permille of (the kernel, the wire), beside a collective of default, of high priority.
Speeds = tuple[tuple[int, int], tuple[int, int]]

LINK, NETWORK = 0, 1
OUT, IN = 0, 1  # from the GPU and to it


def port(rank: int, level: int, direction: int) -> int:
    """The number of one direction of one link of one rank; there are four a rank."""
    return rank * 4 + level * 2 + direction


def engine(rank: int, direction: int) -> int:
    """The number of a copy engine; there are two a rank, device to host and back."""
    return rank * 2 + direction


class Costs:
    """Times alone, in nanoseconds; each kind of operator is worked out once.

    Args:
        graph: whose meetings are costed, all at once.
        hw: the profile.

    Attributes:
        meetings: (latency, wire) of each meeting.
        ports: which ports each meeting occupies while it is on the wire, of its
            recorded ranks. A send goes out of one rank and into the other, anything
            else uses both directions.

    Raises:
        MismatchError: ranks meet in one collective with different operations.
    """

    def __init__(self, graph: Graph, hw: Hardware) -> None:
        self._graph = graph
        self._hw = hw
        self._compute_ns = cache(partial(compute_ns, hw))
        self._speeds = cache(partial(_speeds, hw))
        # By communicator, with its ranks.
        self._places: dict[str, tuple[tuple[int, ...], Placement]] = {}
        self.meetings: list[tuple[int, int]] = []
        self.ports: list[tuple[int, ...]] = []
        self.high_priority: list[bool] = []
        for meeting in graph.meetings:
            self._add(meeting)

    def launch_ns(self, op: Op) -> int:
        """CPU time of launching `op`."""
        hw = self._hw
        if op.collective is not None:
            others = max(0, len(op.collective.payload) - 1)
            return hw.collective_launch_ns + others * hw.collective_part_launch_ns
        if op.phase == "backward" and hw.backward_launch_ns is not None:
            return hw.backward_launch_ns
        return hw.launch_ns

    def host_ns(self, op: Op) -> int:
        """CPU time of a "host" operator."""
        return op.duration_ns + host_ns(self._hw, op.read_bytes + op.write_bytes)

    def kernel_ns(self, op: Op) -> int:
        moved = op.read_bytes + op.write_bytes
        return self._compute_ns(op.flops, op.dtype, moved, op.name)

    def speeds(self, op: Op) -> Speeds:
        """How fast the kernels of `op` and a wire are beside one another."""
        return self._speeds(op.name, bool(op.flops))

    def copy_ns(self, op: Op) -> int:
        moved = max(op.read_bytes, op.write_bytes)
        return memcpy_ns(self._hw, moved, pinned=is_pinned(op))

    def _add(self, meeting: Meeting) -> None:
        graph = self._graph
        head = graph.ops[meeting.members[0]]
        first = _collective(head)
        payload = 0
        for g in meeting.members:
            op = graph.ops[g]
            own = _collective(op)
            payload = max(payload, own.bytes)
            pair = {first.operation, own.operation}
            if len(pair) > 1 and pair != {"send", "recv"}:
                raise MismatchError(
                    f"in collective #{meeting.sequence} of process group "
                    f"{meeting.group!r} rank {head.rank} launches {first.operation} "
                    f"and rank {op.rank} {own.operation}; all must launch the same, "
                    "in the same order"
                )
        place = self._place(first)
        self.meetings.append(placed_ns(self._hw, first.operation, place, payload))
        ports: list[int] = []
        for g in meeting.members:
            op = graph.ops[g]
            operation = _collective(op).operation
            directions = {"send": (OUT,), "recv": (IN,)}.get(operation, (OUT, IN))
            levels = [NETWORK] if place.uses_network else [LINK]
            if place.uses_network and place.uses_link and len(directions) == 2:
                levels.append(LINK)
            ports += [port(op.rank, lvl, way) for lvl in levels for way in directions]
        self.ports.append(tuple(ports))
        self.high_priority.append(
            all(_collective(graph.ops[g]).high_priority for g in meeting.members)
        )

    def _place(self, collective: Collective) -> Placement:
        ranks = collective.ranks
        known = self._places.get(collective.group)
        # One communicator hands out one tuple, mostly: comparing takes long for 4096.
        if known is None or (known[0] is not ranks and known[0] != ranks):
            known = self._places[collective.group] = (
                ranks,
                placement(self._hw, ranks),
            )
        return known[1]


def _speeds(hw: Hardware, name: str, has_flops: bool) -> Speeds:
    kind = kernel_kind(name, has_flops)
    low, high = (hw.speeds(kind, high_priority=high) for high in (False, True))
    return low, high


def copy_direction(op: Op) -> int:
    """`IN` or `OUT`, of a "memcpy"; a record that is silent means from the host."""
    return OUT if op.attributes.get("direction") == "d2h" else IN


def is_pinned(op: Op) -> bool:
    """Is the host's side of a "memcpy" page-locked? A record that is silent: yes."""
    return op.attributes.get("pinned") is not False


def _collective(op: Op) -> Collective:
    assert op.collective is not None
    return op.collective
