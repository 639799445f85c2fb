"""The record of a run and what follows from it without torch: times, hazards, edits."""

from overlaplab.program.build import ProgramBuilder
from overlaplab.program.deadlock import find_deadlock
from overlaplab.program.findings import find_findings
from overlaplab.program.gradients import buckets_of_cap, gradient_payload
from overlaplab.program.kinds import memory_kinds
from overlaplab.program.memory import (
    Holder,
    end_bytes,
    held_at_peak,
    live_by_kind,
    live_bytes,
    peak_bytes,
    top_holders,
)
from overlaplab.program.record import (
    Access,
    Collective,
    Finding,
    Op,
    OpKind,
    PayloadTensor,
    Program,
    StorageLife,
    TensorName,
    WorkWait,
)
from overlaplab.program.replay import rebucket, replay
from overlaplab.program.resolve import resolve
from overlaplab.program.steps import only_step

__all__ = [
    "Access",
    "Collective",
    "Finding",
    "Holder",
    "Op",
    "PayloadTensor",
    "OpKind",
    "Program",
    "ProgramBuilder",
    "StorageLife",
    "TensorName",
    "WorkWait",
    "buckets_of_cap",
    "end_bytes",
    "find_deadlock",
    "find_findings",
    "gradient_payload",
    "live_by_kind",
    "held_at_peak",
    "live_bytes",
    "memory_kinds",
    "only_step",
    "peak_bytes",
    "rebucket",
    "replay",
    "resolve",
    "top_holders",
]
