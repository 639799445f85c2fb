"""Extra 1.7: the share of communication from 8 to 4,096 GPUs, and a claim about it.

The claim ("30 to 50 % at hundreds of GPUs") is true, far too high and far too low at
settings of the learner's choice: it says nothing without tokens and link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01.numbers import close
from overlaplab_course.lab01.steps import NS_PER_MS

PARAMETERS = 1_300_000_000
GPUS = (8, 16, 64, 512, 4096)
LINKS = ("h100-ib400", "ethernet-100g", "ethernet-25g")
HUNDREDS = (100, 999)
TOKENS = (256, 65_536)
GLOBAL_TOKENS = 4_194_304  # a batch of four million tokens, shared by all

COMPUTE = "Tc: 6 FLOP a parameter and token, at the profile's bfloat16 rate"
MESSAGE = "Tm: one all-reduce of 2 bytes a parameter, latency and wire"
USABLE = "three settings with hundreds of GPUs, tokens and a link"
HOLDS = "claim holds: the share is 30 to 50 %"
LESS = "far less: the share is under 5 %"
MORE = "far more: the share is over 80 %"

Share = Callable[[int, int, Hardware], Any]


# Nothing but latency: whoever has another share here has another Tc.
_LATENCY_ONLY = Link(100_000_000, 10**18, source="to find out which side is wrong")


def timeline_of(hardware: Hardware, num_gpus: int, tokens: int) -> Timeline:
    """One step without overlap; one rank stands for all."""
    builder = ProgramBuilder(num_ranks=1, represents=num_gpus)
    builder.compute(0, "step", flops=6 * PARAMETERS * tokens, dtype="bfloat16")
    builder.collective(0, "all_reduce", bytes=2 * PARAMETERS)
    return resolve(builder.build(), hardware)


def _times_ns(hardware: Hardware, num_gpus: int, tokens: int) -> tuple[int, int]:
    """(Tc, Tm), by the resolver."""
    report = timeline_of(hardware, num_gpus, tokens).report()
    return report.compute_ns, report.communication_ns


@lru_cache(maxsize=512)
def times_ns(num_gpus: int, tokens: int, name: str) -> tuple[int, int]:
    """(Tc, Tm) on the profile called `name`."""
    return _times_ns(find_hardware(name), num_gpus, tokens)


def true_share(num_gpus: int, tokens: int, name: str) -> float:
    """Tm / (Tc + Tm)."""
    tc, tm = times_ns(num_gpus, tokens, name)
    return tm / (tc + tm)


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
    if _judge_computing(sheet, share):
        for name in LINKS:
            for num_gpus in (*GPUS, 2):
                for tokens in (512, 8192):
                    _judge_sending(sheet, share, num_gpus, tokens, name)
    _judge_found(sheet, found)


def _judge_computing(sheet: Sheet, share: Share) -> bool:
    """Tc, on a link on which Tm is the latency."""
    probe = replace(
        find_hardware("ethernet-100g"),
        name="a link with latency only",
        link=_LATENCY_ONLY,
    )
    for num_gpus, tokens in ((8, 8192), (64, 1024)):
        said = _ask(share, num_gpus, tokens, probe)
        tc, tm = _times_ns(probe, num_gpus, tokens)
        right = tm / (tc + tm)
        if close(said, right):
            sheet.expect(COMPUTE, True)
            continue
        where = f"{num_gpus} GPUs, {tokens} tokens each, {probe.name}: {said:.4g}"
        slip = _whole_slip(said, tc, tm)
        if slip or said < 1e-6:
            sheet.expect(
                MESSAGE,
                False,
                seen=where,
                expected=f"Tm = {tm / NS_PER_MS:.4g} ms beside Tc",
                hint=slip or "collective_ns returns two numbers, both are time",
            )
            return False
        told_tc = tm * (1 - said) / said
        sheet.expect(
            COMPUTE,
            False,
            seen=f"{where}; with Tm = {tm / NS_PER_MS:.1f} ms that is "
            f"Tc = {told_tc / NS_PER_MS:.3g} ms",
            expected=f"Tc = {tc / NS_PER_MS:.3g} ms",
            hint=_computing_hint(told_tc / tc, num_gpus),
        )
        return False
    return True


def _judge_sending(
    sheet: Sheet, share: Share, num_gpus: int, tokens: int, name: str
) -> None:
    """Tm, where Tc is right."""
    said = _ask(share, num_gpus, tokens, find_hardware(name))
    tc, tm = times_ns(num_gpus, tokens, name)
    told_tm = tc * said / (1 - said) if 0 <= said < 1 else 0.0
    sheet.expect(
        MESSAGE,
        close(said, tm / (tc + tm)),
        seen=f"{num_gpus} GPUs, {tokens} tokens each, {name}: {said:.4g}; with Tc = "
        f"{tc / NS_PER_MS:.1f} ms that is Tm = {told_tm / NS_PER_MS:.4g} ms",
        expected=f"Tm = {tm / NS_PER_MS:.4g} ms",
        hint="2 bytes a parameter, whatever the number of GPUs; collective_ns knows "
        "the ring",
    )


def _ask(share: Share, num_gpus: int, tokens: int, hardware: Hardware) -> float:
    answer = share(num_gpus, tokens, hardware)
    try:
        return float(answer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"share returned {answer!r:.100}; expected a number from 0 to 1"
        ) from error


def _whole_slip(said: float, tc: int, tm: int) -> str:
    """Both sides right, put together wrongly."""
    if close(said, tm / tc):
        return "a share is of the whole: Tm / (Tc + Tm)"
    if close(said, tc / (tc + tm)):
        return "that is the share of computing"
    if close(said, 100 * tm / (tc + tm)):
        return "a fraction, not percent"
    if said < 1 and any(
        close(said / (1 - said), factor * tm / tc) for factor in _UNIT_FACTORS
    ):
        return "collective_ns is in ns, FLOP over FLOP/s are seconds: bring both to one"
    return ""


_UNIT_FACTORS = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)


def _computing_hint(times: float, num_gpus: int) -> str:
    """The slip by which Tc is so many times what it is, "" if it is none known."""
    if close(times, 1 / num_gpus) or close(times, num_gpus):
        return "the tokens are those of one GPU, and each GPU has all parameters"
    if close(times, 1 / 3) or close(times, 2 / 3):
        return "6 FLOP for each parameter and token: 2 forward, 4 backward"
    return "6 * parameters * tokens, over the rate of bfloat16"


def _judge_found(sheet: Sheet, found: Mapping[str, Any]) -> None:
    names = ("claim holds", "far less", "far more")
    problems = {name: p for name in names if (p := _problem(name, found))}
    sheet.expect(
        USABLE,
        not problems,
        seen="\n".join(problems.values()),
        expected='such as {"num_gpus": 256, "tokens": 4096, "link": "h100-ib400"}',
    )
    for name, sentence, low, high, wanted in (
        ("claim holds", HOLDS, 0.30, 0.50, "from 30 to 50 %"),
        ("far less", LESS, 0.0, 0.05, "under 5 %"),
        ("far more", MORE, 0.80, 1.0, "over 80 %"),
    ):
        if name in problems:
            continue
        setting = found[name]
        share = true_share(setting["num_gpus"], setting["tokens"], setting["link"])
        hardware = find_hardware(setting["link"])
        sheet.show(
            timeline_of(hardware, setting["num_gpus"], setting["tokens"]),
            title=f"your {name!r}: {100 * share:.0f} % communication",
        )
        sheet.expect(
            sentence,
            low <= share <= high,
            seen=f"{dict(setting)}: {100 * share:.1f} %",
            expected=wanted,
            hint="too high: more tokens a GPU are more to compute, and as much to send"
            if share > high
            else "too low: fewer tokens a GPU are less to compute, and as much to send",
        )


def _problem(name: str, found: object) -> str:
    setting = found.get(name) if isinstance(found, Mapping) else None
    if setting is None:
        return f"you have not filled in {name!r}"
    if not isinstance(setting, Mapping) or set(setting) != {
        "num_gpus",
        "tokens",
        "link",
    }:
        return f"{name!r} is {setting!r:.80}; expected num_gpus, tokens and link"
    for key, (low, high) in (("num_gpus", HUNDREDS), ("tokens", TOKENS)):
        value = setting[key]
        if isinstance(value, bool) or not isinstance(value, int):
            return f"{name!r}: {key} is {value!r}, not a whole number"
        if not low <= value <= high:
            return f"{name!r}: {key} is {value}; expected {low} to {high}"
    if setting["link"] not in LINKS:
        return f"{name!r}: link is {setting['link']!r}, not one of {LINKS}"
    return ""
