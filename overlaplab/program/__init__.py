"""The record of a run and what follows from it without torch: times, hazards, edits."""

from overlaplab.program.record import (
    Access,
    Collective,
    Finding,
    Op,
    OpKind,
    Part,
    Program,
    StorageLife,
    TensorName,
    WorkWait,
)

__all__ = [
    "Access",
    "Collective",
    "Finding",
    "Op",
    "OpKind",
    "Part",
    "Program",
    "StorageLife",
    "TensorName",
    "WorkWait",
]
