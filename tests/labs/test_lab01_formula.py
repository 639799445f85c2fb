"""1.3: each card has one diagnosis, and every number its four cards."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab01 import checks as lab
from overlaplab_course.lab01.given import cards

NUMBERS = (6, 1, 17)


def by_numbers(number):
    """Diagnoses from the timelines alone, as a learner would make them."""
    reading = {}
    for letter, card in cards(number).items():
        says = card.tc_ms + (1 - card.a) * card.tm_ms
        if card.timeline is None:
            why = "impossible"
        else:
            report = card.timeline.report()
            if abs(report.step_ns / 1e6 - says) < 0.1:
                why = "holds"
            elif report.compute_ns / 1e6 > card.tc_ms + 0.1:
                why = "contention"
            else:
                why = "idle"
        reading[letter] = {"formula_ms": says, "verdict": why}
    return reading


def by_the_critical_path(number):
    """Unusual: from what bounds the run, and from operators' own times alone."""
    reading = {}
    for letter, card in cards(number).items():
        said = {"formula_ms": round(card.tc_ms + card.tm_ms - card.a * card.tm_ms, 1)}
        if card.timeline is None:
            said["verdict"] = " Impossible"
        elif card.timeline.critical_path().shares["launch"] > 0.2:
            said["verdict"] = "IDLE"
        else:
            slowed = any(
                s.attributes.get("alone_ns", s.duration_ns) < s.duration_ns
                for s in card.timeline.spans
            )
            said["verdict"] = "contention" if slowed else "holds"
        reading[letter] = said
    return reading


@pytest.mark.parametrize("number", range(30))
def test_the_numbers_of_every_card_decide_its_diagnosis(number):
    verdict = judge(find_exercise("1.3"), number, by_numbers(number))
    assert verdict.passed, str(verdict)
    whys = [card.why for card in cards(number).values()]
    assert sorted(whys) == sorted(lab.WHYS)


@pytest.mark.parametrize("number", NUMBERS)
def test_diagnoses_by_another_way_pass(number):
    verdict = judge(find_exercise("1.3"), number, by_the_critical_path(number))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ("holds", "contention"),
        ("contention", "idle"),
        ("idle", "contention"),
        ("impossible", "holds"),
        ("contention", "holds"),
    ],
)
def test_a_wrong_diagnosis_is_refused_by_its_card_s_sentence(mine, yours, faults):
    reading = by_numbers(6)
    letter = next(k for k, card in cards(6).items() if card.why == mine)
    reading[letter]["verdict"] = yours
    verdict = judge(find_exercise("1.3"), 6, reading)
    found = faults(verdict)
    assert list(found) == [lab.WHYS[mine]["says"]]
    assert f"{letter}: you say {yours!r}; the formula says" in " ".join(found.values())
    assert verdict.hint == lab.WHYS[mine]["help"]


def a_for_1_minus_a(card):
    return card.tc_ms + card.a * card.tm_ms


def what_the_run_took(card):
    return card.timeline.step_ns / 1e6 if card.timeline else card.formula_ms


def the_bound(card):
    return max(card.tc_ms, card.tm_ms)


def rounded(card):
    return card.formula_ms // 1 + (0.5 if card.why == "contention" else 0)


@pytest.mark.parametrize(
    ("slip", "words"),
    [
        (a_for_1_minus_a, "takes a in the place of 1 - a"),
        (what_the_run_took, "what the run took"),
        (the_bound, "that is the bound"),
        (rounded, "to one decimal"),
    ],
)
def test_a_slip_in_the_formula_is_named(slip, words, faults):
    reading = by_numbers(6)
    for letter, card in cards(6).items():
        reading[letter]["formula_ms"] = slip(card)
    found = faults(judge(find_exercise("1.3"), 6, reading))
    assert list(found) == [lab.FORMULA]
    assert words in found[lab.FORMULA]


def test_the_reading_of_another_number_is_refused():
    numbers = range(1, 6)
    assert not all(
        judge(find_exercise("1.3"), n, by_numbers(6)).passed for n in numbers
    )


@pytest.mark.parametrize("reading", [{}, {"A": None}, {"A": "holds"}])
def test_what_is_not_filled_in_is_reported(reading, faults):
    found = faults(judge(find_exercise("1.3"), 6, reading))
    assert lab.FORMULA in found
    assert "one of holds, contention, idle, impossible" in " ".join(found.values())
    verdict = judge(find_exercise("1.3"), 6, ["holds"])
    assert "reading is list; expected a dict" in str(verdict)


def test_a_check_of_nothing_gives_no_verdict_away(faults):
    """The sentence that fails belongs to one card: its letter beside it would tell."""
    verdicts_open = by_numbers(6)
    for one in verdicts_open.values():
        one["verdict"] = None
    for reading in (dict.fromkeys(cards(6)), verdicts_open):
        found = faults(judge(find_exercise("1.3"), 6, reading))
        for why in lab.WHYS.values():
            assert "a card has no verdict yet" in found[why["says"]]
            assert not any(f"{letter}:" in found[why["says"]] for letter in cards(6))


@pytest.mark.parametrize("number", NUMBERS)
def test_what_separates_the_cards_is_more_than_rounding(number):
    for card in cards(number).values():
        if card.why == "holds":
            assert card.timeline.step_ns / 1e6 == pytest.approx(
                card.formula_ms, abs=0.05
            )
        elif card.timeline is not None:
            assert card.timeline.step_ns / 1e6 > 1.2 * card.formula_ms
        else:
            assert card.formula_ms < 0.9 * max(card.tc_ms, card.tm_ms)
