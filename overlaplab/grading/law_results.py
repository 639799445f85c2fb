"""What a run leaves: right values on every rank, no findings, no growing memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from overlaplab.grading.violation import Violation
from overlaplab.program import Finding

# Tolerance relative to the element and to the largest of its tensor, by the coarsest
# dtype of the model: one layer in bfloat16 rounds what all others see. float32: sums of
# a few hundred terms in another order differ in the last bits. bfloat16 keeps 8 bits:
# a few roundings of 2**-8 each, of activations, gradients and their mean.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


def values_law(
    seen: Sequence[Mapping[str, torch.Tensor | None]],
    oracle: Mapping[str, torch.Tensor | None],
    *,
    what: str = "gradient",
    step: int | None = None,
) -> list[Violation]:
    """Each rank's tensors (`seen[rank][name]`) equal the one-process oracle's.

    None (no gradient) equals only None; a name that is missing counts as None.

    Args:
        seen: by rank.
        oracle: the right tensors; their coarsest dtype sets the tolerance.
        what: they are, for the message.
        step: they are of.
    """
    where = f", step {step}" if step is not None else ""
    if not seen:
        return [Violation("values", "no rank returned anything", step=step)]
    dtypes = {right.dtype for right in oracle.values() if right is not None}
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    found = []
    for rank, tensors in enumerate(seen):
        for name, right in oracle.items():
            problem = _difference(tensors.get(name), right, tolerance)
            if problem is None:
                continue
            was, should = problem
            found.append(
                Violation(
                    "values",
                    f"{what} of {name} on rank {rank}{where}: {was}",
                    f"{should}, as one process computes on the whole batch",
                    rank=rank,
                    step=step,
                )
            )
    return found


def _difference(
    seen: torch.Tensor | None, right: torch.Tensor | None, tolerance: float
) -> tuple[str, str] | None:
    if seen is None or right is None:
        if seen is right:
            return None
        return ("None", "a tensor") if seen is None else ("a tensor", "None")
    if seen.shape != right.shape or seen.dtype != right.dtype:
        return (
            f"{tuple(seen.shape)} of {seen.dtype}",
            f"{tuple(right.shape)} of {right.dtype}",
        )
    if right.numel() == 0:
        return None
    a, b = seen.detach().double().flatten(), right.detach().double().flatten()
    atol = tolerance * b.abs().max().item()
    wrong = ~torch.isclose(a, b, rtol=tolerance, atol=atol)
    if not bool(wrong.any()):
        return None
    worst = int(
        torch.where(wrong, (a - b).abs().nan_to_num(nan=torch.inf), -1).argmax()
    )
    note = ""
    big = b.abs() > atol
    if bool(big.any()):
        ratio = (a[big] / b[big]).median().item()
        if abs(ratio - 1) > 1e-3:
            note = f" (the median ratio to the right value is {ratio:.3g})"
    return (
        f"element {worst} is {a[worst].item():.6g}{note}; "
        f"{int(wrong.sum())} of {a.numel()} elements are wrong",
        f"{b[worst].item():.6g}",
    )


def no_findings_law(
    findings: Sequence[Finding],
    *,
    kinds: Sequence[str] = ("hazard", "unwaited", "unmatched"),
) -> list[Violation]:
    """`Run.warnings` holds no finding of these kinds."""
    expected = {
        "hazard": "bytes that one stream writes are touched by another only after it",
        "unwaited": "every collective is waited for",
        "unmatched": "every collective is launched by all ranks",
    }
    return [
        Violation(f.kind, str(f), expected.get(f.kind, ""), rank=f.rank)
        for f in findings
        if f.kind in kinds
    ]


def leak_law(live_bytes: Sequence[Sequence[int]]) -> list[Violation]:
    """On every rank, no more bytes live at the end of the last step than of step 2.

    Args:
        live_bytes: `Evidence.live_bytes`, of three steps or more.
    """
    return [
        Violation(
            "leak",
            f"rank {rank} held {row[1]} bytes at the end of step 2 and {row[-1]} at "
            f"the end of step {len(row)}",
            "memory does not grow from step to step",
            "what does the reducer keep after wait()?",
            rank=rank,
        )
        for rank, row in enumerate(live_bytes)
        if len(row) < 3 or row[-1] > row[1]
    ]
