"""The numbers of a timeline: what was computed, sent, hidden, exposed and saved.

Knows spans and intervals; no causes, no hardware, no units other than nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from overlaplab.timeline.intervals import Interval, intersect, merge, total
from overlaplab.timeline.span import KINDS, Span


@dataclass(frozen=True, slots=True)
class Report:
    """The numbers of one rank, or of a whole run. Every definition is here.

    Per rank (a rank is one device). A *union* is the time in which at least one span
    of the kind runs, on whatever lane; two kernels side by side count once.

    - `step_ns`: from the first start to the last end over all lanes, CPU included.
    - `compute_ns`: union of the compute spans. `memcpy_ns` and `memset_ns` are unions
      of kinds of their own: neither compute nor communication.
    - `communication_ns`: union of the communication spans. A collective's kernel that
      spins until its peers arrive is communication too; `waiting_ns` is the union of
      those parts, [start, ready_ns), where the spans know ready_ns.
    - `hidden_ns`: communication with computation beside it, the intersection of the two
      unions. `exposed_ns` = communication - hidden. Communication beside a memcpy or
      an idle device is exposed.
    - `serial_ns` = compute + communication: the step if nothing overlapped and
      nothing else took time.
    - `bound_ns` = max(compute, communication): no schedule of these two is shorter.
    - `saved_ns` = serial - step = hidden - the time in which neither runs; negative
      where launches, copies or idle time cost more than overlap gave. It compares with
      the serial of *this run*: where two kernels slow each other down both sums have
      grown, so one timeline cannot show what contention costs. Put the times of each
      alone beside it.

    Three ratios that people mix up; each is None where its denominator is 0:

    - `overlap_fraction` = hidden / communication (HTA's). Hidden is not saved: it is
      highest where the two slow each other down most.
    - `saved_fraction` = saved / communication.
    - `efficiency` = saved / (serial - bound): of what overlap could save, the share
      that it did.

    For a whole run each number is that of the slowest rank (longest step, the lowest
    rank among equals): adding ranks up would compare the work of many with the clock
    of one. `ranks` has each rank's own report.

    Args:
        rank: whose numbers; for a whole run, the slowest rank. -1 if there is none.
        start_ns, end_ns: first start and last end.
        ranks: of a whole run, one report for each rank that has spans, ascending;
            empty in a rank's own report.
    """

    rank: int
    start_ns: int
    end_ns: int
    compute_ns: int
    communication_ns: int
    hidden_ns: int
    waiting_ns: int
    memcpy_ns: int
    memset_ns: int
    ranks: tuple[Report, ...] = ()

    @property
    def step_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def exposed_ns(self) -> int:
        return self.communication_ns - self.hidden_ns

    @property
    def serial_ns(self) -> int:
        return self.compute_ns + self.communication_ns

    @property
    def bound_ns(self) -> int:
        return max(self.compute_ns, self.communication_ns)

    @property
    def saved_ns(self) -> int:
        return self.serial_ns - self.step_ns

    @property
    def overlap_fraction(self) -> float | None:
        return _ratio(self.hidden_ns, self.communication_ns)

    @property
    def saved_fraction(self) -> float | None:
        return _ratio(self.saved_ns, self.communication_ns)

    @property
    def efficiency(self) -> float | None:
        return _ratio(self.saved_ns, self.serial_ns - self.bound_ns)


def report(spans: Iterable[Span]) -> Report:
    """See `Report`, which defines every number."""
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    ranks = tuple(_report_rank(rank, by_rank[rank]) for rank in sorted(by_rank))
    if not ranks:
        return Report(-1, 0, 0, 0, 0, 0, 0, 0, 0)
    return replace(max(ranks, key=lambda r: r.step_ns), ranks=ranks)


def union(spans: Sequence[Span], kind: str) -> list[Interval]:
    """When at least one span of `kind` runs."""
    return merge((s.start_ns, s.end_ns) for s in spans if s.kind == kind)


def _report_rank(rank: int, spans: Sequence[Span]) -> Report:
    of_kind: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for span in spans:
        of_kind[span.kind].append(span)
    compute = union(of_kind["compute"], "compute")
    communication = union(of_kind["communication"], "communication")
    waiting = merge(
        (s.start_ns, min(s.attributes["ready_ns"], s.end_ns))
        for s in of_kind["communication"]
        if "ready_ns" in s.attributes
    )
    return Report(
        rank=rank,
        start_ns=min(s.start_ns for s in spans),
        end_ns=max(s.end_ns for s in spans),
        compute_ns=total(compute),
        communication_ns=total(communication),
        hidden_ns=total(intersect(compute, communication)),
        waiting_ns=total(waiting),
        memcpy_ns=total(union(of_kind["memcpy"], "memcpy")),
        memset_ns=total(union(of_kind["memset"], "memset")),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
