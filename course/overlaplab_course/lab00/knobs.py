"""Extra 0.6: what bounds a training step, launches or the GPU? Sliders and a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab.view.explore import Knob
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
Settings = Mapping[str, Any]
SHORTER, FASTER = "launches half as long", "a GPU twice as fast"
WHAT_IF: Mapping[str, Callable[[Settings], Settings]] = {
    SHORTER: lambda s: {"launch_us": s["launch_us"] / 2},
    FASTER: lambda s: {"teraflops": 2 * s["teraflops"]},
}
LAUNCH_BOUND, GPU_BOUND, BORDER = "launch-bound", "GPU-bound", "border"
# The machine of the third task: only its batch is free.
BORDER_AT = {"width": 512, "launch_us": 10, "teraflops": 20}

USABLE = "each entry has values that the sliders have"
IS_LAUNCH = f"launch-bound: {SHORTER} save 40 %, {FASTER} under 2 %"
IS_GPU = f"GPU-bound: {FASTER} saves 40 %, {SHORTER} under 2 %"
IS_BORDER = f"border: the smallest batch at which {SHORTER} save under 10 %"


def turn(**settings: Any) -> Timeline:
    """The step with these knobs; those left out stand where the sliders start.

    Args:
        settings: batch, width, launch_us, teraflops.
    """
    s = {**{name: knob.default for name, knob in KNOBS.items()}, **settings}
    gpu = replace(
        GPU,
        launch_ns=round(1000 * s["launch_us"]),
        flops_per_s={"default": s["teraflops"] * 10**12},
        memory_bytes_per_s=s["teraflops"] * 10**12,
    )
    return resolve(written_step(NUM_LAYERS, s["width"], s["batch"]), gpu)


def saved_percent(settings: Settings, what: str) -> float:
    """How much of the step a change of `WHAT_IF` saves."""
    full = {**{name: knob.default for name, knob in KNOBS.items()}, **settings}
    before, after = turn(**full), turn(**{**full, **WHAT_IF[what](full)})
    return 100 * (1 - after.step_ns / before.step_ns)


def border_batch() -> int:
    """The answer to the third task."""
    return min(b for b in BATCHES if _saved_at(b) < 10)


def _saved_at(batch: int) -> float:
    return saved_percent({**BORDER_AT, "batch": batch}, SHORTER)


@exercise(
    "0.6",
    title="launch-bound or GPU-bound?",
    solution="found",
    verifies=(USABLE, IS_LAUNCH, IS_GPU, IS_BORDER),
    points=1,
    optional=True,
    timeout_s=20.0,
)
def grade_knobs(sheet: Sheet, found: Mapping[str, Any]) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your settings, each resolved again")
    problems = [p for name in (LAUNCH_BOUND, GPU_BOUND) if (p := _problem(name, found))]
    batch = found.get(BORDER) if isinstance(found, Mapping) else None
    if isinstance(batch, Mapping):
        batch = batch.get("batch")
    if batch not in BATCHES:
        problems.append(f"{BORDER!r} is {batch!r}, not one of {BATCHES}")
    sheet.expect(
        USABLE,
        not problems,
        seen="\n".join(problems),
        expected=f"some of {list(KNOBS)}; for {BORDER!r} a batch",
    )
    sheet.stop_if_wrong()
    for name, sentence, mine, other in (
        (LAUNCH_BOUND, IS_LAUNCH, SHORTER, FASTER),
        (GPU_BOUND, IS_GPU, FASTER, SHORTER),
    ):
        saves = saved_percent(found[name], mine), saved_percent(found[name], other)
        sheet.expect(
            sentence,
            saves[0] >= 40 and saves[1] < 2,
            seen=f"{dict(found[name])}: {mine}: {saves[0]:.1f} %; "
            f"{other}: {saves[1]:.1f} %",
            expected="40 % or more, and under 2 %",
            hint="the batch makes kernels long; it makes no more of them",
        )
    assert isinstance(batch, int)
    saves_here, half = _saved_at(batch), batch // 2
    told = f"at batch {batch} they save {saves_here:.1f} %"
    if half in BATCHES:
        told += f", at {half} {_saved_at(half):.1f} %"
    sheet.expect(
        IS_BORDER,
        batch == border_batch(),
        seen=told,
        expected="under 10 % at your batch, and 10 % or more at half of it",
        hint=", ".join(f"{k}={v}" for k, v in BORDER_AT.items()),
    )


def _problem(name: str, found: Mapping[str, Any]) -> str:
    """What is wrong with the settings called `name`, "" if nothing."""
    settings = found.get(name) if isinstance(found, Mapping) else None
    if settings is None or settings == {}:
        return f"you have not filled in {name!r}"
    if not isinstance(settings, Mapping):
        return f"{name!r} is {settings!r}, not a dict"
    for knob, value in settings.items():
        if knob not in KNOBS:
            return f"{name!r}: there is no knob {knob!r}"
        if value not in KNOBS[knob].values:
            return f"{name!r}: {knob} is {value!r}, not one of {KNOBS[knob].values}"
    return ""
