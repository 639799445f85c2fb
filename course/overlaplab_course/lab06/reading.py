"""Exercises 6.4b and 6.7: read a critical path, and turn the knobs until it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import with_link
from overlaplab.program import replay
from overlaplab.timeline import Timeline
from overlaplab.view import Knob
from overlaplab_course.lab06.runs import ETHERNET, MIB, three_runs, written_step

LARGEST = "the largest share of each critical path"
COUNTERFACTUAL = "what half the latency saves in each run, within 3 points"
TAIL = "whose bytes are still on the wire when run C has nothing left to compute"

KNOBS: Mapping[str, Knob] = {
    "bucket_mib": Knob(
        (0, 1, 2, 5, 10, 25, 50, 100, 200, 500), 10, "bucket (MiB; 0: each alone)"
    ),
    "latency_us": Knob((5, 10, 20, 44, 100, 200, 500, 1000), 100, "latency (us)"),
    "gbyte_per_s": Knob((1, 3, 12.5, 25, 50, 100, 340), 50, "bandwidth (GB/s)"),
    "layers": Knob((6, 12, 24, 48), 24, "layers"),
    "ktokens": Knob((1, 2, 4, 8, 16, 32), 4, "tokens a GPU (thousands)"),
}
WHAT_IF = {
    "half the latency": lambda s: {"latency_us": s["latency_us"] / 2},
    "twice the bandwidth": lambda s: {"gbyte_per_s": s["gbyte_per_s"] * 2},
}

LATENCY_BOUND = "latency"
WIRE_BOUND = "bandwidth"
NEITHER = "neither"
LOSES = "25 MiB loses"
SETTINGS = "every setting is one that the sliders have"
IS_LATENCY = "half the latency saves 15 % or more, twice the bandwidth under 8 %"
IS_WIRE = "twice the bandwidth saves 15 % or more, half the latency under 8 %"
IS_NEITHER = "neither saves 2 %"
IS_LOST = "buckets of 25 MiB take 10 % longer than the best bucket"


@exercise(
    "6.4b",
    title="read the critical path",
    solution="reading",
    verifies=(LARGEST, COUNTERFACTUAL, TAIL),
    points=2,
    timeout_s=120.0,  # records the three runs if nobody has
)
def grade_reading(sheet: Sheet, reading: Mapping[str, Any]) -> None:
    """Compare with the shares, and with what the resolver says of half the latency."""
    sheet.ran("runs A, B and C, each again with half the latency")
    if not isinstance(reading, Mapping):
        raise TypeError(f"reading is {type(reading).__name__}; expected a dict")
    wrong_share, wrong_saving = [], []
    for letter, given in three_runs().items():
        timeline = given.timeline()
        shares = timeline.critical_path().shares
        saved = 1 - given.timeline(latency=0.5).step_ns / timeline.step_ns
        answer = reading.get(letter)
        said = answer if isinstance(answer, Mapping) else {}
        largest = max(shares, key=lambda share: shares[share])
        wrong_share += [
            replace(
                violation,
                message=f"run {letter} ({given.name}): {violation.message}",
                expected=f"the largest value in critical_path().shares of run {letter}",
                hint="max() over timeline.critical_path().shares, not over the lanes",
            )
            for violation in laws.diagnosis_law(said, {"largest": largest})
        ]
        wrong_saving += [
            replace(
                violation,
                message=f"run {letter}: {violation.message}",
                expected="percent of the step, from .timeline(latency=0.5) of run "
                f"{letter}",
                hint="time it again: compare step_ns with .timeline(latency=0.5)",
            )
            for violation in laws.diagnosis_law(
                said, {"half_latency_saves_percent": 100 * saved}
            )
        ]
    sheet.verify(LARGEST, wrong_share, list_all=True)
    sheet.verify(COUNTERFACTUAL, wrong_saving, list_all=True)
    owner = three_runs()["C"].messages()[-1].names[-1]
    truth = {"tail": frozenset({owner, f"grad {owner}", owner.partition(".")[0]})}
    hint = "which collective ends last, and what are its parts called?"
    sheet.verify(
        TAIL, [replace(v, hint=hint) for v in laws.diagnosis_law(reading, truth)]
    )


def turn(
    bucket_mib: Any = KNOBS["bucket_mib"].default,
    latency_us: Any = KNOBS["latency_us"].default,
    gbyte_per_s: Any = KNOBS["gbyte_per_s"].default,
    layers: Any = KNOBS["layers"].default,
    ktokens: Any = KNOBS["ktokens"].default,
) -> Timeline:
    """The written step with these knobs; 0 MiB: a message a gradient.

    A knob that is left out stands where its slider starts.
    """
    hardware = with_link(
        ETHERNET,
        latency_ns=round(latency_us * 1e3),
        bytes_per_s=round(gbyte_per_s * 1e9),
    )
    cap = int(bucket_mib * MIB) or None
    return replay(written_step(layers, 1024 * ktokens), hardware=hardware, buckets=cap)


def saved_percent(settings: Mapping[str, Any], what_if: str) -> float:
    """What the change `what_if` saves of the step, in percent."""
    settings = _filled(settings)
    changed = {**settings, **WHAT_IF[what_if](settings)}
    return 100 * (1 - turn(**changed).step_ns / turn(**settings).step_ns)


def lost_percent(settings: Mapping[str, Any]) -> float:
    """How much longer 25 MiB takes than the best bucket of the slider, in percent."""
    steps = {
        mib: turn(**{**settings, "bucket_mib": mib}).step_ns
        for mib in KNOBS["bucket_mib"].values
    }
    return 100 * (steps[25] / min(steps.values()) - 1)


@exercise(
    "6.7",
    title="knobs",
    solution="found",
    verifies=(SETTINGS, IS_LATENCY, IS_WIRE, IS_NEITHER, IS_LOST),
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_knobs(sheet: Sheet, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your four settings, each resolved again")
    names = (LATENCY_BOUND, WIRE_BOUND, NEITHER, LOSES)
    problems = {n: problem for n in names if (problem := _unusable(n, found))}
    sheet.expect(
        SETTINGS,
        not problems,
        seen="\n".join(problems.values()),
        expected=f"some of {list(KNOBS)}; the others stand where the sliders start",
    )
    for name, sentence in (
        (LATENCY_BOUND, IS_LATENCY),
        (WIRE_BOUND, IS_WIRE),
        (NEITHER, IS_NEITHER),
    ):
        if name in problems:
            continue  # each is judged alone
        half, twice = (saved_percent(found[name], what) for what in WHAT_IF)
        right = {
            IS_LATENCY: half >= 15 and twice < 8,
            IS_WIRE: twice >= 15 and half < 8,
            IS_NEITHER: half < 2 and twice < 2,
        }[sentence]
        sheet.expect(
            sentence,
            right,
            seen=f"{dict(found[name])}: half the latency saves {half:.1f} %, twice the "
            f"bandwidth {twice:.1f} %",
            expected=sentence,
        )
    if LOSES in problems:
        return
    lost = lost_percent(found[LOSES])
    sheet.expect(
        IS_LOST,
        lost >= 10,
        seen=f"{dict(found[LOSES])}: 25 MiB takes {lost:.1f} % longer than the best",
        expected="10 % or more",
        hint="when is latency dear, and when is there little to hide behind?",
    )


def _unusable(name: str, found: Mapping[str, Mapping[str, Any]]) -> str:
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


def _filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the sliders' starts for what is left out."""
    return {**{name: knob.default for name, knob in KNOBS.items()}, **settings}
