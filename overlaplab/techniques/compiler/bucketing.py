"""The pass that lets messages travel together: one launch for several.

The plan is data (`plan_merges`), the pass carries it out (`merge`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from overlaplab.operators import dtype_name, tensors_in
from overlaplab.techniques.buckets import size_text
from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    find_dependencies,
    sorted_by,
)
from overlaplab.techniques.compiler.graphs import (
    COALESCED,
    FUNCTIONAL,
    HELD_BEHIND,
    GraphError,
    is_coalesced,
    is_launch,
    operation,
    payload,
    reorder,
    sent_bytes,
)
from overlaplab.techniques.compiler.words import count, time_text

# Of closed buckets, the bytes of an open one and what would come in: does it leave?
Leaves = Callable[[Sequence[Sequence[Node]], int, Node], bool]


@dataclass(frozen=True, slots=True)
class Merge:
    """Collectives that become one.

    Args:
        launches: their names, in the order of readiness.
        bytes: that they send together.
        kind: what they have in common: operation, settings and group, dtype, device.
        delay_ns: how long the first one waits for the last.
        closed_by: why no more came in.
    """

    launches: tuple[str, ...]
    bytes: int
    kind: tuple[str, ...]
    delay_ns: int = 0
    closed_by: str = "the end"

    def __str__(self) -> str:
        return f"{self.what}: {' '.join(self.launches)}"

    def name_of(self, number: int) -> str:
        """How its launch is called if it is the `number`-th of its plan."""
        return f"bucket_{number}" if len(self.launches) > 1 else self.launches[0]

    @property
    def what(self) -> str:
        """What travels, and why no more does."""
        operation, *_, group, dtype, _device = self.kind
        number = len(self.launches)
        made = f"{count(number, 'tensor')} of {dtype}, {size_text(self.bytes)}"
        if self.delay_ns:
            made += f", ready within {time_text(self.delay_ns)}"
        why = "" if self.closed_by == "the end" else f", closed by {self.closed_by}"
        return f"{made}, {operation} on group {group}{why}"


def kind_of(launch: Node) -> tuple[str, ...]:
    """What two collectives must share to be one: settings, group, dtype and device.

    A sum and a maximum, two groups, or two dtypes never share a bucket.
    """
    (tensor, *_) = tensors_in((payload(launch)[0].meta["val"],))
    settings = (str(arg) for arg in launch.args[1:])
    return (
        operation(launch),
        *settings,
        dtype_name(tensor.dtype),
        str(tensor.device),
    )


def plan_merges(
    graph: Graph,
    cap_bytes: int,
    *,
    max_delay_ns: int | None = None,
    node_ns: Callable[[Node], int] | None = None,
) -> list[Merge]:
    """Put collectives of one kind together, in the order in which they are ready.

    Args:
        graph: with a launch for each tensor.
        cap_bytes: of a bucket of more than one; a message is never split.
        max_delay_ns: how long the first of a bucket may wait for its last, in
            computing; None: as long as it takes.
        node_ns: what each operator takes, for `delay_ns`.

    Returns:
        All collectives of the graph, those that travel alone included.

    Raises:
        ValueError: a bound is not positive, or a delay is asked for without `node_ns`.
    """
    if cap_bytes <= 0 or (max_delay_ns is not None and max_delay_ns < 0):
        raise ValueError(
            f"cap_bytes is {cap_bytes} and max_delay_ns {max_delay_ns}; expected "
            "cap_bytes above 0 and max_delay_ns of at least 0"
        )
    if max_delay_ns is not None and node_ns is None:
        raise ValueError("max_delay_ns needs node_ns: what each operator takes")
    dependencies = find_dependencies(graph)
    ready = ready_ns(dependencies, node_ns)
    return merges_up_to(cap_bytes, dependencies, ready, max_delay_ns)


def merges_up_to(
    cap_bytes: int,
    dependencies: Dependencies,
    ready: Mapping[Node, tuple[int, int]],
    max_delay_ns: int | None = None,
    leaves: Leaves | None = None,
) -> list[Merge]:
    """See `plan_merges`; `ready` is of `ready_ns`.

    `leaves` is asked whether a bucket should rather leave than wait for one more: it
    gets the buckets that are closed, the bytes of this one and what would come in.
    """
    sizes = {launch: sent_bytes(launch) for launch in ready}
    joined = _Joined(dependencies)
    open_: dict[Hashable, list[Node]] = {}
    closed: list[list[Node]] = []
    reasons: list[str] = []
    for launch in sorted(ready, key=lambda n: ready[n]):
        key: Hashable = launch if is_coalesced(launch) else kind_of(launch)
        bucket = open_.setdefault(key, [])
        held = sum(sizes[n] for n in bucket)
        reason = ""
        if not bucket:
            pass
        elif held + sizes[launch] > cap_bytes:
            reason = "the cap"
        elif max_delay_ns is not None and (
            ready[launch][0] - ready[bucket[0]][0] > max_delay_ns
        ):
            reason = "the delay"
        elif leaves is not None and leaves(closed, held, launch):
            reason = "a free wire"
        elif not joined.join(bucket[0], launch):
            reason = "a circle"
        if reason:
            closed.append(bucket)
            reasons.append(reason)
            bucket = open_[key] = []
        bucket.append(launch)
    closed += open_.values()
    reasons += ["the end"] * len(open_)
    merges = sorted(zip(closed, reasons, strict=True), key=lambda m: ready[m[0][-1]])
    return [
        merge_of(bucket, ready[bucket[-1]][0] - ready[bucket[0]][0], reason)
        for bucket, reason in merges
    ]


def merge_of(bucket: Sequence[Node], delay_ns: int, closed_by: str) -> Merge:
    """The plan to let some launches travel together; see `Merge`."""
    names = tuple(launch.name for launch in bucket)
    num_bytes = sum(map(sent_bytes, bucket))
    return Merge(names, num_bytes, kind_of(bucket[0]), delay_ns, closed_by)


@graph_pass
def merge(graph: Graph, merges: Sequence[Merge]) -> None:
    """Make one coalesced launch of each merge, with a wait for each tensor.

    It stands where the last of its members stood. Where one of their results was read
    before that, the graph is sorted again, so that the reader stands behind it.

    Raises:
        GraphError: merged collectives are not of one kind, or a merge makes a circle:
            a member needs what another one gives.
    """
    needs = dict(find_dependencies(graph).needs)
    place: dict[Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    merged: dict[Node, Node] = {}
    named = {node.name: node for node in graph.nodes}
    seen: set[str] = set()
    for number, bucket in enumerate(merges):
        for name in bucket.launches:
            if name in seen or name not in named:
                why = "twice" if name in seen else "and this graph does not have it"
                raise GraphError(
                    f"the merges name {name} {why}. Plan the merges of this graph."
                )
            seen.add(name)
        members = [named[name] for name in bucket.launches]
        kinds = {kind_of(launch) for launch in members}
        if len(kinds) > 1:
            raise GraphError(
                f"a merge has collectives of {len(kinds)} kinds: "
                f"{'; '.join(' '.join(kind) for kind in sorted(kinds))}. Only one "
                "operation in one dtype on one group can be one message."
            )
        if len(members) > 1:
            made = list(_merge(graph, members, bucket.name_of(number)))
            merged |= dict.fromkeys(members, made[0])
            place |= dict.fromkeys(made, max(place[member] for member in members))
    _sort_again(graph, needs, merged, place)


def _merge(graph: Graph, members: list[Node], name: str) -> Iterator[Node]:
    """Replace launches by one; yields the nodes that are new."""
    first = members[0]
    target: Any = getattr(FUNCTIONAL, operation(first) + COALESCED).default
    sent = [launch.args[0] for launch in members]
    # At the end for now: the new order is found when all merges are made.
    last = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(last):
        whole = graph.create_node(
            "call_function", target, (sent, *first.args[1:]), name=name
        )
        whole.meta["val"] = [launch.meta["val"] for launch in members]
        held = (name for one in members for name in one.meta.get(HELD_BEHIND, ()))
        whole.meta[HELD_BEHIND] = tuple(dict.fromkeys(held))
        yield whole
        for index, launch in enumerate(members):
            item = graph.create_node(
                "call_function",
                operator.getitem,
                (whole, index),
                name=f"{name}_{index}",
            )
            item.meta["val"] = launch.meta["val"]
            launch.replace_all_uses_with(item)
            yield item
    for launch in members:
        graph.erase_node(launch)


def _sort_again(
    graph: Graph,
    needs: Mapping[Node, Sequence[Node]],
    merged: Mapping[Node, Node],
    place: Mapping[Node, float],
) -> None:
    """Put the nodes where they may stand, as near to their places as can be."""
    found: dict[Node, set[Node]] = {
        node: set(node.all_input_nodes) for node in graph.nodes
    }
    for node, before in needs.items():
        own = merged.get(node, node)
        found[own] |= {merged.get(need, need) for need in before}
    try:
        order = sorted_by({n: tuple(before) for n, before in found.items()}, place)
    except ValueError as circle:
        raise GraphError(
            f"a merge makes a circle: {circle}. A collective that needs the result of "
            "another one cannot travel with it, nor between two that do."
        ) from None
    reorder(graph, order)


class _Joined:
    """Which collectives travel together so far, and what that makes each need."""

    def __init__(self, dependencies: Dependencies) -> None:
        found = [node for node in dependencies.nodes if is_launch(node)]
        before = dependencies.before(found)
        self._bit = {launch: i for i, launch in enumerate(found)}
        self._before = [before[launch] for launch in found]
        self._members = [1 << i for i in range(len(found))]

    def join(self, one: Node, other: Node) -> bool:
        """Let two travel together, with all that travel with them.

        Returns:
            False, and nothing changes, where that makes a circle.
        """
        bits = self._members[self._bit[one]] | self._members[self._bit[other]]
        reached, todo = 0, bits
        while todo:
            i = todo.bit_length() - 1
            todo &= ~(1 << i)
            new = self._before[i] & ~reached
            for k in range(new.bit_length()):
                if new >> k & 1:
                    new |= self._members[k]
            if new & bits:
                return False
            reached |= new
            todo |= new
        for i in range(bits.bit_length()):
            if bits >> i & 1:
                self._members[i] = bits
        return True


def ready_ns(
    dependencies: Dependencies,
    node_ns: Callable[[Node], int] | None,
    launch_ns: Callable[[Node], int] = lambda node: 0,
) -> dict[Node, tuple[int, int]]:
    """When what each launch sends is there: (computing before that, position).

    Wherever the launch itself stands: a person may have put all behind the backward.
    With `launch_ns` the CPU launches operators, one after another.
    """
    now = cpu = 0
    done: dict[Node, tuple[int, int]] = {}
    found: dict[Node, tuple[int, int]] = {}
    for position, node in enumerate(dependencies.nodes):
        last = max((done[n] for n in dependencies.needs[node]), default=(0, -1))
        runs = is_launch(node) or dependencies.facts[node].operator.records
        if is_launch(node):
            found[node] = last
        elif node_ns is not None:
            cpu += launch_ns(node)
            now = max(now, cpu) + node_ns(node)
        done[node] = (now, position) if runs else last
    return found
