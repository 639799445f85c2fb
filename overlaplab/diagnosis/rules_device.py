"""What else a step loses: the CPU, peers, copies, contention, a slow link.

As in `rules_overlap`, each rule looks at one step of one rank, yields at most one
finding, and none where the cost is small.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from overlaplab.diagnosis.account import Stretch
from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.findings import REMEDIES, Finding, finding
from overlaplab.diagnosis.lookup import COPIES
from overlaplab.diagnosis.rules_link import low_bandwidth
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import (
    is_16_bit,
    of_whole,
    short,
)
from overlaplab.errors import plural
from overlaplab.timeline import Span
from overlaplab.timeline.intervals import intersect, total
from overlaplab.view.units import format_ns

_LOADING = ("load ", "next batch")  # of a trace, of the virtual cluster
LEAST_WAITING = 0.01  # of a step: two cards are never equal
MOSTLY = 0.6  # of the waiting: who is last in less of it is last by chance


def device_rules(case: Case, step: Step) -> Iterator[Finding]:
    """What a rank's step loses to its CPU, its peers, copies, contention, the link."""
    yield from _launch_bound(case, step)
    yield from _cpu_elsewhere(case, step)
    yield from _host_sync(case, step)
    yield from _straggler(case, step)
    yield from _memcpy(case, step)
    yield from _contention(case, step)
    yield from low_bandwidth(case, step)


def _launch_bound(case: Case, step: Step) -> Iterator[Finding]:
    idle_ns, beside_ns = step.parts["idle_cpu"], step.parts["sending_cpu"]
    cost_ns = idle_ns + beside_ns
    # Filling an empty pipeline costs one launch in every run that is looked at alone.
    stretches = [p for p in step.stretches if p.entry in ("idle_cpu", "sending_cpu")]
    if len(stretches) < 2 or not step.worth_reporting(cost_ns):
        return
    spans = case.lookup.spans
    kernels = [spans[i].duration_ns for i in step.compute]
    starts = [
        launch[0] for i in step.compute if (launch := case.lookup.launch(i)) is not None
    ]
    starts.sort()
    apart = [b - a for a, b in pairwise(starts)]
    pace_ns = round(median(apart)) if apart else 0
    kernel_ns = round(median(kernels)) if kernels else 0
    caveat = ""
    if case.timeline.origin != "virtual":
        caveat = (
            " The profiler costs the CPU some microseconds an operator: see how long "
            "the step takes without it."
        )
    longest = _longest(stretches)[0]
    gap = ""
    if longest.span is not None and 5 * longest.duration_ns >= cost_ns:
        what = spans[longest.span]
        where = "during" if longest.entry == "sending_cpu" else "before"
        gap = f" The longest gap, {format_ns(longest.duration_ns)}, is {where} "
        gap += f"{short(what.name)}."
    besides = f" (and {format_ns(beside_ns)} with only communication)"
    yield finding(
        "launch-bound",
        step,
        cost_ns,
        says=(
            f"The CPU launches too slowly: for {of_whole(idle_ns, step.step_ns)} the "
            f"device was idle{besides if beside_ns else ''} because the next kernel "
            f"was not launched. Median: a launch every {format_ns(pace_ns)}, a kernel "
            f"takes {format_ns(kernel_ns)}.{gap}{caveat}"
        ),
        idle_ns=idle_ns,
        beside_communication_ns=beside_ns,
        num_gaps=len(stretches),
        longest_gap_ns=longest.duration_ns,
        num_kernels=len(kernels),
        between_launches_ns=pace_ns,
        kernel_ns=kernel_ns,
        spans=(p.span for p in _longest(stretches)),
    )


def _cpu_elsewhere(case: Case, step: Step) -> Iterator[Finding]:
    """The CPU did something else than launching: it loaded a batch, or nobody knows."""
    gaps = [p for p in step.stretches if p.entry == "idle_host"]
    cost_ns = sum(p.duration_ns for p in gaps)
    if not step.worth_reporting(cost_ns):
        return
    idle = [(p.start_ns, p.end_ns) for p in gaps]
    works: Counter[str] = Counter()
    for work in case.lookup.works(step.rank):
        both = intersect(idle, [(work.start_ns, work.end_ns)])
        if both:
            works[work.name] += total(both)
    loading_ns = sum(ns for name, ns in works.items() if name.startswith(_LOADING))
    is_input = 2 * loading_ns >= cost_ns
    what = ", ".join(
        f"{short(name.removeprefix('load '))} {format_ns(ns)}"
        for name, ns in works.most_common(3)
    )
    if is_input:
        how = f"The CPU loads a batch ({what}), and the device waits for it"
    elif 2 * sum(works.values()) >= cost_ns:
        how = f"The CPU computes by itself ({what}), and the device waits for it"
    else:
        how = "The CPU launches nothing, and the trace does not say what it does"
    gap = _longest(gaps)[0]
    where = ""
    if gap.span is not None:
        next_one = short(case.lookup.spans[gap.span].name)
        where = f"; the longest gap, {format_ns(gap.duration_ns)}, is before {next_one}"
    yield finding(
        "input-bound" if is_input else "cpu-elsewhere",
        step,
        cost_ns,
        says=(
            f"{how}: it is idle for {of_whole(cost_ns, step.step_ns)}, "
            f"in {plural(len(gaps), 'gap')}{where}."
        ),
        idle_ns=cost_ns,
        loading_ns=loading_ns,
        num_gaps=len(gaps),
        longest_gap_ns=gap.duration_ns,
        works_ns=dict(works.most_common(3)),
        spans=(p.span for p in _longest(gaps)),
    )


def _host_sync(case: Case, step: Step) -> Iterator[Finding]:
    gaps = [p for p in step.stretches if p.entry == "idle_sync"]
    cost_ns = sum(p.duration_ns for p in gaps)
    if not step.worth_reporting(cost_ns):
        return
    waits = case.lookup.waits(step.rank)
    names: Counter[str] = Counter()
    for gap in gaps:
        held = [w for w in waits if w.start_ns <= gap.start_ns <= w.end_ns]
        names.update(w.name.removeprefix("wait ") for w in held[-1:])
    waited = ", ".join(f"{short(name)} ({n}x)" for name, n in names.most_common(3))
    yield finding(
        "host-sync",
        step,
        cost_ns,
        says=(
            f"The CPU waited for the device in the middle of the step, {waited}, and "
            f"launched on only then: the device was idle for "
            f"{of_whole(cost_ns, step.step_ns)}."
        ),
        idle_ns=cost_ns,
        num_gaps=len(gaps),
        waits=dict(names),
        spans=(p.span for p in _longest(gaps)),
    )


def _straggler(case: Case, step: Step) -> Iterator[Finding]:
    """On the rank that comes last: what the one that waits most for it loses."""
    waits = {
        other.rank: _waits_for(case, other)
        for other in case.peers_of(step)
        if other.rank != step.rank
    }
    for_this = {rank: of.get(step.rank, 0) for rank, of in waits.items()}
    if not for_this:
        return
    rank, cost_ns = max(for_this.items(), key=lambda item: item[1])
    waiter = next(s for s in case.peers_of(step) if s.rank == rank)
    in_all = sum(waits[rank].values())
    ours = _waits_for(case, step).get(rank, 0)
    if cost_ns < MOSTLY * max(in_all, cost_ns + ours):
        return
    if cost_ns < LEAST_WAITING * waiter.step_ns or cost_ns <= 0:
        return
    more_ns = step.compute_ns - waiter.compute_ns
    cpu_ns = (step.cpu_bound_ns or 0) - (waiter.cpu_bound_ns or 0)
    counts = {len(s.compute) for s in (step, waiter)}
    same_kernels = len(counts) == 1 and case.timeline.origin != "virtual"
    if more_ns >= cost_ns // 2 and same_kernels:
        why = (
            f"It runs as many kernels, and needs {format_ns(more_ns)} more for them "
            f"than rank {rank}."
        )
        remedy = "straggler, slower machine"
        if case.on_gpus:
            remedy = "straggler, slower card"
    elif more_ns >= cost_ns // 2:
        why = f"It computes {format_ns(more_ns)} more than rank {rank}."
        remedy = "straggler, more work"
    elif cpu_ns >= cost_ns // 2:
        why = (
            f"Its CPU comes late: its device is idle {format_ns(cpu_ns)} longer than "
            f"rank {rank}'s, with the next kernel not launched."
        )
        remedy = "straggler, late CPU"
    else:
        why = f"It computes {format_ns(step.compute_ns)}, rank {rank} "
        why += f"{format_ns(waiter.compute_ns)}."
        remedy = "straggler on GPUs" if case.on_gpus else "straggler on CPUs"
    mine = [c for c in case.of(waiter) if c.last == step.rank and _exposed_wait(c) > 0]
    yield finding(
        "straggler",
        step,
        cost_ns,
        says=(
            f"Rank {step.rank} comes last to {plural(len(mine), 'collective')} in "
            f"which rank {rank} waits with nothing to compute, {format_ns(cost_ns)} "
            f"of its {format_ns(waiter.step_ns)}. {why}"
        ),
        remedy=REMEDIES[remedy],
        waiting_rank=rank,
        step_ns=waiter.step_ns,
        waiting_ns=cost_ns,
        waiting_for_all_ns=in_all,
        num_collectives=len(mine),
        computes_more_ns=more_ns,
        cpu_bound_more_ns=cpu_ns,
        spans=sorted(mine, key=lambda c: -_exposed_wait(c)),
    )


def _waits_for(case: Case, step: Step) -> dict[int, int]:
    """Exposed time that a rank's collectives spin, by the rank that comes last."""
    found: dict[int, int] = {}
    for collective in case.of(step):
        if collective.last not in (None, step.rank):
            assert collective.last is not None
            wait_ns = _exposed_wait(collective)
            found[collective.last] = found.get(collective.last, 0) + wait_ns
    return found


def _exposed_wait(collective: Collective) -> int:
    """Of [start, ready), what nothing computed beside."""
    return max(0, collective.exposed_ns - collective.moving_ns)


def _memcpy(case: Case, step: Step) -> Iterator[Finding]:
    cost_ns = step.parts["copying"]
    if not step.worth_reporting(cost_ns):
        return
    spans = case.lookup.spans
    alone = [(p.start_ns, p.end_ns) for p in step.stretches if p.entry == "copying"]
    copies = [
        i
        for i in case.lookup.device(step.rank)
        if spans[i].kind in COPIES and _touches(spans[i], alone)
    ]
    kinds: Counter[str] = Counter()
    for i in copies:
        what = str(spans[i].attributes.get("what", spans[i].name))
        kinds[what] += spans[i].duration_ns
    copied = ", ".join(
        f"{short(what)} {format_ns(ns)}" for what, ns in kinds.most_common(3)
    )
    words = " ".join(kinds).lower()
    remedies = []
    if "htod" in words or "dtoh" in words or "pageable" in words:
        remedies.append("memcpy, to and from the host")
    if "dtod" in words or not remedies:
        by_ddp = case.made_by("DistributedDataParallel")
        remedies.append("memcpy, by DDP" if by_ddp else "memcpy, inside the device")
    yield finding(
        "memcpy-in-the-way",
        step,
        cost_ns,
        says=(
            f"For {of_whole(cost_ns, step.step_ns)} the device only copies or clears "
            f"memory, in {plural(len(copies), 'operation')}: {copied}."
        ),
        remedy=" ".join(REMEDIES[key] for key in remedies),
        copying_ns=cost_ns,
        num_copies=len(copies),
        by_kind_ns=dict(kinds),
        bytes=sum(spans[i].bytes for i in copies),
        spans=sorted(copies, key=lambda i: -spans[i].duration_ns),
    )


def _touches(span: Span, intervals: Sequence[tuple[int, int]]) -> bool:
    place = bisect_right(intervals, (span.start_ns, span.end_ns)) - 1
    near = intervals[max(0, place) : place + 2]
    return any(a < span.end_ns and span.start_ns < b for a, b in near)


def _contention(case: Case, step: Step) -> Iterator[Finding]:
    found = case.contention_of(step)
    if not step.worth_reporting(found.cost_ns):
        return
    twins = [t for t in case.twins if t.rank == step.rank and t.cost_ns > 0]
    worst = ", ".join(
        f"{short(t.name)} {t.ratio:.2f}x ({t.num_beside} beside, {t.num_alone} alone)"
        for t in twins[:3]
    )
    alone_ns = found.compared_ns - found.cost_ns
    compared = of_whole(found.compared_ns, found.beside_ns)
    yield finding(
        "contention",
        step,
        found.cost_ns,
        says=(
            f"Hidden is not saved: kernels beside communication took "
            f"{format_ns(found.compared_ns)} instead of the {format_ns(alone_ns)} that "
            f"the same kernels take alone ({compared} could be compared). {worst}."
        ),
        remedy=_contention_remedy(case, step),
        beside_ns=found.beside_ns,
        compared_ns=found.compared_ns,
        alone_ns=alone_ns,
        hidden_ns=step.hidden_ns,
        twins=[
            {
                "name": t.name,
                "ratio": round(t.ratio, 3),
                "num_beside": t.num_beside,
                "num_alone": t.num_alone,
            }
            for t in twins[:3]
        ],
    )


def _contention_remedy(case: Case, step: Step) -> str:
    """What applies to this trace only."""
    fewer = "" if is_16_bit(case.of(step)) else " (bf16 gradients)"
    remedy = f"Nothing removes it: send fewer bytes{fewer}"
    if case.made_by("DistributedDataParallel"):
        remedy += ", copy less (gradient_as_bucket_view=True)"
    if not case.on_gpus:
        return f"{remedy}, or give the communication cores of its own."
    return (
        f"{remedy}, or try fewer SMs for NCCL (NCCL_MAX_CTAS) and measure the step, "
        "which may get longer."
    )


def _longest(stretches: Sequence[Stretch]) -> Sequence[Stretch]:
    return sorted(stretches, key=lambda stretch: -stretch.duration_ns)
