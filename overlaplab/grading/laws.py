"""The laws that graders hold a run to. Each returns its violations; none is "it holds".

Laws read evidence and numbers; they run nothing. The bucket of a law is a set of
parameters, never a collective's number or name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from overlaplab.program import Finding

if TYPE_CHECKING:
    from overlaplab.grading.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Violation:
    """One fact that breaks a law.

    Args:
        law: "prompt", "early", "once", "bytes", "order", "values", "hazard", "unwaited",
            "leak", "step", "regret", "diagnosis".
        message: what was seen, with numbers, ranks and times.
        expected: what the law asks for.
        hint: the smallest hint, "" if none.
        rank, step: where, None if everywhere. Steps count from 1.
        bucket: index in the plan that was given, None if not about one.
    """

    law: str
    message: str
    expected: str = ""
    hint: str = ""
    rank: int | None = None
    step: int | None = None
    bucket: int | None = None


def prompt_law(
    evidence: Evidence,
    buckets: Sequence[Sequence[str]],
    *,
    steps: Sequence[int] | None = None,
    slack_ns: int | None = None,
) -> list[Violation]:
    """Every bucket starts when it is full and the wire is free, not earlier or later.

    ready(b) <= start(b) <= max(ready(b) + pack(b), end of the communicator's previous
    collective) + slack; see `Evidence.bucket` for the terms.

    Args:
        evidence: of the run.
        buckets: names of the parameters of each bucket, as the *reference* plans them;
            the first is bucket 0. Finer collectives satisfy the law, coarser do not.
        steps: which steps to judge, all by default.
        slack_ns: tolerance; 1 % of the step by default, at least 2 us.
    """
    raise NotImplementedError


def step_law(
    step_ns: int, reference_ns: int, *, factor: float = 1.02
) -> list[Violation]:
    """The blunt alternative to `prompt_law`: step <= factor * the reference's step."""
    raise NotImplementedError


def once_law(
    evidence: Evidence, *, steps: Sequence[int] | None = None
) -> list[Violation]:
    """Every byte of every gradient is sent exactly once a step, by every rank."""
    raise NotImplementedError


def bytes_law(
    evidence: Evidence,
    *,
    steps: Sequence[int] | None = None,
    extra_bytes: int = 0,
    factor: float = 1.0,
) -> list[Violation]:
    """Bytes on the wire = factor * gradient bytes, plus at most `extra_bytes` a step."""
    raise NotImplementedError


def same_order_law(evidence: Evidence) -> list[Violation]:
    """All ranks launch the same gradients in the same order on each communicator."""
    raise NotImplementedError


def no_findings_law(
    findings: Sequence[Finding],
    *,
    kinds: Sequence[str] = ("hazard", "unwaited", "unmatched"),
) -> list[Violation]:
    """`Run.warnings` holds no finding of these kinds."""
    raise NotImplementedError


def leak_law(live_bytes: Sequence[int]) -> list[Violation]:
    """Live bytes at the end of step 3 <= those at the end of step 2 (a list by step)."""
    raise NotImplementedError


def values_law(
    seen: Sequence[Mapping[str, torch.Tensor | None]],
    oracle: Mapping[str, torch.Tensor | None],
    *,
    what: str = "gradient",
    step: int | None = None,
) -> list[Violation]:
    """Each rank's tensors (`seen[rank][name]`) equal the one-process oracle's.

    Tolerances by dtype: `TOLERANCES`. None (no gradient) equals None only.
    """
    raise NotImplementedError


def regret(choice_ns: int, best_ns: int, worst_ns: int) -> float:
    """What was lost relative to what there was to gain: 0 is the best, 1 the worst.

    Returns 0.0 where there was nothing to gain.
    """
    raise NotImplementedError


def regret_law(
    regrets: Mapping[str, float], *, at_most: float = 0.20
) -> list[Violation]:
    """No case's regret passes `at_most`."""
    raise NotImplementedError


def diagnosis_law(
    said: Mapping[str, object], truth: Mapping[str, object]
) -> list[Violation]:
    """Every field of `truth` (kind, rank, step, span or tensor, number) was said right.

    A float or int in `truth` under a key that ends in "_ns", "_ms" or "_share" is met
    within 3 % (`_share`: 3 points); everything else by ==, strings without case.
    """
    raise NotImplementedError
