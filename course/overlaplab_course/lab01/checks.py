"""The graders of lab 01: here of 1.1 to 1.4, how long a step is."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import nan
from typing import Any

from overlaplab.grading import forms
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import as_number, find_slip, is_close, write_number
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01 import checks_messages, given, reference  # noqa: F401
from overlaplab_course.lab01.checks_extra import LAB  # it registers 1.7 to 1.9

# 1.1: all gradients are needed for the update, so two chains bound the step of the
# learner's number. One message per layer reaches the longer one, as resolving shows.

LAST, ALL, SHORTEST = LAB.sentences("1.1")


@LAB.grader("1.1")
def grade_shortest(sheet: Sheet, my_number: int, chains: Mapping[str, Any]) -> None:
    """Each number alone; the shortest step is drawn for who has found it."""
    forms.need_dict(chains, "chains")
    mine = given.job(int(my_number))
    timeline = mine.timeline()
    step_ns = timeline.step_ns
    sheet.ran("your step with no overlap, and with a message per layer")
    sheet.show(mine.timeline(mine.num_layers), title="your step, no overlap yet")
    sheet.note(f"a message per layer reaches it: {step_ns / given.NS_PER_MS:g} ms")
    all_right = True
    for one, right, others in zip(LAB.tables("1.1"), *_chains(mine), strict=True):
        key = one["entry"]
        said = as_number(chains.get(key))
        seen = forms.not_filled_in(chains, key)
        slip = find_slip(said, one["slips"], others, operator.eq)
        if isinstance(chains.get(key), str):
            slip = "that is a string; expected a number"
        seen += f"\n{slip}" if slip else ""
        fine = said is not None and abs(said - right) < 0.01
        all_right &= sheet.expect(one["says"], fine, seen=seen, expected=one["how"])
    if all_right:  # before that it would be the answer
        title = "your step, a message per layer"
        sheet.show(timeline, step_ns=step_ns, target_ns=step_ns, title=title)


def _chains(mine: given.Job) -> tuple[Sequence[float], Sequence[Mapping[str, float]]]:
    """The two chains and the step; and what is said in the place of each."""
    _, forward, layer, message, update = mine
    compute, communication = mine.compute_ms, mine.communication_ms
    last, serial = compute + message, compute + communication
    all_ = forward + layer + communication + update
    sides = {"compute": compute, "communication": communication, "serial": serial}
    bound = max(compute, communication)
    return (last, all_, mine.timeline().step_ns / given.NS_PER_MS), (
        {**sides, "no_update": last - update, "no_forward": last - forward},
        {**sides, "no_update": all_ - update, "no_forward": all_ - forward,
         "no_layer": all_ - layer},
        {**sides, "shorter": min(last, all_), "bound": bound},
    )  # fmt: skip


# 1.2: truth is a pair of operators that need nothing of one another, resolved one after
# the other and at once: nothing overlaps better.

SERIAL, BOUND, SENDING, SPEEDUP = LAB.sentences("1.2")


@lru_cache(maxsize=1)
def pairs() -> tuple[tuple[int, int], ...]:
    """(Tc, Tm) in ms; those of the lesson, one of each without a side, many more."""
    draw = random.Random(101)
    many = [(draw.randrange(1, 200), draw.randrange(1, 200)) for _ in range(40)]
    return (
        (100, 50), (100, 25), (40, 40), (50, 100), (30, 90), (70, 0), (0, 20), *many
    )  # fmt: skip


@LAB.grader("1.2")
def grade_bounds(sheet: Sheet, bounds: Callable[[float, float], Any]) -> None:
    """Each number against two timelines of the same two operators."""
    sheet.ran(f"bounds(tc, tm) on {len(pairs())} pairs; each pair run both ways")
    slips, fine = LAB.cases("1.2", "slips"), True
    for tc, tm in pairs():
        said = _ask("bounds", bounds, tc, tm)
        at_once = given.pair_timeline(tc, tm, at_once=True)
        serial = given.pair_timeline(tc, tm, at_once=False).step_ns / given.NS_PER_MS
        best = at_once.step_ns / given.NS_PER_MS
        others = {"shorter": min(tc, tm), "half": (tc + tm) / 2}
        factors = {
            "by_the_formula": 1 + tm / tc if tm > tc > 0 else nan,
            "upside_down": max(tc, tm) / (tc + tm),
            "percent": 100 * min(tc, tm) / (tc + tm),
        }
        for answer, right, sentence, names in (
            (said[0], serial, SERIAL, {}),
            (said[1], best, SENDING if tm > tc else BOUND, others),
            (said[2], serial / best, SPEEDUP, factors if tc and tm else {}),
        ):
            if is_close(answer, right):
                continue
            hint = find_slip(answer, slips.get(sentence, {}), names)
            facts = {"tc": tc, "tm": tm, "serial": serial, "best": best}
            text = write_number(answer)
            LAB.expect(sheet, sentence, False, hint=hint, said=text, **facts)
            if fine:
                title = f"{tc} and {tm} ms at once: nothing is shorter"
                sheet.show(at_once, title=title)
            fine = False
    for sentence in (SERIAL, BOUND, SENDING, SPEEDUP):
        sheet.expect(sentence, True)  # only now: who breaks off has earned none


def _ask(name: str, function: Callable[..., Any], *args: float) -> list[float | None]:
    """Three numbers; a division by zero is described with its arguments."""
    wanted, zero = {
        "bounds": ("(serial, bound, speed-up)", "one of the times may be 0"),
        "ratios": (
            "(overlap fraction, saved fraction, efficiency)",
            "expected None for that ratio",
        ),
    }[name]
    try:
        return forms.read_numbers(function(*args), 3, name, wanted)
    except ZeroDivisionError as error:
        raise ZeroDivisionError(f"division by zero in {name}{args}; {zero}") from error


# 1.3: four cards: three runs and a promise. Times alone come from the same step on a
# GPU that does nothing else; the overlap fraction from the run itself, as a profiler
# would say it.

FORMULA = LAB.sentences("1.3")[0]
_CLOSE_MS = 0.15  # numbers to one decimal
WHYS = {one["word"]: one for one in LAB.tables("1.3")[1:]}


@LAB.grader("1.3")
def grade_formula(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Numbers first; then each card's diagnosis, by its own sentence."""
    forms.need_dict(reading, "reading")
    sheet.ran("the runs of your cards again, and the formula for each")
    wrong, figures = [], []
    for letter, card in given.cards(int(my_number)).items():
        entry = reading.get(letter)
        entry = entry if isinstance(entry, Mapping) else {}
        said, why = as_number(entry.get("formula_ms")), entry.get("verdict")
        if said is None:
            wrong.append(f"{letter}: formula_ms is {entry.get('formula_ms')!r}")
        elif abs(said - card.formula_ms) > _CLOSE_MS:
            wrong.append(f"{letter}: {said:g} ms{_formula_slip(card, said)}")
        word = why.strip().casefold() if isinstance(why, str) else ""
        if word != card.why and card.timeline is not None:
            figures.append((card.timeline, f"card {letter}"))
        truth, expected = WHYS[card.why], f"one of {', '.join(WHYS)}"
        if word in WHYS:
            expected = "the word that the numbers beside it call for"
        counted = said is not None and abs(said - card.formula_ms) <= _CLOSE_MS
        facts = _describe(card) if counted else "the formula's number comes first"
        seen = f"{letter}: you say {why!r}; {facts}"
        if word not in WHYS:  # the letter beside the sentence would be the answer
            said_so = "no verdict yet" if why is None else f"the verdict {why!r}"
            seen = f"a card has {said_so}"
        hint, fine = truth["help"] if word in WHYS else "", word == card.why
        sheet.expect(truth["says"], fine, seen=seen, expected=expected, hint=hint)
    for timeline, title in figures[:1]:
        sheet.show(timeline, title=title)
    LAB.expect(sheet, FORMULA, not wrong, wrong="\n".join(wrong))


def _formula_slip(card: given.Card, said: float) -> str:
    run_ms = card.timeline.step_ns / given.NS_PER_MS if card.timeline else nan
    others = {
        "a_for_the_rest": card.tc_ms + card.a * card.tm_ms,
        "run": said if abs(said - run_ms) < 0.15 else nan,
        "bound": max(card.tc_ms, card.tm_ms),
    }
    near = ": give it to one decimal" if abs(said - card.formula_ms) <= 0.51 else ""
    return find_slip(said, LAB.tables("1.3")[0]["slips"], others) or near


def _describe(card: given.Card) -> str:
    """The numbers that decide."""
    run, promise = LAB.cases("1.3", "describe")[FORMULA]
    if card.timeline is None:
        return str(promise.format(card=card))
    report = card.timeline.report()
    times_ns = report.step_ns, report.compute_ns, report.exposed_ns
    step, compute, exposed = (ns / given.NS_PER_MS for ns in times_ns)
    idle = step - compute - exposed
    return str(run.format(card=card, step=step, compute=compute, idle=idle))


# 1.4: times alone are those of each operator with nothing beside it, times in the run
# are what its timeline shows. Without contention and gaps all agree with `report()`.

OVERLAP, SAVED, EFFICIENCY, NONE = LAB.sentences("1.4")
Ratios = Callable[[float, float, float, float, float], Any]


@lru_cache(maxsize=1)
def unseen() -> tuple[given.Totals, ...]:
    """Runs to try a function on: with and without contention, gaps, either side."""
    draw = random.Random(104)
    found = []
    for _ in range(60):
        number = draw.randrange(1, 8)
        program = given.write_step(
            [draw.randrange(1, 9) for _ in range(number)],
            [draw.randrange(1, 12) for _ in range(number)],
            per_bucket=draw.randrange(1, 4),
            forward_ms=draw.randrange(0, 9),
            update_ms=draw.randrange(0, 5),
        )
        launching = replace(
            given.CHALK, launch_ns=draw.randrange(1, 9) * given.NS_PER_MS
        )
        hardware = draw.choice((given.CHALK, given.CONTENDED, launching))
        found.append(given.totals_of(resolve(program, hardware)))
    return tuple(found)


@lru_cache(maxsize=1)
def one_sided() -> tuple[given.Totals, ...]:
    """Nothing to send; nothing to compute; neither."""
    computing = resolve(given.write_step([5] * 4, [0] * 4, per_bucket=4), given.CHALK)
    only = computing.where(lambda s: s.kind == "compute")
    sending = resolve(given.write_step([0] * 4, [7] * 4), given.CHALK)
    wire = sending.where(lambda s: s.kind == "communication")
    return (
        given.totals_of(only),
        given.totals_of(wire),
        given.totals_of(Timeline.of(())),
    )


@LAB.grader("1.4")
def grade_ratios(sheet: Sheet, ratios: Ratios) -> None:
    """Each ratio on the lesson's run and on unseen ones; then the empty sides."""
    runs, tables = (given.contended(), *unseen()), LAB.tables("1.4")[:3]
    sheet.ran(f"ratios on {len(runs)} runs; then on three with a side missing")
    fine = True
    for totals in runs:
        truth = reference.ratios(*totals)
        answers = _ask("ratios", ratios, *totals)
        for one, said, right in zip(tables, answers, truth, strict=True):
            hint = find_slip(said, one["slips"], _other_ratios(totals, truth, right))
            good, text = is_close(said, right), write_number(said, ".3f")
            LAB.expect(sheet, one["says"], good, hint=hint, totals=totals, said=text)
            if fine and not good:
                sheet.show(totals.timeline, title="the run on which it is wrong")
            fine &= good
    sheet.stop_if_wrong()
    for totals in one_sided():
        answers, truth = _ask("ratios", ratios, *totals), reference.ratios(*totals)
        wrong = "\n".join(
            f"{one['ratio']} is {write_number(said, '.3f')}"
            for one, said, right in zip(tables, answers, truth, strict=True)
            if said is not right and (right is None or not is_close(said, right))
        )
        LAB.expect(sheet, NONE, not wrong, totals=totals, wrong=wrong)


def _other_ratios(
    totals: given.Totals, truth: Sequence[float], right: float
) -> Mapping[str, float]:
    """What is said in the place of the right ratio."""
    tc, tm, _, hidden, step = totals
    return {
        "none_below_0": 0 if right < 0 else nan,
        "overlap": truth[0],
        "saved": truth[1],
        "over_tm": hidden / tm,
        "over_tc": (tc + tm - step) / tc,
        "percent": 100 * right,
    }
