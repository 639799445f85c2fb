"""Exercise 2.3: compute, communication, hidden, exposed, from the rows of a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline.intervals import intersect, merge, total
from overlaplab_course.lab02.rows import (
    Row,
    as_table,
    is_communication,
    kernel,
    other,
    unseen_rows,
)

KERNELS = "copies, sets, annotations and the CPU's events count as nothing"
ONCE = "what runs side by side counts once"
ANY_STREAM = "which stream a kernel is on decides nothing"
PARTS = "hidden and exposed add up to communication; the fraction is hidden's share"
NONE = "without communication the fraction is None"
UNSEEN = "all five numbers, on 60 timelines that nobody has seen"

KEYS = ("compute_ns", "communication_ns", "hidden_ns", "exposed_ns", "fraction")
NUM_UNSEEN = 60
_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"
_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)"

Overlap = Callable[[list[Row]], Mapping[str, Any]]

_HINTS = {
    KERNELS: 'only rows whose category is "kernel"',
    ONCE: "merge() the intervals of each kind before you add up",
    ANY_STREAM: "is_communication(row) decides, not row.stream",
    PARTS: "draw the two rows: 70 to 100 is hidden, 100 to 120 exposed; the fraction "
    "divides by communication",
    NONE: "nothing sent is neither 0 % nor 100 % hidden",
    UNSEEN: "compare your numbers with a timeline that you draw by hand",
}

# One small timeline for each trap, with nothing else in it.
CASES: Mapping[str, tuple[Row, ...]] = {
    PARTS: (kernel(_GEMM, 7, 0, 100), kernel(_NCCL, 20, 70, 120)),
    ANY_STREAM: (
        kernel(_GEMM, 7, 0, 20),
        kernel(_NCCL, 7, 20, 50),
        kernel("my_fused_op", 20, 40, 60),
    ),
    ONCE: (
        kernel(_GEMM, 7, 0, 60),
        kernel("my_fused_op", 24, 20, 80),
        kernel(_NCCL, 20, 50, 90),
        kernel("ncclDevKernel_AllGather_RING_LL(...)", 28, 70, 110),
    ),
    KERNELS: (
        kernel(_GEMM, 7, 15, 40),
        kernel(_NCCL, 20, 10, 20),
        other("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 0, 13),
        other("gpu_user_annotation", "nccl:all_reduce", 20, 0, 100),
        other("cpu_op", "c10d::allreduce_", 1, 0, 5),
    ),
    NONE: (
        kernel(_GEMM, 7, 15, 40),
        other("gpu_user_annotation", "nccl:all_reduce", 20, 0, 100),
    ),
}


def reference(rows: Sequence[Row]) -> dict[str, Any]:
    """The course's own."""
    kernels = [row for row in rows if row.category == "kernel"]
    sent = merge((r.start_ns, r.end_ns) for r in kernels if is_communication(r))
    computed = merge((r.start_ns, r.end_ns) for r in kernels if not is_communication(r))
    hidden_ns = total(intersect(sent, computed))
    return {
        "compute_ns": total(computed),
        "communication_ns": total(sent),
        "hidden_ns": hidden_ns,
        "exposed_ns": total(sent) - hidden_ns,
        "fraction": hidden_ns / total(sent) if sent else None,
    }


@exercise(
    "2.3",
    title="hidden or exposed?",
    solution="overlap",
    verifies=(PARTS, ANY_STREAM, ONCE, KERNELS, NONE, UNSEEN),
    points=2,
    timeout_s=20.0,
)
def grade_overlap(sheet: Sheet, overlap: Overlap) -> None:
    """One trap at a time; then everything at once."""
    sheet.ran(f"{len(CASES)} small timelines, then {NUM_UNSEEN} large ones")
    for sentence, rows in CASES.items():
        seen, expected = _compare(overlap, rows)
        if not sheet.expect(
            sentence,
            not seen,
            seen=f"on\n{as_table(rows)}\n{seen}",
            expected=expected,
            hint=_HINTS[sentence],
        ):
            return  # one trap at a time: the others most often have the same cause
    for seed in range(NUM_UNSEEN):
        rows = tuple(unseen_rows(seed))
        seen, expected = _compare(overlap, rows)
        if not sheet.expect(
            UNSEEN,
            not seen,
            seen=f"on {len(rows)} rows\n{seen}",
            expected=expected,
            hint=_HINTS[UNSEEN],
        ):
            return


def _compare(overlap: Overlap, rows: Sequence[Row]) -> tuple[str, str]:
    """(what is wrong, what is right), both "" if nothing is."""
    said = overlap(list(rows))
    if not isinstance(said, Mapping):
        raise TypeError(f"overlap returned {said!r:.80}; expected a dict, keys {KEYS}")
    right = reference(rows)
    missing = [key for key in KEYS if key not in said]
    if missing:
        raise KeyError(f"overlap's dict has no {missing}; expected keys {KEYS}")
    wrong = [key for key in KEYS if not _equal(said[key], right[key])]
    return (
        "\n".join(f"{key}: {said[key]!r}" for key in wrong),
        "\n".join(f"{key}: {right[key]!r}" for key in wrong),
    )


def _equal(said: Any, right: Any) -> bool:
    if right is None or said is None:
        return said is right
    if isinstance(said, bool) or not isinstance(said, int | float):
        return False
    return bool(abs(said - right) <= (1e-9 if isinstance(right, float) else 0))
