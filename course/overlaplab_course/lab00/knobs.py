"""Extra 0.6: what bounds a training step, launches or the GPU? Sliders and a grader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import KnobProgram, KnobTask, KnobTasks, Settings
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab.view import Knob
from overlaplab_course.lab00.runs import GPU
from overlaplab_course.lab00.written import written_step

NUM_LAYERS = 6
BATCHES: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KNOBS: Mapping[str, Knob] = {
    "batch": Knob(BATCHES, 256, "batch (rows)"),
    "width": Knob((128, 256, 512, 1024), 256, "width of a layer"),
    "launch_us": Knob((2, 5, 10, 20, 40), 20, "a launch (us)"),
    "teraflops": Knob((1, 5, 20, 100), 1, "GPU (TFLOP/s)"),
}
SHORTER, FASTER = "launches half as long", "a GPU twice as fast"
# The machine of the third task: only its batch is free.
BORDER_AT = {"width": 512, "launch_us": 10, "teraflops": 20}


def _timed(s: Settings) -> Timeline:
    gpu = replace(
        GPU,
        launch_ns=round(1000 * s["launch_us"]),
        flops_per_s={"default": s["teraflops"] * 10**12},
        memory_bytes_per_s=s["teraflops"] * 10**12,
    )
    return resolve(written_step(NUM_LAYERS, s["width"], s["batch"]), gpu)


turn = KnobProgram(
    KNOBS,
    _timed,
    what_if={
        SHORTER: lambda s: {"launch_us": s["launch_us"] / 2},
        FASTER: lambda s: {"teraflops": 2 * s["teraflops"]},
    },
)
WHAT_IF, saved_percent = turn.what_if, turn.saved_percent

USABLE = "each entry has values that the sliders have"
IS_LAUNCH = f"launch-bound: {SHORTER} save 40 %, {FASTER} under 2 %"
IS_GPU = f"GPU-bound: {FASTER} saves 40 %, {SHORTER} under 2 %"
IS_BORDER = f"border: the smallest batch at which {SHORTER} save under 10 %"
TASKS = KnobTasks(
    turn,
    usable=USABLE,
    measure=lambda s: {
        "shorter": saved_percent(s, SHORTER),
        "faster": saved_percent(s, FASTER),
    },
    hint="the batch makes kernels long; it makes no more of them",
    expected=f"some of {list(KNOBS)}; for 'border' a batch",
    tasks=(
        KnobTask(
            "launch-bound",
            IS_LAUNCH,
            lambda n: n["shorter"] >= 40 and n["faster"] < 2,
            seen=f"{SHORTER}: {{shorter:.1f}} %; {FASTER}: {{faster:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
        KnobTask(
            "GPU-bound",
            IS_GPU,
            lambda n: n["faster"] >= 40 and n["shorter"] < 2,
            seen=f"{FASTER}: {{faster:.1f}} %; {SHORTER}: {{shorter:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
    ),
)


def border_batch() -> int:
    """The answer to the third task."""
    return min(b for b in BATCHES if _saved_at(b) < 10)


def _saved_at(batch: int) -> float:
    return saved_percent({**BORDER_AT, "batch": batch}, SHORTER)


@exercise(
    "0.6",
    title="launch-bound or GPU-bound?",
    solution="found",
    verifies=(*TASKS.sentences, IS_BORDER),
    points=1,
    optional=True,
    timeout_s=20.0,
)
def grade_knobs(sheet: Sheet, found: Mapping[str, Any]) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your settings, each resolved again")
    batch = found.get("border") if isinstance(found, Mapping) else None
    if isinstance(batch, Mapping):
        batch = batch.get("batch")
    more = [f"'border' is {batch!r}, not one of {BATCHES}"]
    TASKS.check_usable(sheet, found, more=[] if batch in BATCHES else more)
    sheet.stop_if_wrong()
    TASKS.judge(sheet, found)
    assert isinstance(batch, int)
    half = batch // 2
    seen = f"at batch {batch} they save {_saved_at(batch):.1f} %"
    if half in BATCHES:
        seen += f", at {half} {_saved_at(half):.1f} %"
    sheet.expect(
        IS_BORDER,
        batch == border_batch(),
        seen=seen,
        expected="under 10 % at your batch, and 10 % or more at half of it",
        hint=", ".join(f"{k}={v}" for k, v in BORDER_AT.items()),
    )
