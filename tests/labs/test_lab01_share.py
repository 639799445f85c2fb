"""1.7 and 1.8: shares of communication, and when overlap matters."""

from __future__ import annotations

import pytest

import overlaplab as ol
from overlaplab.grading import find_exercise, judge
from overlaplab.hardware import collective_ns, compute_ns
from overlaplab.program import ProgramBuilder
from overlaplab_course.lab01 import checks_extra as lab
from overlaplab_course.lab01.messages import (
    KNOBS,
    OVERLAP,
    PARAMETERS,
    given_share,
    turn,
)

FOUND = {
    "claim holds": {"num_gpus": 256, "tokens": 2048, "link": "h100-ib400"},
    "far less": {"num_gpus": 512, "tokens": 32_768, "link": "h100-ib400"},
    "far more": {"num_gpus": 128, "tokens": 1024, "link": "ethernet-25g"},
}


def solve(
    num_gpus,
    tokens,
    hardware,
    *,
    flop=6,
    dtype="bfloat16",
    split=False,
    bytes_each=2,
    operation="all_reduce",
    latency=True,
    wire=True,
    of_tc=False,
    computing=False,
):
    """The share, each part of which can be wrong."""
    tc = flop * PARAMETERS * tokens * 1e9 / hardware.flops_per_s[dtype]
    if split:
        tc /= num_gpus
    parts = collective_ns(hardware, operation, num_gpus, bytes_each * PARAMETERS)
    tm = latency * parts[0] + wire * parts[1]
    if of_tc:
        return tm / tc
    return tc / (tc + tm) if computing else tm / (tc + tm)


def by_roofline(num_gpus, tokens, hardware):
    """Unusual: the package's cost of a kernel."""
    tc = compute_ns(hardware, 6 * PARAMETERS * tokens, "bfloat16")
    tm = sum(collective_ns(hardware, "all_reduce", num_gpus, 2 * PARAMETERS))
    return 1 - tc / (tc + tm)


def by_a_run(num_gpus, tokens, hardware):
    """Unusual: one rank for all, resolved."""
    builder = ProgramBuilder(represents=num_gpus)
    step = 2 * PARAMETERS * tokens
    for flops in (step, 2 * step):
        builder.compute(0, "step", flops=flops, dtype="bfloat16")
    builder.collective(0, "all_reduce", bytes=2 * PARAMETERS)
    report = ol.resolve(builder.build(), hardware).report()
    return report.communication_ns / report.serial_ns


@pytest.mark.parametrize("right", [solve, by_roofline, by_a_run])
def test_a_right_share_passes_however_it_is_found(right):
    verdict = judge(find_exercise("1.7"), lambda *a: right(*a), FOUND)
    assert verdict.passed, str(verdict)


WRONG = {
    "2 FLOP": ({"flop": 2}, lab.COMPUTE),
    "the tokens of all": ({"split": True}, lab.COMPUTE),
    "4 bytes": ({"bytes_each": 4}, lab.MESSAGE),
    "no latency": ({"latency": False}, lab.MESSAGE),
    "latency only": ({"wire": False}, lab.MESSAGE),
    "a gather": ({"operation": "all_gather"}, lab.MESSAGE),
    "over Tc": ({"of_tc": True}, lab.MESSAGE),
    "the share of computing": ({"computing": True}, lab.MESSAGE),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_share_is_refused_by_the_side_that_is_wrong(name, faults):
    slips, sentence = WRONG[name]
    verdict = judge(find_exercise("1.7"), lambda *a: solve(*a, **slips), FOUND)
    found = faults(verdict)
    assert list(found) == [sentence]
    assert "GPUs" in found[sentence]


def in_mixed_units(num_gpus, tokens, hardware):
    """Tc in seconds, Tm in ns."""
    tc = 6 * PARAMETERS * tokens / hardware.flops_per_s["bfloat16"]
    tm = sum(collective_ns(hardware, "all_reduce", num_gpus, 2 * PARAMETERS))
    return tm / (tc + tm)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda *a: solve(*a, flop=2), "2 forward, 4 backward"),
        (lambda *a: solve(*a, split=True), "tokens are those of one GPU"),
        (in_mixed_units, "collective_ns is in ns"),
        (lambda *a: solve(*a, of_tc=True), "of the whole"),
    ],
)
def test_a_slip_in_the_share_has_its_own_hint(wrong, words):
    assert words in judge(find_exercise("1.7"), wrong, FOUND).hint


@pytest.mark.parametrize(
    ("tokens", "words"), [(8192, "too low: fewer"), (256, "too high: more")]
)
def test_a_share_off_the_mark_is_sent_the_right_way(tokens, words):
    found = {**FOUND, "claim holds": {**FOUND["claim holds"], "tokens": tokens}}
    verdict = judge(find_exercise("1.7"), solve, found)
    assert words in verdict.hint


@pytest.mark.parametrize("name", FOUND)
def test_one_setting_for_all_three_is_refused_where_it_is_wrong(name, faults):
    verdict = judge(find_exercise("1.7"), solve, dict.fromkeys(FOUND, FOUND[name]))
    right = {"claim holds": lab.HOLDS, "far less": lab.LESS, "far more": lab.MORE}
    assert set(faults(verdict)) == set(right.values()) - {right[name]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": 8}, "expected 100 to 999"),
        ({"num_gpus": 1024}, "expected 100 to 999"),
        ({"tokens": 10**7}, "expected 256 to 65536"),
        ({"tokens": 2048.5}, "not a whole number"),
        ({"link": "h100-nvlink"}, "not one of"),
        ({"more": 1}, "expected num_gpus, tokens and link"),
    ],
)
def test_a_setting_outside_the_question_is_reported(change, words, faults):
    found = {**FOUND, "far less": {**FOUND["far less"], **change}}
    assert words in faults(judge(find_exercise("1.7"), solve, found))[lab.USABLE]


def test_the_share_depends_on_tokens_a_gpu_and_hardly_on_gpus():
    weak = [given_share(n, 8192, "h100-ib400") for n in (16, 4096)]
    strong = [given_share(n, 4_194_304 // n, "h100-ib400") for n in (8, 4096)]
    assert weak[1] - weak[0] < 0.02
    assert strong[0] < 0.01 and strong[1] > 0.5


# 1.8

SETTINGS = {
    "saves much": {"gbyte_per_s": 100},
    "little to send": {"gbyte_per_s": 340, "ktokens": 64, "teraflops": 400},
    "much to send": {"gbyte_per_s": 3},
}
OTHERS = {
    "saves much": {"gbyte_per_s": 50, "gpus": 2},
    "little to send": {"ktokens": 32, "teraflops": 100, "gbyte_per_s": 340, "gpus": 2},
    "much to send": {"ktokens": 1, "overlap": "no"},
}


@pytest.mark.parametrize("settings", [SETTINGS, OTHERS])
def test_settings_with_the_asked_effect_pass(settings):
    verdict = judge(find_exercise("1.8"), settings)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("name", "instead", "sentence"),
    [
        ("saves much", {"gbyte_per_s": 25}, lab.IS_MUCH),
        ("saves much", SETTINGS["much to send"], lab.IS_MUCH),
        ("little to send", {"gbyte_per_s": 340}, lab.IS_LITTLE),
        ("little to send", SETTINGS["much to send"], lab.IS_LITTLE),
        ("much to send", {"gbyte_per_s": 25}, lab.IS_TOO_MUCH),
        ("much to send", SETTINGS["little to send"], lab.IS_TOO_MUCH),
    ],
)
def test_a_setting_without_the_effect_is_refused_with_its_numbers(
    name, instead, sentence, faults
):
    verdict = judge(find_exercise("1.8"), {**SETTINGS, name: instead})
    found = faults(verdict)
    assert list(found) == [sentence]
    assert "overlap saves" in found[sentence]
    assert verdict.timeline is not None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (None, "not filled in"),
        ({"overlap": "yes"}, "leave it at 'no'"),
        ({"bandwidth": 3}, "there is no knob"),
        ({"ktokens": 5}, "not one of"),
        ("fast", "not a dict"),
    ],
)
def test_an_unusable_setting_is_reported(setting, words, faults):
    verdict = judge(find_exercise("1.8"), {**SETTINGS, "saves much": setting})
    assert words in faults(verdict)[lab.KNOBS_USABLE]


def test_who_kept_by_a_button_is_asked_to_paste(faults):
    """In a fresh kernel, as where labs are marked, `dict(knobs.kept)` is empty."""
    found = faults(judge(find_exercise("1.8"), {}))
    assert "print(dict(knobs.kept))" in found[lab.KNOBS_USABLE]


def test_no_bandwidth_lets_overlap_save_more_than_the_backward_pass_hides():
    """Forward : backward : messages = 1 : 2 : 2 is the best there is: 2 of 5."""
    most = max(
        turn.saved_percent({"gbyte_per_s": g, "ktokens": k}, OVERLAP)
        for g in KNOBS["gbyte_per_s"].values
        for k in KNOBS["ktokens"].values
    )
    assert 30 < most < 40
