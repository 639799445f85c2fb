"""Extra 2.8b: a summary, to be repaired: it takes the largest name for the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline.intervals import merge, total
from overlaplab_course.lab02.rows import Row, as_table, kernel, other, unseen_rows

STEP = "step_ns is the time from the first kernel's start to the last one's end"
BUSY = "busy_ns is the time in which at least one kernel runs"
NAMES = "by_name has each kernel's own sum, of kernels only"
TOP = "top is the name with the largest sum"
UNSEEN = "and so on 40 timelines that nobody has seen"

KEYS = ("step_ns", "busy_ns", "by_name", "top")
NUM_UNSEEN = 40

_HINTS = {
    STEP: "max() of the ends minus min() of the starts; no sum of anything",
    BUSY: "merge() the kernels' intervals, then add up",
    NAMES: "the sums by name were right, but for what is no kernel",
    TOP: "max(by_name, key=by_name.get)",
    UNSEEN: "which of the four numbers is wrong there?",
}
_ROWS: Mapping[str, tuple[Row, ...]] = {
    STEP: (kernel("gemm", 7, 10, 30), kernel("gemm", 7, 50, 60)),
    BUSY: (
        kernel("gemm", 7, 0, 60),
        kernel("ncclDevKernel_AllReduce", 20, 30, 80),
        kernel("gemm", 7, 90, 95),
    ),
    NAMES: (
        kernel("gemm", 7, 0, 10),
        other("gpu_user_annotation", "forward", 7, 0, 90),
        kernel("gelu", 7, 10, 30),
        other("cpu_op", "aten::mm", 1, 0, 500),
        kernel("gemm", 7, 30, 45),
    ),
    TOP: (
        kernel("gelu", 7, 0, 15),
        kernel("gemm", 7, 15, 25),
        kernel("gemm", 7, 25, 35),
    ),
}

Summary = Callable[[list[Row]], Mapping[str, Any]]


def broken_summary(rows: Sequence[Row]) -> Mapping[str, Any]:
    """As the lesson hands it out (a test holds the two together)."""
    by_name: dict[str, int] = {}
    for row in rows:
        length_ns = row.end_ns - row.start_ns
        by_name[row.name] = by_name.get(row.name, 0) + length_ns
    top = max(by_name, key=lambda name: by_name[name])
    return {
        "step_ns": by_name[top],
        "busy_ns": sum(by_name.values()),
        "by_name": by_name,
        "top": top,
    }


def reference(rows: Sequence[Row]) -> dict[str, Any]:
    """The course's own."""
    kernels = [row for row in rows if row.category == "kernel"]
    by_name: dict[str, int] = {}
    for row in kernels:
        length_ns = row.end_ns - row.start_ns
        by_name[row.name] = by_name.get(row.name, 0) + length_ns
    return {
        "step_ns": max(r.end_ns for r in kernels) - min(r.start_ns for r in kernels),
        "busy_ns": total(merge((r.start_ns, r.end_ns) for r in kernels)),
        "by_name": by_name,
        "top": max(by_name, key=lambda name: by_name[name]),
    }


@exercise(
    "2.8b",
    title="a summary that adds up",
    solution="summary",
    verifies=(STEP, BUSY, NAMES, TOP, UNSEEN),
    points=1,
    timeout_s=10.0,
    optional=True,
)
def grade_summary(sheet: Sheet, summary: Summary) -> None:
    """One fault at a time; then all four numbers on timelines drawn at random."""
    sheet.ran(f"{len(_ROWS)} small timelines, then {NUM_UNSEEN} large ones")
    for (sentence, rows), key in zip(_ROWS.items(), KEYS, strict=True):
        _expect(sheet, sentence, summary, rows, (key,), table=True)
    sheet.stop_if_wrong()
    for seed in range(1000, 1000 + NUM_UNSEEN):
        _expect(sheet, UNSEEN, summary, unseen_rows(seed), KEYS, table=False)


def _expect(
    sheet: Sheet,
    sentence: str,
    summary: Summary,
    rows: Sequence[Row],
    keys: Sequence[str],
    *,
    table: bool,
) -> None:
    said, right = summary(list(rows)), reference(rows)
    if not isinstance(said, Mapping) or not all(key in said for key in KEYS):
        raise TypeError(f"summary returned {said!r:.80}; expected a dict, keys {KEYS}")
    wrong = [key for key in keys if not _same(key, said, right)]
    where = f"on\n{as_table(rows)}\n" if table else f"on {len(rows)} rows: "
    sheet.expect(
        sentence,
        not wrong,
        seen=where + "\n".join(f"{key}: {said[key]!r}" for key in wrong),
        expected="\n".join(f"{key}: {right[key]!r}" for key in wrong),
        hint=_HINTS[sentence],
    )


def _same(key: str, said: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    if key == "top":  # of equal sums, any
        sums: Mapping[str, int] = right["by_name"]
        return sums.get(said["top"]) == max(sums.values())
    return bool(said[key] == right[key])
