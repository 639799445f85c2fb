"""The graders of 1.6 to 1.9: what messages cost, and what overlap saves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import (
    KnobTask,
    KnobTasks,
    Settings,
    as_number,
    is_close,
    need_dict,
    read_numbers,
)
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01 import given
from overlaplab_course.lab01.broken import forecast as broken_forecast
from overlaplab_course.lab01.given import (
    FASTER,
    LINKS,
    NS_PER_MS,
    OVERLAP,
    WIDER,
    Promise,
    count_of,
    given_share,
    jobs,
    pair_timeline,
    step_without_overlap,
    turn,
)

# 1.6: what an all-reduce takes, with bits, bytes, latencies and the ring.

ONE = "one message between two ranks: latency, and its bits over the link's"
MANY = "many messages in a row: a latency each, the bytes once"
RING = "many ranks: each byte crosses a link 2 (N - 1) / N times"
NOBODY = "one rank alone sends nothing"

Send = Callable[[int, float, float, int, int], Any]


class Message(NamedTuple):
    """What is asked: arguments of `send_ms`."""

    num_bytes: int
    gbit_per_s: float
    latency_us: float
    num_messages: int
    num_ranks: int

    def __str__(self) -> str:
        return (
            f"{self.num_bytes:,} bytes, {self.gbit_per_s:g} Gbit/s, "
            f"{self.latency_us:g} us, {count_of(self.num_messages, 'message')}, "
            f"{count_of(self.num_ranks, 'rank')}"
        )


def resolved(message: Message) -> Timeline:
    """The messages in a row, nothing beside them."""
    b = ProgramBuilder(num_ranks=1, represents=message.num_ranks)
    for _ in range(message.num_messages):
        size = message.num_bytes // message.num_messages
        b.collective(0, "all_reduce", bytes=size)
    link = given.link_of(message.gbit_per_s, message.latency_us)
    return resolve(b.build(), link)


@lru_cache(maxsize=1)
def cases() -> tuple[tuple[str, Message], ...]:
    """(sentence, message), the lesson's first."""
    draw = random.Random(106)

    def drawn(number: int, ranks: int = 2) -> Message:
        size = number * draw.randrange(100_000, 100_000_000)
        rate = draw.choice((10, 25, 100, 400, 2720))
        return Message(size, rate, draw.choice((5, 44, 100, 500)), number, ranks)

    found = [(ONE, Message(10**9, 100, 100, 1, 2))]
    found += [(ONE, drawn(1)) for _ in range(12)]
    found += [(MANY, Message(10**9, 100, 100, 40, 2))]
    found += [(MANY, drawn(draw.randrange(2, 60))) for _ in range(12)]
    for ranks in (3, 4, 8, 16, 64, 512):
        found += [(RING, drawn(number, ranks)) for number in (1, 5)]
    found += [(NOBODY, drawn(3, 1)) for _ in range(2)]
    return tuple(found)


@exercise(
    "1.6",
    title="what a message takes",
    solution="send_ms",
    verifies=(ONE, MANY, RING, NOBODY),
    points=2,
    timeout_s=20.0,
)
def grade_messages(sheet: Sheet, send_ms: Send) -> None:
    """Simple messages first; a slip there is not described again with more ranks."""
    sheet.ran(f"send_ms on {len(cases())} links and sizes, each on the virtual cluster")
    wrong: set[str] = set()
    for sentence, message in cases():
        # ONE is a part of MANY and RING: what fails there fails everywhere.
        if wrong - {sentence} and sentence != NOBODY:
            continue
        timeline = resolved(message)
        took_ms = timeline.end_ns / NS_PER_MS
        answer = send_ms(*message)
        said = as_number(answer)
        told = f"{answer!r:.60}" if said is None else f"{said:.6g} ms"
        fine = sheet.expect(
            sentence,
            said is not None and is_close(said, took_ms),
            seen=f"{message}: {told}",
            expected=f"{took_ms:.4g} ms" if said is not None else "a number of ms",
            hint=_slip_in(said, message, took_ms) if said is not None else "",
        )
        if not fine and not wrong:
            title = f"{message.num_messages} of these messages, run"
            sheet.show(timeline if message.num_ranks > 1 else None, title=title)
        wrong |= set() if fine else {sentence}


def _slip_in(said: float, message: Message, took_ms: float) -> str:
    """The slip by which the answer is off, "" if it is none that people make."""
    if not took_ms:
        return ""
    number, ranks = message.num_messages, message.num_ranks
    one_ms = message.latency_us / 1000
    latency_ms = number * one_ms
    wire_ms = took_ms - latency_ms
    crossings = 2 * (ranks - 1) / ranks
    gigabits = "Gbit/s is 10**9 bits; GiB and GB differ"
    chunks = (
        "the ring works in pieces: with more ranks a byte crosses hardly more often"
    )
    each_pays = "each message pays the latency"
    together = "num_bytes is all of them together"
    once = "here alpha is paid once a message, whatever the number of ranks"
    slips = {
        latency_ms + wire_ms / 8: "a byte is 8 bits, and links are sold in bits",
        latency_ms + wire_ms / 1.024**3: gigabits,
        latency_ms + wire_ms * 1e9 / 2**30: gigabits,
        took_ms / 1000: "that is in s; asked for are ms",
        1000 * took_ms: "that is in us; asked for are ms",
        latency_ms * 1000 + wire_ms: "the latency is given in us",
        latency_ms + wire_ms / crossings: "in a ring each byte crosses more than once",
        latency_ms + wire_ms * (ranks - 1) / crossings: chunks,
        latency_ms + wire_ms * ranks / crossings: chunks,
        latency_ms + wire_ms / 2: "a sum must come back: hence the 2 in the ring's "
        "2 (N - 1) / N",
        one_ms + wire_ms: each_pays,
        latency_ms + wire_ms * number: together,
        latency_ms + wire_ms / number: together,
        wire_ms: each_pays,
        one_ms + wire_ms * number: f"{together}; the latency is what each message pays",
        wire_ms + latency_ms * 2 * (ranks - 1): once,
        wire_ms + latency_ms * (ranks - 1): once,
        wire_ms + latency_ms * crossings: once,
        wire_ms + latency_ms * math.log2(ranks): once,
    }
    wrong = {value: why for value, why in slips.items() if not is_close(value, took_ms)}
    return next((why for value, why in wrong.items() if is_close(said, value)), "")


# 1.7: the claim ("30 to 50 % at hundreds of GPUs") is true, far too high and far too
# low at settings of the learner's choice: it says nothing without tokens and link.

COMPUTE = "Tc: 6 FLOP a parameter and token, at the profile's bfloat16 rate"
MESSAGE = "Tm: one all-reduce of 2 bytes a parameter, latency and wire"
USABLE = "three settings with hundreds of GPUs, tokens and a link"
HOLDS = "claim holds: the share is 30 to 50 %"
LESS = "far less: the share is under 5 %"
MORE = "far more: the share is over 80 %"
_CLAIMS = (  # entry, sentence, bounds of the share
    ("claim holds", HOLDS, 0.30, 0.50, "from 30 to 50 %"),
    ("far less", LESS, 0.0, 0.05, "under 5 %"),
    ("far more", MORE, 0.80, 1.0, "over 80 %"),
)

Share = Callable[[int, int, Hardware], Any]


@exercise(
    "1.7",
    title="8 to 4,096 GPUs",
    solution=("share", "found"),
    verifies=(COMPUTE, MESSAGE, USABLE, HOLDS, LESS, MORE),
    points=2,
    optional=True,
    timeout_s=30.0,
)
def grade_share(sheet: Sheet, share: Share, found: Mapping[str, Any]) -> None:
    """The function against runs of one rank for all; each setting alone."""
    sheet.ran("your share from 2 to 4,096 GPUs, each step run by one rank for all")
    # Nothing but latency: whoever has another share here has another Tc.
    link = Link(100_000_000, 10**18, source="to find out which side is wrong")
    name = "a link with latency only"
    probe = replace(find_hardware("ethernet-100g"), name=name, link=link)
    if all(_judge_share(sheet, share, probe, *s) for s in ((8, 8192), (64, 1024))):
        for hardware in map(find_hardware, LINKS):
            for num_gpus in (*given.GPUS, 2):
                for tokens in (512, 8192):
                    _judge_share(sheet, share, hardware, num_gpus, tokens, of_tm=True)
    problems = {name: p for name, *_ in _CLAIMS if (p := _problem(name, found))}
    sheet.expect(
        USABLE,
        not problems,
        seen="\n".join(problems.values()),
        expected='such as {"num_gpus": 256, "tokens": 4096, "link": "h100-ib400"}',
    )
    for name, sentence, low, high, wanted in _CLAIMS:
        if name in problems:
            continue
        setting = found[name]
        num_gpus, tokens, link_name = (
            setting[k] for k in ("num_gpus", "tokens", "link")
        )
        timeline = step_without_overlap(find_hardware(link_name), num_gpus, tokens)
        right = given_share(num_gpus, tokens, link_name)
        title = f"your {name!r}: {100 * right:.0f} % communication"
        sheet.show(timeline, title=title)
        hint = "too low: fewer tokens a GPU are less to compute, and as much to send"
        if right > high:
            hint = (
                "too high: more tokens a GPU are more to compute, and as much to send"
            )
        seen = f"{dict(setting)}: {100 * right:.1f} %"
        fine = low <= right <= high
        sheet.expect(sentence, fine, seen=seen, expected=wanted, hint=hint)


def _judge_share(
    sheet: Sheet,
    share: Share,
    hardware: Hardware,
    num_gpus: int,
    tokens: int,
    *,
    of_tm: bool = False,
) -> bool:
    """Tc, on a link on which Tm is the latency; or Tm, where Tc is right."""
    answer = share(num_gpus, tokens, hardware)
    try:
        said = float(answer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"share returned {answer!r:.100}; expected a number from 0 to 1"
        ) from error
    report = step_without_overlap(hardware, num_gpus, tokens).report()
    tc, tm = report.compute_ns, report.communication_ns
    tc_ms, tm_ms = tc / NS_PER_MS, tm / NS_PER_MS
    right = is_close(said, tm / (tc + tm))
    where = f"{num_gpus} GPUs, {tokens} tokens each, {hardware.name}: {said:.4g}"
    if of_tm:
        its_tm = tc_ms * said / (1 - said) if 0 <= said < 1 else 0.0
        return sheet.expect(
            MESSAGE,
            right,
            seen=f"{where}; with Tc = {tc_ms:.1f} ms that is Tm = {its_tm:.4g} ms",
            expected=f"Tm = {tm_ms:.4g} ms",
            hint="2 bytes a parameter, whatever the number of GPUs; collective_ns "
            "knows the ring",
        )
    if right:
        return sheet.expect(COMPUTE, True)
    slip = _whole_slip(said, tc, tm)
    if slip or said < 1e-6:
        hint = slip or "collective_ns returns two numbers, both are time"
        expected = f"Tm = {tm_ms:.4g} ms beside Tc"
        return sheet.expect(MESSAGE, False, seen=where, expected=expected, hint=hint)
    its_tc = tm_ms * (1 - said) / said
    hint, times = "6 * parameters * tokens, over the rate of bfloat16", its_tc / tc_ms
    if is_close(times, 1 / num_gpus) or is_close(times, num_gpus):
        hint = "the tokens are those of one GPU, and each GPU has all parameters"
    elif is_close(times, 1 / 3) or is_close(times, 2 / 3):
        hint = "6 FLOP for each parameter and token: 2 forward, 4 backward"
    return sheet.expect(
        COMPUTE,
        False,
        seen=f"{where}; with Tm = {tm_ms:.1f} ms that is Tc = {its_tc:.3g} ms",
        expected=f"Tc = {tc_ms:.3g} ms",
        hint=hint,
    )


def _whole_slip(said: float, tc: int, tm: int) -> str:
    """Both sides right, put together wrongly."""
    if is_close(said, tm / tc):
        return "a share is of the whole: Tm / (Tc + Tm)"
    if is_close(said, tc / (tc + tm)):
        return "that is the share of computing"
    if is_close(said, 100 * tm / (tc + tm)):
        return "a fraction, not percent"
    factors = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)
    if said < 1 and any(is_close(said / (1 - said), f * tm / tc) for f in factors):
        return "collective_ns is in ns, FLOP over FLOP/s are seconds: bring both to one"
    return ""


def _problem(name: str, found: object) -> str:
    setting = found.get(name) if isinstance(found, Mapping) else None
    if setting is None:
        return f"you have not filled in {name!r}"
    if not isinstance(setting, Mapping) or {*setting} != {"num_gpus", "tokens", "link"}:
        return f"{name!r} is {setting!r:.80}; expected num_gpus, tokens and link"
    for key, low, high in (("num_gpus", 100, 999), ("tokens", 256, 65_536)):
        value = setting[key]
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name!r}: {key} is {value!r}, not a whole number"
        if not low <= value <= high:
            return f"{name!r}: {key} is {value}; expected {low} to {high}"
    link = setting["link"]
    return "" if link in LINKS else f"{name!r}: link is {link!r}, not one of {LINKS}"


# 1.8

IS_MUCH = "saves much: overlap saves 30 % or more"
IS_LITTLE = f"little to send: overlap saves under 2 %, {FASTER} 45 % or more"
IS_TOO_MUCH = f"much to send: overlap saves under 10 %, {WIDER} 40 % or more"
TASKS = KnobTasks(
    turn,
    usable="each entry has values that the sliders have, overlap at 'no'",
    measure=lambda s: {
        name: turn.saved_percent(s, change)
        for name, change in zip(
            ("overlap", "wider", "faster"), turn.what_if, strict=True
        )
    },
    tasks=(
        KnobTask("saves much", IS_MUCH, lambda n: n["overlap"] >= 30),
        KnobTask(
            "little to send",
            IS_LITTLE,
            lambda n: n["overlap"] < 2 and n["faster"] >= 45,
        ),
        KnobTask(
            "much to send",
            IS_TOO_MUCH,
            lambda n: n["overlap"] < 10 and n["wider"] >= 40,
        ),
    ),
    seen=f"overlap saves {{overlap:.1f}} %, {WIDER} {{wider:.1f}} %, {FASTER} "
    "{faster:.1f} %",
    hint="compare what is sent with the backward pass: half, equal, twice?",
    nothing="settings is empty. What a button keeps is gone with its kernel: paste "
    "into the cell what print(dict(knobs.kept)) shows",
    condition=lambda s: (
        "overlap is 'yes'; leave it at 'no', it is what is judged"
        if s.get(OVERLAP, "no") != "no"
        else ""
    ),
    draw=True,
)


@exercise(
    "1.8",
    title="when does overlap matter?",
    solution="settings",
    verifies=TASKS.sentences,
    optional=True,
    timeout_s=30.0,
)
def grade_knobs(sheet: Sheet, settings: Settings) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your three settings, each resolved again, with and without overlap")
    TASKS.grade(sheet, settings)


# 1.9: the diagnosis is of the learner's own five jobs; one of them is promised a step
# that is shorter than its own messages.

WHICH = "which job is promised a step that no schedule has"
PROMISED = "the promise, and the shortest step of that job"
SAME = "where a can be reached, the forecast is the one of before"
CAPPED = "where a cannot be reached, the step is the bound"
BEST = "the best speed-up is one that some schedule reaches"

Forecast = Callable[[float, float, float], Any]


def bad_letter(number: int) -> str:
    """The job whose promise is shorter than the bound."""
    (letter,) = (
        letter
        for letter, job in jobs(number).items()
        if broken_forecast(*job)[0] < max(job.tc, job.tm)
    )
    return letter


@lru_cache(maxsize=1)
def unseen() -> tuple[Promise, ...]:
    """Jobs to try a function on, the full promise on either side first."""
    draw = random.Random(109)
    drawn = []
    for _ in range(80):
        a = draw.randrange(0, 101) / 100
        drawn.append(Promise(draw.randrange(5, 200), draw.randrange(1, 200), a))
    first = Promise(100, 50, 1.0), Promise(50, 100, 1.0), Promise(50, 100, 0.5)
    return (*first, *drawn)


@exercise(
    "1.9",
    title="repair: a calculator that promises too much",
    solution=("my_number", "diagnosis", "forecast"),
    verifies=(WHICH, PROMISED, SAME, CAPPED, BEST),
    points=2,
    optional=True,
    timeout_s=20.0,
)
def grade_repair(
    sheet: Sheet, my_number: int, diagnosis: Mapping[str, Any], forecast: Forecast
) -> None:
    """The diagnosis from the own jobs; the repair on many that nobody has seen."""
    need_dict(diagnosis, "diagnosis")
    sheet.ran(f"your five jobs, then your forecast of {len(unseen())} others")
    _judge_diagnosis(sheet, diagnosis, int(my_number))
    for tc, tm, a in unseen():
        wanted = "(step, speed-up, best speed-up)"
        step, speed_up, best = read_numbers(forecast(tc, tm, a), 3, "forecast", wanted)
        serial, bound = (
            pair_timeline(tc, tm, at_once=at_once).step_ns / NS_PER_MS
            for at_once in (False, True)
        )
        formula = broken_forecast(tc, tm, a)[0]
        reachable = formula >= bound - 1e-9
        right = formula if reachable else bound
        where = f"Tc = {tc} ms, Tm = {tm} ms, a = {a:g}"
        hint = "" if reachable else "the messages alone take Tm"
        if reachable and step is not None and is_close(step, bound):
            hint = "the bound is the least, not the rule: lift only a step that is under it"
        sheet.expect(
            SAME if reachable else CAPPED,
            _near(step, right) and _near(speed_up, serial / right),
            seen=f"{where}: step {_number(step)}, speed-up {_number(speed_up)}",
            expected=f"step {right:g}, speed-up {serial / right:.4g}",
            hint=hint,
        )
        sheet.expect(
            BEST,
            _near(best, serial / bound),
            seen=f"{where}: best speed-up {_number(best)}",
            expected=f"{serial / bound:.4g}: at once they take {bound:g} ms",
            hint="behind Tc there is no room for more than Tc of messages",
        )


def _near(said: float | None, right: float) -> bool:
    return said is not None and is_close(said, right)


def _number(said: float | None) -> str:
    return "None" if said is None else f"{said:.4g}"


def _judge_diagnosis(sheet: Sheet, diagnosis: Mapping[str, Any], number: int) -> None:
    own, letter, said = jobs(number), bad_letter(number), diagnosis.get("job")
    word, bad = str(said).strip().upper(), own[letter]
    seen = f"job is {said!r}"
    if word in own:
        job = own[word]
        at_once = pair_timeline(job.tc, job.tm, at_once=True)
        sheet.show(at_once, title=f"job {word}, all that can be at once")
        seen = f"{word} can be had: its step is not under max(Tc, Tm)"
    sheet.expect(
        WHICH,
        word == letter,
        seen=seen,
        expected="the letter of the one job with a promise under max(Tc, Tm)",
    )
    truth = {
        "promised_ms": broken_forecast(*bad)[0],
        "shortest_ms": max(bad.tc, bad.tm),
    }
    answers = {key: as_number(diagnosis.get(key)) for key in truth}
    wrong = [
        f"{key} is {diagnosis.get(key)!r}"
        for key, answer in answers.items()
        if answer is None or abs(answer - truth[key]) >= 0.05
    ]
    sheet.expect(
        PROMISED,
        not wrong,
        seen=", ".join(wrong),
        expected="what the broken forecast says of that job, and its max(Tc, Tm)",
    )
