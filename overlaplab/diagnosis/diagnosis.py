"""`diagnose`: a timeline, measured or virtual, and what its steps lose."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

from overlaplab.diagnosis.case import Case, case_of
from overlaplab.diagnosis.collectives import is_set_up
from overlaplab.diagnosis.findings import Finding, unexplained
from overlaplab.diagnosis.page import page
from overlaplab.diagnosis.record import record
from overlaplab.diagnosis.result import Result
from overlaplab.diagnosis.rules_device import device_rules
from overlaplab.diagnosis.rules_overlap import overlap_rules
from overlaplab.diagnosis.saved import check_serial, saved_of
from overlaplab.diagnosis.steps import LEAST_SHARE
from overlaplab.diagnosis.text import text
from overlaplab.hardware import Hardware
from overlaplab.timeline import Timeline
from overlaplab.view.show import write_html

NO_COMMUNICATION = "no communication kernels found"


class Diagnosis(Result):
    """A `Result` to `print`; `to_dict` for programs, `save_html` for colleagues."""

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return text(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; see `overlaplab.diagnosis.record` for the keys."""
        return record(self)

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page; a reader sees the whole file or the old one.

        Returns:
            The path.

        Raises:
            OSError: the folder does not exist or is not writable.
        """
        return write_html(path, lambda: page(self))


def diagnose(
    timeline: Timeline,
    *,
    hardware: str | Hardware | None = None,
    serial: Timeline | None = None,
    step: int | None = None,
) -> Diagnosis:
    """Say what the steps of a timeline lose to what, and what to change.

    Args:
        timeline: measured or virtual, of one rank or many, with steps or without.
            Without steps it is taken for one: cut set-up off (`Timeline.between`).
        hardware: what bandwidths are compared with: a profile's name, the path of one
            (.json), or a `Hardware`. By default that of a virtual run, or a guess by
            the name of the card, which is said.
        serial: the same step (model, batch, ranks, link) without overlap: what overlap
            saved is then the difference of the two. Without it the kernels'
            own twins and the hardware profile say what they can.
        step: only this one is described; the others still say what a kernel takes alone
            and when the device was free.

    Raises:
        ValueError: nobody knows the hardware, there is no such step, or `serial` is of
            other work.
        TypeError: `timeline` is no Timeline.
    """
    for name, value in (("timeline", timeline), ("serial", serial)):
        if not isinstance(value, Timeline) and not (name == "serial" and value is None):
            raise TypeError(
                f"{name} is {type(value).__name__}; expected an overlaplab Timeline, "
                "as ol.run(...).timeline, ol.read_trace(...) or ol.profile() give"
            )
    case = case_of(timeline, hardware, step)
    found = [
        finding
        for step in case.steps
        for rules in (overlap_rules, device_rules)
        for finding in rules(case, step)
    ]
    baseline = None if serial is None else case_of(serial, hardware)
    if baseline is not None:
        check_serial(case, baseline)
    return Diagnosis(
        case=case,
        findings=_most_expensive(case, found),
        saved=saved_of(case, baseline),
        remarks=tuple(_remarks(case)),
        unexplained=unexplained(case.described, found),
    )


def _most_expensive(case: Case, found: Sequence[Finding]) -> tuple[Finding, ...]:
    """One finding a kind, the costliest first, with all that were seen as evidence."""
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for finding in found:
        by_kind[finding.kind].append(finding)
    chosen = []
    for findings in by_kind.values():
        one = _typical(case, findings)
        if one is not None:
            seen = [{"rank": f.rank, "step": f.step, "ns": f.cost_ns} for f in findings]
            chosen.append(replace(one, evidence={**one.evidence, "seen": seen}))
    return tuple(sorted(chosen, key=_order(chosen)))


def _order(chosen: Sequence[Finding]) -> Callable[[Finding], tuple[int, bool, str]]:
    """By cost; but a slow link comes before the sending that it makes long."""
    costs = {f.kind: f.cost_ns for f in chosen}

    def key(finding: Finding) -> tuple[int, bool, str]:
        is_link, cost_ns = finding.kind == "low-bandwidth", finding.cost_ns
        if is_link:
            cost_ns = max(cost_ns, costs.get("communication-bound", 0))
        return -cost_ns, not is_link, finding.kind

    return key


def _typical(case: Case, findings: Sequence[Finding]) -> Finding | None:
    """Of one kind: on the rank where it costs most, that of the step described.

    Where that step has none, the one of median cost. What most steps do not have is
    reported of the step that has it, if it is still worth that on the mean of the
    rank's steps.
    """
    costs: dict[int, list[Finding]] = defaultdict(list)
    for finding in findings:
        costs[finding.rank].append(finding)
    num_steps = {rank: sum(1 for s in case.steps if s.rank == rank) for rank in costs}

    def typical_ns(rank: int) -> int:
        absent = [0] * (num_steps[rank] - len(costs[rank]))
        return median_low([*absent, *(f.cost_ns for f in costs[rank])])

    rank = max(costs, key=lambda r: (typical_ns(r), -r))
    for one in costs[rank]:
        if case.described is not None and one.step == case.described.step:
            return one
    if typical_ns(rank):
        return min(costs[rank], key=lambda f: abs(f.cost_ns - typical_ns(rank)))
    one = max(findings, key=lambda f: f.cost_ns)
    whole_ns = sum(s.step_ns for s in case.steps if s.rank == one.rank)
    return one if one.cost_ns >= LEAST_SHARE * whole_ns else None


def _remarks(case: Case) -> Iterator[str]:
    """What a reader of the numbers must know before believing them."""
    timeline = case.timeline
    yield from timeline.source.remarks
    if timeline.source.dropped:
        lost = ", ".join(f"{number} {why}" for why, number in timeline.source.dropped)
        yield f"Events of the trace were dropped, and count nowhere: {lost}."
    if not any(step.communication for step in case.steps):
        if NO_COMMUNICATION not in timeline.source.remarks:
            yield NO_COMMUNICATION
    elif len(case.lookup.ranks) == 1 and timeline.origin != "virtual":
        yield (
            "One rank only: the time in which a collective waits for its peers counts "
            "as its own. Give the traces of all ranks to tell them apart."
        )
    if timeline.steps and any(step.step is None for step in case.steps):
        yield (
            "No GPU event says of which step it is, so all numbers are of the whole. "
            "To see steps, record with ProfilerActivity.CPU, too."
        )
    if case.steps and not any(step.knows_launches for step in case.steps):
        yield "No launch records: CPU-bound time is not known."
    spans = [collective.span for collective in case.collectives]
    set_up = [span for span in spans if is_set_up(span)]
    if set_up and not timeline.steps:
        end_ns = max(span.end_ns for span in set_up)
        yield (
            f"The timeline begins with the set-up of a reducer ({len(set_up)} "
            f"broadcasts, until {end_ns} ns), and all of it counts as one step. For "
            f"steps alone: run each in `with ol.annotate('step'):`; or, if there is "
            f"one, timeline.between({end_ns}, timeline.end_ns)."
        )
    if timeline.represents > 1:
        yield f"Each rank drawn stands for {timeline.represents}."
