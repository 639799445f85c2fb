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

from typing import TYPE_CHECKING, Any

from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.steps import Step

if TYPE_CHECKING:
    from overlaplab.diagnosis.diagnosis import Diagnosis

FORMAT = 1
MOST_COLLECTIVES = 50


def record(diagnosis: Diagnosis) -> dict[str, Any]:
    """See the module."""
    case, timeline = diagnosis.case, diagnosis.timeline
    source = timeline.source
    exposed = sorted(case.collectives, key=lambda c: -c.exposed_ns)
    return {
        "format": FORMAT,
        "origin": timeline.origin,
        "hardware": None if case.hardware is None else case.hardware.name,
        "hardware_is_guess": case.is_guess,
        "has_communication": diagnosis.has_communication,
        "source": {
            "files": list(source.files),
            "devices": [list(pair) for pair in source.devices],
            "num_events": source.num_events,
            "dropped": [list(pair) for pair in source.dropped],
            "communication_names": list(source.communication_names),
        },
        "makers": [
            {"name": maker.name, "evidence": dict(maker.evidence)}
            for maker in diagnosis.makers
        ],
        "whole": _whole(diagnosis),
        "steps": [_step(diagnosis, step) for step in case.steps],
        "collectives": [
            _collective(one) for one in exposed[:MOST_COLLECTIVES] if one.exposed_ns
        ],
        "twins": [
            {
                "rank": one.rank,
                "name": one.name,
                "kernel": one.kernel,
                "alone_ns": one.alone_ns,
                "num_alone": one.num_alone,
                "beside_ns": one.beside_ns,
                "num_beside": one.num_beside,
                "ratio": round(one.ratio, 4),
                "cost_ns": one.cost_ns,
            }
            for one in case.twins
        ],
        "findings": [
            {
                "kind": one.kind,
                "rank": one.rank,
                "step": one.step,
                "cost_ns": one.cost_ns,
                "says": one.says,
                "remedy": one.remedy,
                "evidence": dict(one.evidence),
                "spans": list(one.spans),
            }
            for one in diagnosis.findings
        ],
        "unexplained": None
        if (left := diagnosis.unexplained) is None
        else {
            "rank": left.rank,
            "step": left.step,
            "idle_ns": left.idle_ns,
            "exposed_ns": left.exposed_ns,
        },
        "remarks": list(diagnosis.remarks),
    }


def _whole(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Every rank's whole timeline, what belongs to no step too: `Report`'s numbers."""
    return [
        {
            "rank": one.rank,
            "step_ns": one.step_ns,
            "compute_ns": one.compute_ns,
            "communication_ns": one.communication_ns,
            "hidden_ns": one.hidden_ns if one.communication_ns else None,
            "exposed_ns": one.exposed_ns if one.communication_ns else None,
            "overlap_fraction": one.overlap_fraction,
        }
        for one in diagnosis.timeline.report().ranks
    ]


def _step(diagnosis: Diagnosis, step: Step) -> dict[str, Any]:
    saved = diagnosis.saved[step.rank, step.step]
    contention = diagnosis.case.contention_of(step)
    sends = bool(step.communication)
    return {
        "rank": step.rank,
        "step": step.step,
        "start_ns": step.start_ns,
        "end_ns": step.end_ns,
        "step_ns": step.step_ns,
        "compute_ns": step.compute_ns,
        "communication_ns": step.communication_ns,
        "hidden_ns": step.hidden_ns if sends else None,
        "exposed_ns": step.exposed_ns if sends else None,
        "memcpy_ns": step.memcpy_ns,
        "memset_ns": step.memset_ns,
        "idle_ns": step.idle_ns,
        "cpu_bound_ns": step.cpu_bound_ns,
        "saved_ns": step.saved_ns if sends else None,
        "saved_of_alone_ns": saved.saved_ns if sends else None,
        "possible_ns": saved.possible_ns if sends else None,
        "compute_alone_ns": saved.compute_alone_ns,
        "communication_alone_ns": saved.communication_alone_ns,
        "alone_is_known": saved.basis,
        "contention_ns": contention.cost_ns,
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
        "start_ns": one.span.start_ns,
        "end_ns": one.span.end_ns,
        "exposed_ns": one.exposed_ns,
        "exposed": dict(one.exposed),
        "waited_for_peers_ns": one.waiting_ns if one.knows_ready else None,
        "last_rank": one.last,
        "started_after": one.waited_for,
        "remaining_computation_ns": one.remaining_ns,
        "algorithm_bytes_per_s": one.algorithm_bytes_per_s,
        "bus_bytes_per_s": one.bus_bytes_per_s,
        "alone_ns": one.alone_ns,
    }
