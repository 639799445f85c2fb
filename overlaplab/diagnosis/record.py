"""A diagnosis as JSON values, for programs. The keys are part of the public interface.

format          1; another number means other keys
origin, hardware, hardware_is_guess, has_communication
source          files, events, what was dropped, patterns of names, remarks
makers          who launched the collectives, with evidence
whole           one object a rank: the whole timeline, as `Timeline.report` has it
steps           one object a rank and step: every number in nanoseconds; `parts` add
                up to `step_ns`; null where a value does not exist
collectives     the longest exposed ones, and what each waited for
twins           kernels alone and beside communication
findings        the most expensive first; see `Finding`
unexplained     idle and exposed time that no finding names; null where it is little
remarks         sentences
"""

from __future__ import annotations

from typing import Any

from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.result import Result
from overlaplab.diagnosis.steps import Step
from overlaplab.timeline.report import Report

FORMAT = 1
MOST_COLLECTIVES = 50
_NOT_SENT = {"hidden_ns": None, "exposed_ns": None}  # unknown, and not 0


def record(result: Result) -> dict[str, Any]:
    """See the module."""
    case, source = result.case, result.timeline.source
    exposed = sorted(case.collectives, key=lambda c: -c.exposed_ns)
    return {
        "format": FORMAT,
        "origin": result.timeline.origin,
        "hardware": None if case.hardware is None else case.hardware.name,
        "hardware_is_guess": case.is_guess,
        "has_communication": result.has_communication,
        "source": {
            "files": list(source.files),
            "devices": [list(pair) for pair in source.devices],
            "num_events": source.num_events,
            "dropped": [list(pair) for pair in source.dropped],
            "communication_names": list(source.communication_names),
        },
        "makers": [
            {"name": maker.name, "evidence": dict(maker.evidence)}
            for maker in result.makers
        ],
        # What belongs to no step, too.
        "whole": [_whole(one) for one in result.timeline.report().ranks],
        "steps": [_step(result, step) for step in case.steps],
        "collectives": [
            _collective(one) for one in exposed[:MOST_COLLECTIVES] if one.exposed_ns
        ],
        "twins": [
            _fields("rank name kernel alone_ns num_alone beside_ns num_beside", one)
            | {"ratio": round(one.ratio, 4), "cost_ns": one.cost_ns}
            for one in case.twins
        ],
        "findings": [
            _fields("kind rank step cost_ns says remedy", one)
            | {"evidence": dict(one.evidence), "spans": list(one.spans)}
            for one in result.findings
        ],
        "unexplained": None
        if result.unexplained is None
        else _fields("rank step idle_ns exposed_ns", result.unexplained),
        "remarks": list(result.remarks),
    }


def _fields(names: str, owner: object) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names.split()}


def _whole(report: Report) -> dict[str, Any]:
    found = _fields("rank step_ns compute_ns communication_ns", report)
    found |= _fields("hidden_ns exposed_ns overlap_fraction", report)
    return found if report.communication_ns else found | _NOT_SENT


def _step(result: Result, step: Step) -> dict[str, Any]:
    saved = result.saved[step.rank, step.step]
    found = _fields(
        "rank step start_ns end_ns step_ns compute_ns communication_ns hidden_ns "
        "exposed_ns memcpy_ns memset_ns idle_ns cpu_bound_ns saved_ns",
        step,
    )
    found |= {"saved_of_alone_ns": saved.saved_ns, "possible_ns": saved.possible_ns}
    if not step.communication or not saved.is_known:
        found |= dict.fromkeys(("saved_ns", "saved_of_alone_ns", "possible_ns"))
    if not step.communication:
        found |= _NOT_SENT
    return found | {
        "compute_alone_ns": saved.compute_alone_ns,
        "communication_alone_ns": saved.communication_alone_ns,
        "alone_is_known": saved.basis,
        "contention_ns": result.case.contention_of(step).cost_ns,
        "parts": dict(step.parts),
    }


def _collective(one: Collective) -> dict[str, Any]:
    return {
        "span": one.index,
        "rank": one.span.rank,
        "step": one.step.step,
        "name": one.span.name,
        "label": str(one.span.attributes.get("label", "")),
        "bytes": one.span.bytes,
        "group_size": one.group_size,
        **_fields("start_ns end_ns", one.span),
        "exposed_ns": one.exposed_ns,
        "exposed": dict(one.exposed),
        "waited_for_peers_ns": one.waiting_ns if one.knows_ready else None,
        "last_rank": one.last,
        "started_after": one.waited_for,
        "remaining_computation_ns": one.remaining_ns,
        **_fields("algorithm_bytes_per_s bus_bytes_per_s alone_ns", one),
    }
