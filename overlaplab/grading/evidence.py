"""What a run proves about its gradients, read from program and timeline.

The learner is not asked: gradients are found through the names that the harness gave
them (`watch`), what a collective covers by following the learner's own copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from overlaplab.program import Program
from overlaplab.timeline import Timeline

if TYPE_CHECKING:
    from overlaplab.grading.laws import Violation


@dataclass(frozen=True, slots=True)
class GradientEvidence:
    """One parameter's gradient in one step on one rank.

    Args:
        rank, step: where; steps count from 1.
        name: the parameter's.
        bytes: its size.
        writer: index of the last operator that wrote it before any hook ran.
        since: index of the next operator when its hook ran.
        ready_ns: end of `writer`.
        sent_bytes: how many of its bytes were sent in its step, with multiplicity.
        sends: collectives that sent any byte of it, as indices of operators.
    """

    rank: int
    step: int
    name: str
    bytes: int
    writer: int | None
    since: int
    ready_ns: int
    sent_bytes: int
    sends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendEvidence:
    """One collective on one rank.

    Args:
        rank, step: where; step 0 is before the first step.
        op: index of the operator.
        group, sequence, operation: which meeting.
        start_ns, end_ns: of its span on this rank.
        bytes: of its input on this rank.
        covers: (parameter, bytes) of this step's gradients.
        stale_bytes: bytes of an earlier step's gradients, or of ones sent already.
        other_bytes: bytes that are no gradient's.
        pack: indices of the learner's copies from the gradients to its input.
    """

    rank: int
    step: int
    op: int
    group: str
    sequence: int
    operation: str
    start_ns: int
    end_ns: int
    bytes: int
    covers: tuple[tuple[str, int], ...]
    stale_bytes: int
    other_bytes: int
    pack: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketEvidence:
    """One bucket (a set of parameters) in one step, over all ranks (the latest counts).

    Args:
        ready_ns: end of the last operator that wrote any gradient of it.
        armed_ns: end of what its stream held when the last hook of it ran: the first
            moment at which a collective launched in that hook can start.
        pack_ns: duration of the learner's own copies for it.
        launched_ns: end of the CPU's launches of copies and collective, if launched
            at once in that hook.
        previous_end_ns: end of the communicator's previous collective, 0 if none.
        start_ns: start of the last collective that carries bytes of it, None if
            some byte of it is never sent.
    """

    step: int
    names: tuple[str, ...]
    ready_ns: int
    armed_ns: int
    pack_ns: int
    launched_ns: int
    previous_end_ns: int
    start_ns: int | None


@dataclass(frozen=True)
class Evidence:
    """All evidence of one run; build it with `collect_evidence`.

    Args:
        gradients: of every rank and step, in the order of their hooks.
        sends: every collective, by rank and program order.
        step_ns: time of each step (slowest rank), step 1 first.
        num_ranks: recorded ranks.
    """

    gradients: tuple[GradientEvidence, ...]
    sends: tuple[SendEvidence, ...]
    step_ns: tuple[int, ...]
    num_ranks: int

    def bucket(self, names: Sequence[str], step: int) -> BucketEvidence:
        """The terms of the prompt law for the parameters `names` in `step`."""
        raise NotImplementedError


def collect_evidence(program: Program, timeline: Timeline) -> Evidence:
    """Read the evidence of a run in which `watch` and `mark_step` were called."""
    raise NotImplementedError


def watch(model: torch.nn.Module) -> None:
    """Name the parameters and, in a hook of its own, each gradient as it arrives.

    Call it before the learner's reducer registers its hooks.
    """
    raise NotImplementedError


def mark_step(step: int) -> None:
    """Say that step `step` (from 1) begins here; used on each rank by fixtures."""
    raise NotImplementedError
