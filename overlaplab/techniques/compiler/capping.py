"""How large a bucket may be where nobody said: what a step takes with each cap.

A message costs the CPU a launch. Where launches set the pace fewer messages are better;
where the wire does, smaller ones, which leave earlier. The estimate has three clocks,
each of which does one thing after another: the CPU launches, the stream computes, the
wire sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from overlaplab.techniques.buckets import default_cap_bytes, size_text
from overlaplab.techniques.compiler.bucketing import Merge, merges_up_to, ready_ns
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    find_dependencies,
)
from overlaplab.techniques.compiler.graphs import is_launch, sent_bytes
from overlaplab.techniques.compiler.words import count, time_text

# What GPUs confirmed stays unless fewer messages promise more than formulas are off.
# More than it sends nobody is given: in a profile launches are often too cheap.
_WORTH_PERMILLE = 970
_TRIED = (1, 0.25, 0.5, 2, 4, 8)  # of the usual cap


@dataclass(frozen=True, slots=True)
class Cap:
    """A cap, and what a step would take with it.

    Args:
        bytes: of a bucket of more than one tensor.
        num_messages: that are sent.
        step_ns: when all is over, launches included.
    """

    bytes: int
    num_messages: int
    step_ns: int

    def __str__(self) -> str:
        return (
            f"{count(self.num_messages, 'message')} of up to {size_text(self.bytes)}: "
            f"{time_text(self.step_ns)}"
        )


def plan_cap(
    graph: Graph,
    costs: Costs,
    *,
    limit_bytes: int | None = None,
    max_delay_ns: int | None = None,
) -> list[Cap]:
    """The caps that were tried, the chosen one first.

    It is `default_cap_bytes`, or a larger one where launches are expensive.

    Args:
        graph: with a message for each tensor.
        costs: of its nodes.
        limit_bytes: that no bucket may be larger than; None: no limit.
        max_delay_ns: as in `plan_merges`.
    """
    dependencies = find_dependencies(graph)
    ready = ready_ns(dependencies, costs)
    usual, tried = default_cap_bytes(sum(map(sent_bytes, ready))), {}
    for part in _TRIED:
        cap = max(1, int(usual * part))
        bound = cap if limit_bytes is None else min(cap, limit_bytes)
        merges = merges_up_to(bound, dependencies, ready, max_delay_ns)
        if len(merges) not in tried:
            step_ns = estimate_ns(merges, dependencies, ready, costs)
            tried[len(merges)] = Cap(cap, len(merges), step_ns)
    first, *others = tried.values()
    best = min(
        (c for c in others if c.num_messages < first.num_messages),
        key=lambda c: c.step_ns,
        default=first,
    )
    if best.step_ns * 1000 > first.step_ns * _WORTH_PERMILLE:
        best = first
    return sorted(tried.values(), key=lambda c: (c is not best, c.num_messages))


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
        if not is_launch(node) and dependencies.facts[node].operator.records:
            cpu += costs.hardware.launch_ns
            ends = (end for bits, end in sent if before[node] & bits)
            stream = max(cpu, stream, *ends) + costs(node)
        for merge in leaving.get(position, ()):
            cpu += costs.message_launch_ns(len(merge.launches))
            alone = costs.message_ns(of_name[merge.launches[0]], merge.bytes)
            wire = max(cpu, stream, wire) + alone
            sent.append((sum(bit[name] for name in merge.launches), wire))
    return max(stream, wire)
