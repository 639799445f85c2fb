"""Extra 1.8: when does overlap matter? Sliders over a GPT's step, and a grader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Link
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab.view.explore import Knob
from overlaplab_course.lab01.steps import CHALK

NUM_LAYERS = 24
LAYER_PARAMETERS = 12 * 2048 * 2048
LATENCY_NS = 50_000
KNOBS: Mapping[str, Knob] = {
    "overlap": Knob(("no", "yes"), "no", "overlap"),
    "ktokens": Knob((1, 2, 4, 8, 16, 32, 64), 8, "tokens a GPU (thousands)"),
    "gbyte_per_s": Knob((1, 3, 12.5, 25, 50, 100, 340), 25, "bandwidth (GB/s)"),
    "gpus": Knob((2, 8, 64, 512, 4096), 8, "GPUs"),
    "teraflops": Knob((100, 200, 400, 800, 1600), 800, "GPU (TFLOP/s)"),
}
Settings = Mapping[str, Any]
OVERLAP, WIDER, FASTER = "overlap", "twice the bandwidth", "a GPU twice as fast"
WHAT_IF: Mapping[str, Callable[[Settings], Settings]] = {
    OVERLAP: lambda s: {"overlap": "yes"},
    WIDER: lambda s: {"gbyte_per_s": 2 * s["gbyte_per_s"]},
    FASTER: lambda s: {"teraflops": 2 * s["teraflops"]},
}
KEPT = (
    "settings is empty. What a button keeps is gone with its kernel: paste into the "
    "cell what print(dict(knobs.kept)) shows"
)
MUCH, LITTLE, TOO_MUCH = "saves much", "little to send", "much to send"
USABLE = "each entry has values that the sliders have, overlap at 'no'"
IS_MUCH = "saves much: overlap saves 30 % or more"
IS_LITTLE = f"little to send: overlap saves under 2 %, {FASTER} 45 % or more"
IS_TOO_MUCH = f"much to send: overlap saves under 10 %, {WIDER} 40 % or more"


@lru_cache(maxsize=64)
def written(ktokens: int, gpus: int, overlap: bool) -> Program:
    """Forward and backward pass of a GPT of 24 layers; a message a layer, or one."""
    builder = ProgramBuilder(num_ranks=1, represents=gpus)
    flops = 2 * LAYER_PARAMETERS * 1024 * ktokens
    size = 2 * LAYER_PARAMETERS
    for _ in range(NUM_LAYERS):
        builder.compute(0, "forward", flops=flops, phase="forward")
    for layer in reversed(range(NUM_LAYERS)):
        builder.compute(0, "backward", flops=2 * flops, phase="backward")
        if overlap:
            builder.collective(0, "all_reduce", bytes=size, label=f"layer {layer}")
    if not overlap:
        builder.collective(0, "all_reduce", bytes=NUM_LAYERS * size)
    return builder.build()


def turn(**settings: Any) -> Timeline:
    """The step with these knobs; those left out stand where the sliders start."""
    s = _filled(settings)
    gpu = replace(
        CHALK,
        flops_per_s={"default": s["teraflops"] * 10**12},
        link=Link(LATENCY_NS, round(s["gbyte_per_s"] * 10**9), source="typed"),
    )
    return resolve(written(s["ktokens"], s["gpus"], s["overlap"] == "yes"), gpu)


def saved_percent(settings: Settings, what: str) -> float:
    """How much of the step a change of `WHAT_IF` saves."""
    full = _filled(settings)
    before, after = turn(**full), turn(**{**full, **WHAT_IF[what](full)})
    return 100 * (1 - after.step_ns / before.step_ns)


def _filled(settings: Settings) -> dict[str, Any]:
    return {**{name: knob.default for name, knob in KNOBS.items()}, **settings}


@exercise(
    "1.8",
    title="when does overlap matter?",
    solution="settings",
    verifies=(USABLE, IS_MUCH, IS_LITTLE, IS_TOO_MUCH),
    points=1,
    optional=True,
    timeout_s=30.0,
)
def grade_knobs(sheet: Sheet, settings: Mapping[str, Any]) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your three settings, each resolved again, with and without overlap")
    names = (MUCH, LITTLE, TOO_MUCH)
    problems = {name: p for name in names if (p := _problem(name, settings))}
    sheet.expect(
        USABLE,
        not problems,
        seen="\n".join(problems.values()) if settings else KEPT,
        expected=f"some of {list(KNOBS)}; the others stand where the sliders start",
    )
    for name, sentence in (
        (MUCH, IS_MUCH),
        (LITTLE, IS_LITTLE),
        (TOO_MUCH, IS_TOO_MUCH),
    ):
        if name in problems:
            continue
        overlap, wider, faster = (
            saved_percent(settings[name], what) for what in WHAT_IF
        )
        right = {
            IS_MUCH: overlap >= 30,
            IS_LITTLE: overlap < 2 and faster >= 45,
            IS_TOO_MUCH: overlap < 10 and wider >= 40,
        }[sentence]
        if not right:
            sheet.show(turn(**settings[name]), title=f"your {name!r}")
        sheet.expect(
            sentence,
            right,
            seen=f"{dict(settings[name])}: overlap saves {overlap:.1f} %, {WIDER} "
            f"{wider:.1f} %, {FASTER} {faster:.1f} %",
            expected=sentence,
            hint="compare what is sent with the backward pass: half, equal, twice?",
        )


def _problem(name: str, found: object) -> str:
    """What is wrong with the settings called `name`, "" if nothing."""
    settings = found.get(name) if isinstance(found, Mapping) else None
    if settings is None or settings == {}:
        return f"you have not filled in {name!r}"
    if not isinstance(settings, Mapping):
        return f"{name!r} is {settings!r:.80}, not a dict"
    for knob, value in settings.items():
        if knob not in KNOBS:
            return f"{name!r}: there is no knob {knob!r}"
        if value not in KNOBS[knob].values:
            return f"{name!r}: {knob} is {value!r}, not one of {KNOBS[knob].values}"
    if settings.get("overlap", "no") != "no":
        return f"{name!r}: overlap is 'yes'; leave it at 'no', it is what is judged"
    return ""
