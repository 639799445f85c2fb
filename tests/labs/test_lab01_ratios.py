"""1.4: three ratios; each one taken for another is refused by its own sentence."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab01 import checks as lab
from overlaplab_course.lab01 import reference
from overlaplab_course.lab01.checks import one_sided, unseen
from overlaplab_course.lab01.given import GPU, contended, ten_layers, uncontended


def in_six_lines(tc, tm, sent, hidden, step):
    saved, could = tc + tm - step, min(tc, tm)
    return (
        hidden / sent if sent else None,
        saved / tm if tm else None,
        saved / could if could else None,
    )


def in_fractions(tc, tm, sent, hidden, step):
    def over(part, whole):
        return None if whole == 0 else Fraction(part) / Fraction(whole)

    tc, tm = Fraction(tc), Fraction(tm)
    saved = tc + tm - Fraction(step)
    return [over(hidden, sent), over(saved, tm), over(saved, tc + tm - max(tc, tm))]


def with_numpy(tc, tm, sent, hidden, step):
    saved = np.float64(tc + tm - step)
    wholes = np.array([sent, tm, (tc + tm - abs(tc - tm)) / 2])
    parts = np.array([hidden, saved, saved])
    return [p / w if w > 0 else None for p, w in zip(parts, wholes, strict=True)]


@pytest.mark.parametrize("right", [in_six_lines, in_fractions, with_numpy])
def test_the_three_ratios_pass_however_they_are_made(right):
    verdict = judge(find_exercise("1.4"), lambda *a: right(*a))
    assert verdict.passed, str(verdict)


def solve(
    tc, tm, sent, hidden, step, *, overlap="sent", saved="alone", could="min", none=None
):
    """The ratios, each of which can be mixed up."""
    serial = {"alone": tc + tm, "run": tc + sent}[saved]
    gone = serial - step
    wholes = {"sent": sent, "tm": tm, "step": step}
    divide = {
        "min": min(tc, tm),
        "tm": tm,
        "tc": tc,
        "serial": tc + tm,
        "bound": max(tc, tm),
    }

    def over(part, whole):
        return part / whole if whole else none

    return over(hidden, wholes[overlap]), over(gone, tm), over(gone, divide[could])


WRONG = {
    "hidden over Tm": ({"overlap": "tm"}, lab.OVERLAP),
    "hidden over the step": ({"overlap": "step"}, lab.OVERLAP),
    "the run's own sending": ({"saved": "run"}, lab.SAVED),
    "efficiency is the saved fraction": ({"could": "tm"}, lab.EFFICIENCY),
    "efficiency over Tc": ({"could": "tc"}, lab.EFFICIENCY),
    "efficiency over serial": ({"could": "serial"}, lab.EFFICIENCY),
    "efficiency over the bound": ({"could": "bound"}, lab.EFFICIENCY),
    "0 for nothing": ({"none": 0.0}, lab.NONE),
    "1 for nothing": ({"none": 1.0}, lab.NONE),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_ratio_taken_for_another_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG[name]
    verdict = judge(find_exercise("1.4"), lambda *a: solve(*a, **slips))
    found = faults(verdict)
    assert next(iter(found)) == sentence
    assert "step" in found[sentence]
    assert (verdict.timeline is not None) == (sentence != lab.NONE)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda *a: (in_six_lines(*a)[0],) * 3, "hidden is not saved"),
        (lambda *a: [100 * x for x in in_six_lines(*a)], "not percent"),
        (lambda *a: solve(*a, overlap="tm"), "compared with what the run sent"),
    ],
)
def test_a_known_slip_has_its_own_hint(wrong, words):
    assert words in judge(find_exercise("1.4"), wrong).hint


def test_a_division_by_zero_is_described_with_its_arguments():
    def ratios(tc, tm, sent, hidden, step):
        saved = tc + tm - step
        return hidden / sent, saved / tm, saved / min(tc, tm)

    text = str(judge(find_exercise("1.4"), ratios))
    assert "expected None for that ratio" in text


def test_clamped_ratios_are_refused():
    """A step longer than serial saves less than nothing."""

    def clamped(*a):
        return [None if x is None else max(0, x) for x in in_six_lines(*a)]

    verdict = judge(find_exercise("1.4"), clamped)
    assert not verdict.passed
    assert "saved is less than 0" in verdict.hint


def test_without_contention_the_ratios_are_the_report_s():
    clean = [t for t in unseen() if t.sent == t.tm]
    assert len(clean) > 20
    for totals in clean:
        report = totals.timeline.report()
        assert reference.ratios(*totals) == pytest.approx(
            (report.overlap_fraction, report.saved_fraction, report.efficiency)
        )


def test_with_contention_one_trace_saves_what_it_hides():
    """In a run without gaps, saved is hidden, whatever contention costs."""
    totals = contended()
    report = totals.timeline.report()
    assert report.saved_ns == report.hidden_ns
    assert reference.ratios(*totals)[1] < 0.25 < 0.9 < report.saved_fraction


def test_the_sides_that_are_missing_cover_each_none():
    nones = [[x is None for x in reference.ratios(*totals)] for totals in one_sided()]
    assert nones == [[True, True, True], [False, False, True], [True, True, True]]


def test_the_written_opening_step_is_the_lesson_s_own():
    """The same ten messages at the same times; its update has more launches."""

    def hooks_step(model, x, optimizer):
        works = []

        def send(param):
            works.append(dist.all_reduce(param.grad, async_op=True))

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(send)
        model(x).sum().backward()
        for work in works:
            work.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    recorded = ol.run(hooks_step, *ten_layers(), hardware=GPU).timeline.of_rank(0)
    written = uncontended().timeline

    def sent(timeline):
        return [
            (round(s.start_ns / 1e6, 3), round(s.end_ns / 1e6, 3))
            for s in timeline.spans
            if s.kind == "communication"
        ]

    assert sent(recorded) == sent(written)
    assert recorded.step_ns == pytest.approx(written.step_ns, abs=100)
