"""The graders of the extras 1.7 to 1.9: what messages cost, and what overlap saves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import nan
from typing import Any

from overlaplab.grading import forms
from overlaplab.grading.answered import as_whole
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import as_number, find_slip, is_close, write_number
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab_course.lab01 import messages
from overlaplab_course.lab01.broken import forecast as broken_forecast
from overlaplab_course.lab01.given import NS_PER_MS, pair_timeline
from overlaplab_course.lab01.messages import LINKS, Promise

LAB = Declared(__file__)

# 1.7: the claim ("30 to 50 % at hundreds of GPUs") is true, far too high and far too
# low at settings of the learner's choice: it says nothing without tokens and link.

COMPUTE, MESSAGE, USABLE, HOLDS, LESS, MORE = LAB.sentences("1.7")
Share = Callable[[int, int, Hardware], Any]


@LAB.grader("1.7")
def grade_share(sheet: Sheet, share: Share, found: Mapping[str, Any]) -> None:
    """The function against runs of one rank for all; each setting alone."""
    sheet.ran("your share from 2 to 4,096 GPUs, each step run by one rank for all")
    # Nothing but latency: whoever has another share here has another Tc.
    link = Link(100_000_000, 10**18, source="to find out which side is wrong")
    name = "a link with latency only"
    probe = replace(find_hardware("ethernet-100g"), name=name, link=link)
    if all(_judge_computing(sheet, share, probe, *s) for s in ((8, 8192), (64, 1024))):
        for hardware, num_gpus, tokens in itertools.product(
            map(find_hardware, LINKS), (*messages.GPUS, 2), (512, 8192)
        ):
            said, tc, tm, facts = _ask(share, hardware, num_gpus, tokens)
            said_tm = facts["tc"] * said / (1 - said) if 0 <= said < 1 else 0.0
            fine = is_close(said, tm / (tc + tm))
            LAB.expect(sheet, MESSAGE, fine, said_tm=said_tm, **facts)
    claims = LAB.cases("1.7", "entry")
    problems = {s: p for s, name in claims.items() if (p := _problem(name, found))}
    LAB.expect(sheet, USABLE, not problems, problems="\n".join(problems.values()))
    for sentence, (low, high) in LAB.cases("1.7", "between").items():
        if sentence in problems:
            continue
        setting = dict(found[claims[sentence]])
        setting |= {key: as_whole(setting[key]) for key in ("num_gpus", "tokens")}
        timeline = messages.step_without_overlap(**setting)
        right = messages.share_of(timeline)
        title = f"your {claims[sentence]!r}: {100 * right:.0f} % communication"
        sheet.show(timeline, title=title)
        hint = LAB.cases("1.7", "too_high" if right > high else "too_low")[HOLDS]
        facts = {"setting": setting, "percent": 100 * right}
        LAB.expect(sheet, sentence, low <= right <= high, hint=hint, **facts)


def _ask(
    share: Share, hardware: Hardware, num_gpus: int, tokens: int
) -> tuple[float, int, int, dict[str, Any]]:
    """The answer, Tc and Tm in ns, and what a verdict says of them."""
    answer = share(num_gpus, tokens, hardware)
    try:
        said = float(answer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"share returned {answer!r:.100}; expected a number from 0 to 1"
        ) from error
    report = messages.step_without_overlap(num_gpus, tokens, hardware).report()
    tc, tm = report.compute_ns, report.communication_ns
    where = f"{num_gpus} GPUs, {tokens} tokens each, {hardware.name}: {said:.4g}"
    return said, tc, tm, {"where": where, "tc": tc / NS_PER_MS, "tm": tm / NS_PER_MS}


def _judge_computing(
    sheet: Sheet, share: Share, probe: Hardware, num_gpus: int, tokens: int
) -> bool:
    """Tc, on a link on which Tm is the latency."""
    said, tc, tm, facts = _ask(share, probe, num_gpus, tokens)
    if is_close(said, tm / (tc + tm)):
        return sheet.expect(COMPUTE, True)
    of_tc, of_tm, *_ = LAB.tables("1.7")
    right, odds = tm / (tc + tm), said / (1 - said) if said < 1 else nan
    parts = {"of_tc": tm / tc, "computing": 1 - right, "percent": 100 * right}
    hint = find_slip(said, of_tm["slips"], parts)
    factors = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)
    if any(is_close(odds, factor * tm / tc) for factor in factors):
        hint = hint or of_tm["units"]
    if hint or said < 1e-6:
        seen, expected = facts["where"], f"Tm = {facts['tm']:.4g} ms beside Tc"
        hint = hint or of_tm["no_wire"]
        return sheet.expect(MESSAGE, False, seen=seen, expected=expected, hint=hint)
    said_tc = facts["tm"] * (1 - said) / said
    times = {"of_all": 1 / num_gpus, "of_one": num_gpus, "two": 1 / 3, "four": 2 / 3}
    hint = find_slip(said_tc / facts["tc"], of_tc["slips"], times)
    return LAB.expect(sheet, COMPUTE, False, hint=hint, said_tc=said_tc, **facts)


def _problem(name: str, found: object) -> str:
    setting = found.get(name) if isinstance(found, Mapping) else None
    if setting is None:
        return f"you have not filled in {name!r}"
    if not isinstance(setting, Mapping) or {*setting} != {"num_gpus", "tokens", "link"}:
        return f"{name!r} is {setting!r:.80}; expected num_gpus, tokens and link"
    for key, low, high in (("num_gpus", 100, 999), ("tokens", 256, 65_536)):
        value = setting[key]
        if as_whole(value) is None:
            return f"{name!r}: {key} is {value!r}, not a whole number"
        if not low <= value <= high:
            return f"{name!r}: {key} is {value}; expected {low} to {high}"
    link = setting["link"]
    return "" if link in LINKS else f"{name!r}: link is {link!r}, not one of {LINKS}"


# 1.8

KNOBS_USABLE, IS_MUCH, IS_LITTLE, IS_TOO_MUCH = LAB.sentences("1.8")
TASKS = forms.KnobTasks(
    messages.turn,
    LAB.tables("1.8"),
    condition=lambda s: LAB.tables("1.8")[0]["yes"] if "yes" in s.values() else "",
    draw=True,
    ran="your three settings, each resolved again, with and without overlap",
)
LAB.grader("1.8")(TASKS.grade)

# 1.9: the diagnosis is of the learner's own five jobs; one of them is promised a step
# that is shorter than its own messages.

WHICH, PROMISED, SAME, CAPPED, BEST = LAB.sentences("1.9")


def bad_letter(number: int) -> str:
    """The job whose promise is shorter than the bound."""
    (letter,) = (
        letter
        for letter, job in messages.jobs(number).items()
        if broken_forecast(*job)[0] < max(job.tc, job.tm)
    )
    return letter


@lru_cache(maxsize=1)
def unseen() -> tuple[Promise, ...]:
    """Jobs to try a function on, the full promise on either side first."""
    draw = random.Random(109).randrange
    drawn = [(draw(0, 101) / 100, draw(5, 200), draw(1, 200)) for _ in range(80)]
    first = ((1.0, 100, 50), (1.0, 50, 100), (0.5, 50, 100))
    return tuple(Promise(tc, tm, a) for a, tc, tm in (*first, *drawn))


@LAB.grader("1.9")
def grade_repair(
    sheet: Sheet,
    my_number: int,
    diagnosis: Mapping[str, Any],
    forecast: Callable[[float, float, float], Any],
) -> None:
    """The diagnosis from the own jobs; the repair on many that nobody has seen."""
    forms.need_dict(diagnosis, "diagnosis")
    sheet.ran(f"your five jobs, then your forecast of {len(unseen())} others")
    _judge_diagnosis(sheet, diagnosis, int(my_number))
    slips = LAB.cases("1.9", "slips")
    for tc, tm, a in unseen():
        wanted = "(step, speed-up, best speed-up)"
        said = forms.read_numbers(forecast(tc, tm, a), 3, "forecast", wanted)
        serial, bound = (
            pair_timeline(tc, tm, at_once=at_once).step_ns / NS_PER_MS
            for at_once in (False, True)
        )
        formula = broken_forecast(tc, tm, a)[0]
        sentence, right = CAPPED, bound
        if formula >= bound - 1e-9:
            sentence, right = SAME, formula
        step, up, best = said
        facts: dict[str, Any] = {
            "where": f"Tc = {tc} ms, Tm = {tm} ms, a = {a:g}",
            "said": [write_number(number, ".4g") for number in said],
            "right": (right, serial / right, serial / bound),
            "bound": bound,
        }
        hint = find_slip(step, slips.get(sentence, {}), facts)
        fine = is_close(step, right) and is_close(up, serial / right)
        LAB.expect(sheet, sentence, fine, hint=hint, **facts)
        LAB.expect(sheet, BEST, is_close(best, serial / bound), **facts)


def _judge_diagnosis(sheet: Sheet, diagnosis: Mapping[str, Any], number: int) -> None:
    own, letter, said = messages.jobs(number), bad_letter(number), diagnosis.get("job")
    word, bad = str(said).strip().upper(), own[letter]
    seen = f"job is {said!r}"
    if word in own:
        job = own[word]
        at_once = pair_timeline(job.tc, job.tm, at_once=True)
        sheet.show(at_once, title=f"job {word}, all that can be at once")
        seen = f"{word} can be had: its step is not under max(Tc, Tm)"
    LAB.expect(sheet, WHICH, word == letter, seen=seen)
    shortest = max(bad.tc, bad.tm)
    truth = {"promised_ms": broken_forecast(*bad)[0], "shortest_ms": shortest}
    answers = {key: as_number(diagnosis.get(key)) for key in truth}
    wrong = [
        f"{key} is {diagnosis.get(key)!r}"
        for key, answer in answers.items()
        if answer is None or abs(answer - truth[key]) >= 0.05
    ]
    LAB.expect(sheet, PROMISED, not wrong, wrong=", ".join(wrong))
