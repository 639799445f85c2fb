"""The graders of lab 06: of the line, readings, settings and knobs.

Those of plan and bucket size stand in `plan_checks`, those of hooks, finish and repairs
in `reducer_checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import KnobTask, KnobTasks, Settings, need_dict
from overlaplab.grading.laws import Violation, regret
from overlaplab_course.lab06 import plan_checks, reducer_checks  # noqa: F401 (register)
from overlaplab_course.lab06.given import MIB, three_runs
from overlaplab_course.lab06.show import message_points
from overlaplab_course.lab06.trials import KNOBS, DdpRun, net_bytes, turn, try_with

# -- 6.0: any way of fitting will do

FIT = "alpha and bandwidth meet 0, 25 and 100 MiB within 10 %"
MISSED = "which measured point the line misses most"


@exercise(
    "6.0",
    title="what a message costs",
    solution=("latency_us", "gbyte_per_s", "missed_mib"),
    verifies=(FIT, MISSED),
    timeout_s=10.0,
)
def grade_fit(
    sheet: Sheet, latency_us: float, gbyte_per_s: float, missed_mib: float
) -> None:
    """Compare the learner's line with the measured points."""
    sheet.ran("your line at the five measured sizes")
    off = {}
    for mib, measured_us in message_points().items():
        predicted_us = float(latency_us) + mib * MIB / (float(gbyte_per_s) * 1e3)
        off[mib] = predicted_us / measured_us - 1
        if mib in (0, 25, 100):
            sheet.expect(
                FIT,
                abs(off[mib]) <= 0.10,
                seen=f"at {mib} MiB the line says {predicted_us:.0f} us, measured are "
                f"{measured_us:.0f} us",
                expected="within 10 %",
                hint="an empty message shows alpha; the slope from 25 to 100 MiB is "
                "75 MiB more in 357 us more",
            )
    sheet.expect(
        MISSED,
        missed_mib == max(off, key=lambda mib: abs(off[mib])),
        seen=f"at {missed_mib} MiB your line is off by {off.get(missed_mib, 0):+.0%}",
        expected="the size at which it is off most",
    )


# -- 6.4b

LARGEST = "the largest share of each critical path"
COUNTERFACTUAL = "what half the latency saves in each run, within 3 points"
TAIL = "whose bytes are still on the wire when run C has nothing left to compute"


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
    need_dict(reading, "reading")
    wrong: dict[str, list[Violation]] = {LARGEST: [], COUNTERFACTUAL: []}
    for letter, given in three_runs().items():
        timeline = given.timeline()
        shares = timeline.critical_path().shares
        saved = 1 - given.timeline(latency=0.5).step_ns / timeline.step_ns
        run = f"run {letter}"
        asked = {
            "largest": (
                max(shares, key=lambda share: shares[share]),
                f"{run} ({given.name})",
                f"the largest value in critical_path().shares of {run}",
                "max() over timeline.critical_path().shares, not over the lanes",
            ),
            "half_latency_saves_percent": (
                100 * saved,
                run,
                f"percent of the step, from .timeline(latency=0.5) of {run}",
                "time it again: compare step_ns with .timeline(latency=0.5)",
            ),
        }
        answer = reading.get(letter)
        said = answer if isinstance(answer, Mapping) else {}
        for found, (key, fact) in zip(wrong.values(), asked.items(), strict=True):
            right, where, expected, hint = fact
            for v in laws.diagnosis_law(said, {key: right}):
                message = f"{where}: {v.message}"
                found.append(Violation(v.law, message, expected, hint))
    for sentence, violations in wrong.items():
        sheet.verify(sentence, violations, list_all=True)
    owner = three_runs()["C"].messages()[-1].names[-1]
    truth = {"tail": frozenset({owner, f"grad {owner}", owner.partition(".")[0]})}
    hint = "which collective ends last, and what are its parts called?"
    tail = [replace(v, hint=hint) for v in laws.diagnosis_law(reading, truth)]
    sheet.verify(TAIL, tail)


# -- 6.6: a setting is known by its messages, its copies and its step

WISHES = ("one message", "no copies", "unused parameter", "short step")
KNOWN = "every wish has keyword arguments that DDP takes"
ONE = "'one message': the third step sends all its gradients in one message"
NO_COPIES = "'no copies': the third step copies no gradient into a bucket"
UNUSED = "'unused parameter': a layer that gets no gradient does not stop the training"
SHORT = "'short step': at most a fifth of what there was to gain is lost"


@exercise(
    "6.6",
    title="settings of DDP",
    solution="wishes",
    verifies=(KNOWN, ONE, NO_COPIES, UNUSED, SHORT),
    optional=True,
    timeout_s=120.0,
)
def grade_settings(sheet: Sheet, wishes: Mapping[str, Mapping[str, Any]]) -> None:
    """Run DDP with what the learner chose for each wish."""
    sheet.ran("DDP, three steps of a small transformer on 2 ranks, for each wish")
    runs = {}
    for wish in WISHES:
        settings = wishes.get(wish) if isinstance(wishes, Mapping) else None
        if not isinstance(settings, Mapping):
            sheet.expect(KNOWN, False, seen=f"no settings for {wish!r}")
            continue
        runs[wish] = try_with(settings, uses_all=wish != "unused parameter")
        usable = not runs[wish].error or wish == "unused parameter"
        sheet.expect(KNOWN, usable, seen=f"{wish!r}: {_line(runs[wish])}")
    sheet.stop_if_wrong()
    one, copies, unused, short = (runs[wish] for wish in WISHES)
    whole, best, worst = net_bytes(), best_ns(), worst_ns()
    sheet.expect(
        ONE,
        len(one.messages) == 1 and one.messages[0] >= whole,
        seen=_line(one),
        expected=f"one message of {whole / MIB:.2f} MiB",
    )
    sheet.expect(NO_COPIES, copies.copies == 0, seen=_line(copies), expected="0 copies")
    sheet.expect(
        UNUSED,
        not unused.error,
        seen=_line(unused),
        expected="three steps",
        hint="DDP has to look for parameters without gradient, if you ask it to",
    )
    sheet.expect(
        SHORT,
        regret(short.step_ns, best, worst) <= 0.20,
        seen=f"{_line(short)}; the best size takes {best / 1e6:.1f} ms",
        expected=f"at most {(best + 0.2 * (worst - best)) / 1e6:.1f} ms",
        hint="n* = sqrt(Tb / alpha), then M / n*",
    )


def _line(found: DdpRun) -> str:
    """The line without its columns."""
    return " ".join(str(found).split())


def best_ns() -> int:
    """The step with buckets of a good size; a test looks for better and worse ones."""
    return try_with({"bucket_cap_mb": 0.3}).step_ns


def worst_ns() -> int:
    """The step with one message, the worse end."""
    return try_with({"bucket_cap_mb": 25}).step_ns


# -- 6.7

HALF, TWICE = turn.what_if
TASKS = KnobTasks(
    turn,
    usable="every setting is one that the sliders have",
    measure=lambda s: {
        "half": turn.saved_percent(s, HALF),
        "twice": turn.saved_percent(s, TWICE),
    },
    seen="half the latency saves {half:.1f} %, twice the bandwidth {twice:.1f} %",
    tasks=(
        KnobTask(
            "latency",
            "half the latency saves 15 % or more, twice the bandwidth under 8 %",
            lambda n: n["half"] >= 15 and n["twice"] < 8,
        ),
        KnobTask(
            "bandwidth",
            "twice the bandwidth saves 15 % or more, half the latency under 8 %",
            lambda n: n["twice"] >= 15 and n["half"] < 8,
        ),
        KnobTask(
            "neither",
            "neither saves 2 %",
            lambda n: n["half"] < 2 and n["twice"] < 2,
        ),
        KnobTask(
            "25 MiB loses",
            "buckets of 25 MiB take 10 % longer than the best bucket",
            lambda n: n["lost"] >= 10,
            seen="25 MiB takes {lost:.1f} % longer than the best",
            expected="10 % or more",
            hint="when is latency expensive, and when is there little to hide behind?",
            measure=lambda s: {"lost": lost_percent(s)},
        ),
    ),
)
SETTINGS, IS_LATENCY, IS_WIRE, IS_NEITHER, IS_LOST = TASKS.sentences


def lost_percent(settings: Settings) -> float:
    """How much longer 25 MiB takes than the best bucket of the slider, in percent."""
    sizes = KNOBS["bucket_mib"].values
    steps = {mib: turn(**{**settings, "bucket_mib": mib}).step_ns for mib in sizes}
    return 100 * (steps[25] / min(steps.values()) - 1)


@exercise(
    "6.7",
    title="knobs",
    solution="found",
    verifies=TASKS.sentences,
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_knobs(sheet: Sheet, found: Settings) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your four settings, each resolved again")
    TASKS.grade(sheet, found)
