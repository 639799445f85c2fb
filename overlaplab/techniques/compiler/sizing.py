"""How large messages are where nobody said: what a step takes with each way tried.

[Note: a free wire] No step ends before its first gradient is there and the wire has
carried all of them. Where the wire is slow it should start with the first gradient and
never be idle, in as few messages as that takes: each leaves with the last gradient that
is ready before the wire is free. So the first is small, and each holds what was
computed while the wire carried the one before. A fast wire is free all the time, and
that would be a message for each gradient: each has a least size.

A message costs the CPU a launch. The estimate has three clocks, each of which does one
thing after another: the CPU launches, the stream computes, the wire sends.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from overlaplab.hardware import Hardware
from overlaplab.techniques.buckets import default_cap_bytes, size_text
from overlaplab.techniques.compiler.bucketing import Merge, merges_up_to, ready_ns
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    find_dependencies,
)
from overlaplab.techniques.compiler.graphs import is_launch, sent_bytes
from overlaplab.techniques.compiler.words import count, time_text

# What GPUs confirmed stays unless another way promises more than formulas are off, and
# does so on a slow CPU as well: in a profile launches are often too cheap. On the CPU
# beside two H200 they took as long as here (overlaplab/bench/results/README.md).
_WORTH = 0.97
SLOW_LAUNCH_NS, SLOW_COLLECTIVE_NS = 50_000, 220_000
_TRIED = (0.25, 0.5, 1, 2, 4, 8)  # least sizes, as parts of the usual cap
# The wire is taken to be free after this part of its time: a message that is ready
# early waits for it, which costs nothing, and one that is late leaves it idle.
_SOONER = 0.8


@dataclass(frozen=True, slots=True)
class Sizes:
    """A way to cut gradients into messages, and what a step would take with it.

    Args:
        bytes: of a message of more than one tensor, at most or at least.
        is_least: at least, see [Note: a free wire].
        merges: the messages.
        step_ns: when all is over, launches included.
        slow_ns: the same where the CPU launches slowly.
    """

    bytes: int
    is_least: bool
    merges: tuple[Merge, ...]
    step_ns: int
    slow_ns: int

    @property
    def num_messages(self) -> int:
        """How many are sent."""
        return len(self.merges)

    def share_of(self, usual: Sizes) -> float:
        """Of the time that `usual` takes, on a slow CPU if that is more."""
        return max(
            self.step_ns / max(1, usual.step_ns), self.slow_ns / max(1, usual.slow_ns)
        )

    def __str__(self) -> str:
        size = size_text(self.bytes)
        bound = f"at least {size}, when the wire is free" if self.is_least else ""
        return (
            f"{count(self.num_messages, 'message')} of {bound or f'up to {size}'}: "
            f"{time_text(self.step_ns)}, on a slow CPU {time_text(self.slow_ns)}"
        )


def plan_sizes(
    graph: Graph,
    costs: Costs,
    *,
    limit_bytes: int | None = None,
    max_delay_ns: int | None = None,
) -> list[Sizes]:
    """The ways that were tried, the chosen one first.

    Messages are of up to `default_cap_bytes`, or leave when the wire is free if that
    ends sooner: see [Note: a free wire].

    Args:
        graph: with a message for each tensor.
        costs: of its nodes.
        limit_bytes: that no bucket may be larger than; None: no limit.
        max_delay_ns: as in `plan_merges`.
    """
    dependencies = find_dependencies(graph)
    ready = ready_ns(dependencies, costs)
    usual = default_cap_bytes(sum(map(sent_bytes, ready)))
    most = limit_bytes or sys.maxsize
    slow = costs.on(_slowed(costs.hardware))
    at = ready_ns(dependencies, costs, costs.launch_ns)
    tried: dict[tuple[tuple[str, ...], ...], Sizes] = {}
    for part in (None, *_TRIED):
        size = min(most, usual if part is None else max(1, int(usual * part)))
        cap = size if part is None else most
        leaves = None if part is None else _Wire(at, costs, size)
        merges = merges_up_to(cap, dependencies, ready, max_delay_ns, leaves)
        same = tuple(merge.launches for merge in merges)
        if same not in tried:
            step_ns, slow_ns = (
                estimate_ns(merges, dependencies, ready, on) for on in (costs, slow)
            )
            tried[same] = Sizes(size, part is not None, tuple(merges), step_ns, slow_ns)
    first, *others = tried.values()
    best = min(others, key=lambda other: other.share_of(first), default=first)
    if best.share_of(first) > _WORTH:
        best = first
    return sorted(tried.values(), key=lambda s: (s is not best, s.num_messages))


def _slowed(hw: Hardware) -> Hardware:
    """The same machine with a slow CPU."""
    return replace(
        hw,
        launch_ns=max(hw.launch_ns, SLOW_LAUNCH_NS),
        collective_launch_ns=max(hw.collective_launch_ns, SLOW_COLLECTIVE_NS),
    )


class _Wire:
    """Whether what is ready should leave; see [Note: a free wire]."""

    def __init__(
        self, at: Mapping[Node, tuple[int, int]], costs: Costs, least_bytes: int
    ) -> None:
        self._at = at
        self._costs = costs
        self._least_bytes = least_bytes
        self._num_sent = 0
        self._free_ns = 0

    def __call__(
        self, closed: Sequence[Sequence[Node]], num_bytes: int, following: Node
    ) -> bool:
        for bucket in closed[self._num_sent :]:
            self._send(bucket)
        self._num_sent = len(closed)
        return num_bytes >= self._least_bytes and self._at[following][0] > self._free_ns

    def _send(self, bucket: Sequence[Node]) -> None:
        leaves_ns = max(self._at[launch][0] for launch in bucket)
        leaves_ns += self._costs.message_launch_ns(len(bucket))
        alone = self._costs.message_ns(bucket[0], sum(map(sent_bytes, bucket)))
        self._free_ns = max(self._free_ns, leaves_ns) + int(_SOONER * alone)


def estimate_ns(
    merges: Sequence[Merge],
    dependencies: Dependencies,
    ready: Mapping[Node, tuple[int, int]],
    costs: Costs,
) -> int:
    """When all is over if each message leaves when it is ready; nothing slows another.

    Args:
        merges: all messages.
        dependencies: of the graph.
        ready: of each of its launches, of `ready_ns`.
        costs: of its nodes.
    """
    bit = {launch.name: 1 << i for i, launch in enumerate(ready)}
    of_name = {launch.name: launch for launch in ready}
    before = dependencies.before(ready)
    leaving: dict[int, list[Merge]] = {}
    for merge in merges:
        last = max(ready[of_name[name]][1] for name in merge.launches)
        leaving.setdefault(max(0, last), []).append(merge)
    cpu = stream = wire = 0
    sent: list[tuple[int, int]] = []  # which launches, when they are over
    for position, node in enumerate(dependencies.nodes):
        if not is_launch(node) and costs.facts(node).operator.records:
            cpu += costs.launch_ns(node)
            ends = (end for bits, end in sent if before[node] & bits)
            stream = max(cpu, stream, *ends) + costs(node)
        for merge in leaving.get(position, ()):
            cpu += costs.message_launch_ns(len(merge.launches))
            alone = costs.message_ns(of_name[merge.launches[0]], merge.bytes)
            wire = max(cpu, stream, wire) + alone
            sent.append((sum(bit[name] for name in merge.launches), wire))
    return max(stream, wire)
