"""The graders of lab 06; those of its reducer stand in plan_checks and reducer_checks.

What they promise stands in exercises.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlaplab.grading import laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import KnobTasks, Settings, need_dict
from overlaplab.grading.laws import Violation, regret, regret_law
from overlaplab_course.lab06 import plan_checks, reducer_checks  # noqa: F401 (register)
from overlaplab_course.lab06.given import MIB, three_runs
from overlaplab_course.lab06.pairs import cases
from overlaplab_course.lab06.show import message_points
from overlaplab_course.lab06.trials import KNOBS, DdpRun, net_bytes, try_with, turn

LAB = Declared(__file__)
FIT, MISSED = LAB.sentences("6.0")


@LAB.grader("6.0")
def grade_fit(
    sheet: Sheet, latency_us: float, gbyte_per_s: float, missed_mib: float
) -> None:
    """Any way of fitting will do."""
    sheet.ran("your line at the five measured sizes")
    off = {}
    for mib, measured_us in message_points().items():
        predicted_us = float(latency_us) + mib * MIB / (float(gbyte_per_s) * 1e3)
        off[mib] = predicted_us / measured_us - 1
        if mib in (0, 25, 100):
            us: dict[str, Any] = {"predicted": predicted_us, "measured": measured_us}
            LAB.expect(sheet, FIT, abs(off[mib]) <= 0.10, mib=mib, **us)
    most, missed = max(off, key=lambda mib: abs(off[mib])), off.get(missed_mib, 0)
    LAB.expect(sheet, MISSED, missed_mib == most, mib=missed_mib, off=missed)


# -- the size: marked by what the choice loses, on pairs where every constant fails

USABLE, REGRET = LAB.sentences("6.4a")
AT_MOST = 0.20
LEAST_BYTES = 1024  # nobody means less


@LAB.grader("6.4a")
def grade_choice(sheet: Sheet, choose_cap: Callable[..., Any]) -> None:
    """Ask for a cap on each case and compare with the best of a sweep."""
    sheet.ran("choose_cap on 12 pairs of a model and a link, 4 ranks, alpha-beta")
    lost: dict[str, float] = {}
    smallest = float("inf")
    for case in cases():
        sizes, ready_ns = list(case.grad_bytes), list(case.ready_ns)
        answer = choose_cap(sizes, ready_ns, case.latency_ns, case.bytes_per_s)
        try:
            cap_bytes = float(answer)
        except (TypeError, ValueError):
            cap_bytes = 0.0
        good = 0 < cap_bytes < float("inf")
        LAB.expect(sheet, USABLE, good, name=case.name, answer=answer)
        sheet.stop_if_wrong()
        smallest = min(smallest, cap_bytes)
        best = case.best_cap_bytes
        described = (
            f"{case.name}: {cap_bytes / MIB:.1f} MiB takes "
            f"{case.step_ns(cap_bytes) / 1e6:.2f} ms, {best / MIB:.1f} MiB takes "
            f"{case.step_ns(best) / 1e6:.2f}, the worse end {case.worst_ns / 1e6:.2f}"
        )
        lost[described] = case.regret(cap_bytes)
    hint = LAB.hint(REGRET, "unit" if smallest < LEAST_BYTES else "")
    sheet.verify(REGRET, regret_law(lost, at_most=AT_MOST), hint=hint)


# -- the critical path, settings of DDP, knobs

LARGEST, COUNTERFACTUAL, TAIL = LAB.sentences("6.4b")


@LAB.grader("6.4b")
def grade_reading(sheet: Sheet, reading: Mapping[str, Any]) -> None:
    """Compare with the shares, and with what the resolver says of half the latency."""
    sheet.ran("runs A, B and C, each again with half the latency")
    need_dict(reading, "reading")
    wrong: dict[str, list[Violation]] = {LARGEST: [], COUNTERFACTUAL: []}
    seen, expected = LAB.cases("6.4b", "seen"), LAB.cases("6.4b", "expected")
    for letter, given in three_runs().items():
        timeline = given.timeline()
        shares = timeline.critical_path().shares
        saved = 1 - given.timeline(latency=0.5).step_ns / timeline.step_ns
        right: dict[str, object] = {
            "largest": max(shares, key=lambda share: shares[share]),
            "half_latency_saves_percent": 100 * saved,
        }
        answer = reading.get(letter)
        said = answer if isinstance(answer, Mapping) else {}
        for sentence, key in LAB.cases("6.4b", "asks").items():
            for v in laws.diagnosis_law(said, {key: right[key]}):
                facts = {"letter": letter, "name": given.name, "message": v.message}
                message = seen[sentence].format(**facts)
                wanted = expected[sentence].format(**facts)
                wrong[sentence].append(Violation(v.law, message, wanted))
    for sentence, violations in wrong.items():
        sheet.verify(sentence, violations, list_all=True)
    owner = three_runs()["C"].messages()[-1].names[-1]
    truth = {"tail": frozenset({owner, f"grad {owner}", owner.partition(".")[0]})}
    sheet.verify(TAIL, laws.diagnosis_law(reading, truth))


KNOWN, ONE, NO_COPIES, UNUSED, SHORT = LAB.sentences("6.6")


@LAB.grader("6.6")
def grade_settings(sheet: Sheet, wishes: Mapping[str, Mapping[str, Any]]) -> None:
    """Run DDP with what the learner chose; a setting is known by what it does."""
    sheet.ran("DDP, three steps of a small transformer on 2 ranks, for each wish")
    runs: dict[str, DdpRun] = {}
    for sentence, wish in LAB.cases("6.6", "wish").items():
        settings = wishes.get(wish) if isinstance(wishes, Mapping) else None
        if not isinstance(settings, Mapping):
            sheet.expect(KNOWN, False, seen=f"no settings for {wish!r}")
            continue
        run = runs[sentence] = try_with(settings, uses_all=sentence != UNUSED)
        usable = not run.error or sentence == UNUSED
        sheet.expect(KNOWN, usable, seen=f"{wish!r}: {_line(run)}")
    sheet.stop_if_wrong()
    best, worst, whole = best_ns(), worst_ns(), net_bytes()
    facts = {"mib": whole / MIB, "limit_ms": (best + 0.2 * (worst - best)) / 1e6}
    sent = runs[ONE].messages
    right = {
        ONE: len(sent) == 1 and sent[0] >= whole,
        NO_COPIES: runs[NO_COPIES].copies == 0,
        UNUSED: not runs[UNUSED].error,
        SHORT: regret(runs[SHORT].step_ns, best, worst) <= 0.20,
    }
    for sentence, expected in LAB.cases("6.6", "expected").items():
        seen = _line(runs[sentence])
        if sentence == SHORT:
            seen += f"; the best size takes {best / 1e6:.1f} ms"
        expected = expected.format(**facts)
        sheet.expect(sentence, right[sentence], seen=seen, expected=expected)


def _line(found: DdpRun) -> str:
    """The line without its columns."""
    return " ".join(str(found).split())


def best_ns() -> int:
    """The step with buckets of a good size; a test looks for better and worse ones."""
    return try_with({"bucket_cap_mb": 0.3}).step_ns


def worst_ns() -> int:
    """The step with one message, the worse end."""
    return try_with({"bucket_cap_mb": 25}).step_ns


SETTINGS, IS_LATENCY, IS_WIRE, IS_NEITHER, IS_LOST = LAB.sentences("6.7")


def lost_percent(settings: Settings) -> float:
    """How much longer 25 MiB takes than the best bucket of the slider, in percent."""
    sizes = KNOBS["bucket_mib"].values
    steps = {mib: turn(**{**settings, "bucket_mib": mib}).step_ns for mib in sizes}
    return 100 * (steps[25] / min(steps.values()) - 1)


TASKS = KnobTasks(
    turn,
    LAB.tables("6.7"),
    measures={"25 MiB loses": lambda s: {"lost": lost_percent(s)}},
    ran="your four settings, each resolved again",
)
LAB.grader("6.7")(TASKS.grade)
