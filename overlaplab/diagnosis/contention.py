"""What computation pays for communication beside it: the same kernel, alone and not.

[Note: twins] A kernel's twins have its name, kernel and grid, and neighbours of the
same names before and after it: one name serves matrices of many shapes, but the same
place in another layer has the same one. Where durations still differ by a factor of 2
from one twin to the next, a new class begins. A kernel is "alone" if no communication
runs in any of its time, and "beside" if some does in half of it or more; what lies
between counts in the cost only. A virtual run needs no twins: its spans know
"alone_ns".

Twins are of the same steps, so what communication costs all kernels (a card at its
power cap lowers its clock) is not in the ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from overlaplab.diagnosis.lookup import Lookup
from overlaplab.diagnosis.steps import Step
from overlaplab.timeline import Span
from overlaplab.timeline.intervals import Interval, intersect, merge, total

CLASS_FACTOR = 2
FEWEST = 3  # of each, for a median that means something


@dataclass(frozen=True, slots=True)
class Twins:
    """The same kernel alone and beside communication, on one rank."""

    rank: int
    name: str  # of the operator
    kernel: str  # of the kernel, "" where only the operator is known
    alone_ns: int  # the median
    num_alone: int
    beside_ns: int  # the median
    num_beside: int
    # what all those beside took more than the median alone, over all steps; negative
    # where they took less
    cost_ns: int

    @property
    def ratio(self) -> float:
        return self.beside_ns / self.alone_ns if self.alone_ns else 1.0


@dataclass(frozen=True, slots=True)
class Contention:
    """Of one rank's step."""

    beside_ns: int = 0  # time of the kernels that ran beside communication
    compared_ns: int = 0  # of those, what has twins that ran alone
    cost_ns: int = 0  # what the compared ones took more than alone; 0 at least


def contention_of(
    lookup: Lookup, steps: Sequence[Step]
) -> tuple[tuple[Twins, ...], dict[tuple[int, int | None], Contention]]:
    """Twins, the costliest first, and by (rank, step) what contention cost."""
    twins: list[Twins] = []
    alone_ns: dict[int, int] = {}  # of each compared span beside communication
    beside: dict[tuple[int, int | None], list[int]] = {}
    for rank in lookup.ranks:
        own = [step for step in steps if step.rank == rank]
        shares = {
            index: share for step in own for index, share in _shares(lookup, step)
        }
        for step in own:
            beside[rank, step.step] = [i for i in step.compute if shares.get(i)]
        for group in _classes(lookup, own, shares):
            found = _compare(lookup, group, shares, alone_ns)
            if found is not None:
                twins.append(found)
    costs = {key: _cost(lookup, indices, alone_ns) for key, indices in beside.items()}
    return tuple(sorted(twins, key=lambda t: -t.cost_ns)), costs


def _shares(lookup: Lookup, step: Step) -> Iterator[tuple[int, float]]:
    """Of each compute span, the part of its time beside communication."""
    sending = merge(
        (s.start_ns, s.end_ns)
        for s in (lookup.spans[i] for i in lookup.device(step.rank))
        if s.kind == "communication"
        and s.start_ns < step.end_ns
        and s.end_ns > step.start_ns
    )
    first = 0
    for index in step.compute:  # ascending starts
        span = lookup.spans[index]
        while first < len(sending) and sending[first][1] <= span.start_ns:
            first += 1
        near: list[Interval] = []
        for interval in sending[first:]:
            if interval[0] >= span.end_ns:
                break
            near.append(interval)
        if span.duration_ns:
            both = total(intersect([(span.start_ns, span.end_ns)], near))
            yield index, both / span.duration_ns


def _classes(
    lookup: Lookup, steps: Sequence[Step], known: Mapping[int, float]
) -> Iterator[list[int]]:
    """Twins, alone and beside together; see [Note: twins]."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for step in steps:
        keys = [_key(lookup.spans[i]) for i in step.compute]
        for place, index in enumerate(step.compute):
            if index in known:
                around = keys[max(0, place - 1) : place + 2]
                groups[keys[place], *around].append(index)
    for group in groups.values():
        group.sort(key=lambda i: lookup.spans[i].duration_ns)
        cut = 0
        for place in range(1, len(group)):
            shorter, longer = (lookup.spans[i] for i in group[place - 1 : place + 1])
            if longer.duration_ns > CLASS_FACTOR * shorter.duration_ns:
                yield group[cut:place]
                cut = place
        yield group[cut:]


def _key(span: Span) -> tuple[str, str, str]:
    attributes = span.attributes
    return span.name, str(attributes.get("kernel")), str(attributes.get("grid"))


def _compare(
    lookup: Lookup,
    group: Sequence[int],
    shares: dict[int, float],
    alone_ns: dict[int, int],
) -> Twins | None:
    spans = {i: lookup.spans[i] for i in group}
    touched = [i for i in group if shares[i]]
    beside = [i for i in touched if shares[i] >= 0.5] or touched
    alone = [i for i in group if shares[i] == 0.0]
    known_ns = {i: s.attributes.get("alone_ns") for i, s in spans.items()}
    stated = {i: ns for i, ns in known_ns.items() if ns is not None}
    if touched and all(i in stated for i in touched):
        known = [stated[i] for i in touched]
        alone_ns.update((i, stated[i]) for i in touched)
    elif min(len(alone), len(beside)) >= FEWEST:
        known = [spans[i].duration_ns for i in alone]
        alone_ns.update(dict.fromkeys(touched, round(median(known))))
    else:
        return None
    first = spans[group[0]]
    return Twins(
        rank=first.rank,
        name=first.name,
        kernel=str(first.attributes.get("kernel", "")),
        alone_ns=round(median(known)),
        num_alone=len(known),
        beside_ns=round(median(spans[i].duration_ns for i in beside)),
        num_beside=len(beside),
        cost_ns=sum(spans[i].duration_ns - alone_ns[i] for i in touched),
    )


def _cost(
    lookup: Lookup, beside: Sequence[int], alone_ns: dict[int, int]
) -> Contention:
    compared = [i for i in beside if i in alone_ns]
    more = sum(lookup.spans[i].duration_ns - alone_ns[i] for i in compared)
    return Contention(
        beside_ns=sum(lookup.spans[i].duration_ns for i in beside),
        compared_ns=sum(lookup.spans[i].duration_ns for i in compared),
        cost_ns=max(0, more),
    )
