"""1.9: what still promises too much is refused; diagnoses are of one's own jobs."""

from __future__ import annotations

import itertools

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab01 import checks_extra as lab
from overlaplab_course.lab01.broken import forecast as broken_forecast
from overlaplab_course.lab01.checks_extra import bad_letter
from overlaplab_course.lab01.messages import jobs
from overlaplab_course.lab01.show import STORED, measured, measured_alone


def diagnosis(number):
    letter = bad_letter(number)
    job = jobs(number)[letter]
    promised, _, _ = broken_forecast(*job)
    return {"job": letter, "promised_ms": promised, "shortest_ms": max(job.tc, job.tm)}


def by_the_bound(tc, tm, a):
    step = max(tc + (1 - a) * tm, tc, tm)
    return step, (tc + tm) / step, (tc + tm) / max(tc, tm)


def by_the_largest_a(tc, tm, a):
    """Unusual: the fraction is capped, not the step."""
    a = min(a, tc / tm)
    step = tc + (1 - a) * tm
    return step, (tc + tm) / step, 1 + min(tc, tm) / max(tc, tm)


def by_what_is_hidden(tc, tm, a):
    """Unusual: in times hidden, from serial down."""
    serial, most = tc + tm, min(tc, tm)
    hidden = a * tm if a * tm < most else most
    return [serial - hidden, serial / (serial - hidden), serial / (serial - most)]


@pytest.mark.parametrize("number", [6, 1, 2])
@pytest.mark.parametrize("right", [by_the_bound, by_the_largest_a, by_what_is_hidden])
def test_a_forecast_that_no_schedule_beats_passes(right, number):
    verdict = judge(
        find_exercise("1.9"), number, diagnosis(number), lambda *a: right(*a)
    )
    assert verdict.passed, str(verdict)


def only_the_step(tc, tm, a):
    step = max(tc + (1 - a) * tm, tm)
    return step, (tc + tm) / step, 1 + tm / tc


def only_the_best(tc, tm, a):
    step = tc + (1 - a) * tm
    return step, (tc + tm) / step, (tc + tm) / max(tc, tm)


def never_under_tc(tc, tm, a):
    step = max(tc + (1 - a) * tm, tc)
    return step, (tc + tm) / step, (tc + tm) / max(tc, tm)


def speed_up_of_before(tc, tm, a):
    step = tc + (1 - a) * tm
    return max(step, tm), (tc + tm) / step, (tc + tm) / max(tc, tm)


def always_the_bound(tc, tm, a):
    bound = max(tc, tm)
    return bound, (tc + tm) / bound, (tc + tm) / bound


def at_most_twice(tc, tm, a):
    step = max(tc + (1 - a) * tm, tc, tm)
    return step, (tc + tm) / step, min(2, 1 + tm / tc)


def a_of_the_possible(tc, tm, a):
    """Another meaning of a: a fraction of what could be saved."""
    step = tc + tm - a * min(tc, tm)
    return step, (tc + tm) / step, (tc + tm) / max(tc, tm)


WRONG = {
    only_the_step: [lab.BEST],
    only_the_best: [lab.CAPPED],
    never_under_tc: [lab.CAPPED],
    speed_up_of_before: [lab.CAPPED],
    always_the_bound: [lab.SAME],
    at_most_twice: [lab.BEST],
    a_of_the_possible: [lab.SAME, lab.CAPPED],
    broken_forecast: [lab.CAPPED, lab.BEST],
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_what_still_promises_too_much_is_refused(wrong, faults):
    verdict = judge(find_exercise("1.9"), 6, diagnosis(6), lambda *a: wrong(*a))
    found = faults(verdict)
    assert list(found) == WRONG[wrong]
    assert all("Tc = " in seen for seen in found.values())


def test_who_always_says_the_bound_is_described_that_it_is_the_least():
    verdict = judge(find_exercise("1.9"), 6, diagnosis(6), always_the_bound)
    assert "lift only a step that is under it" in verdict.hint


@pytest.mark.parametrize("number", range(40))
def test_every_number_has_one_job_with_an_impossible_promise(number):
    own = jobs(number)
    impossible = [
        letter
        for letter, job in own.items()
        if broken_forecast(*job)[0] < max(job.tc, job.tm)
    ]
    assert impossible == [bad_letter(number)]
    assert sum(job.tm > job.tc for job in own.values()) >= 3


def test_a_job_that_can_be_had_is_refused_without_the_answer(faults):
    said = diagnosis(6)
    said["job"] = next(letter for letter in jobs(6) if letter != said["job"])
    verdict = judge(find_exercise("1.9"), 6, said, by_the_bound)
    assert list(faults(verdict)) == [lab.WHICH]
    assert "can be had" in faults(verdict)[lab.WHICH]
    assert f"job {said['job']}," in verdict.timeline_title


@pytest.mark.parametrize("key", ["promised_ms", "shortest_ms"])
def test_a_wrong_number_of_the_diagnosis_is_reported(key, faults):
    said = {**diagnosis(6), key: 1.0}
    found = faults(judge(find_exercise("1.9"), 6, said, by_the_bound))
    assert f"{key} is 1.0" in found[lab.PROMISED]


@pytest.mark.parametrize("answer", [None, (1, 2), "abc"])
def test_what_is_no_forecast_is_reported(answer):
    text = str(judge(find_exercise("1.9"), 6, diagnosis(6), lambda *a: answer))
    assert "expected (step, speed-up, best speed-up)" in text


def test_stored_steps_hide_more_than_they_save():
    rows = [row for row in measured() if row.link == "NVLink"]
    assert len(rows) == 4
    for row in rows:
        assert row.hidden / row.sent > 0.7
        assert (row.tc + row.tm - row.step) / row.tm < 0.3
        assert row.low <= row.step <= row.high


def apart(one, other):
    """Neither's eight of ten steps reach into the other's, to a tenth of a ms."""
    (low, high), (other_low, other_high) = (
        [round(ms, 1) for ms in pair] for pair in (one, other)
    )
    return high < other_low or other_high < low


def test_what_the_lesson_says_of_the_spread_is_what_is_stored():
    ranges = {(r.link, r.name): (r.low, r.high) for r in measured()}
    serial = {row["link"]: tuple(row["serial_p10_p90_ms"]) for row in STORED["rows"]}
    names = ("ours-100", "ddp-100", "ddp-default", "per-parameter")
    for one, other in itertools.combinations(names, 2):
        assert not apart(ranges["NVLink", one], ranges["NVLink", other])
    for name in names:
        assert not apart(ranges["NVLink", name], serial["NVLink"])
    slow = {name: ranges["P2P off", name] for name in names}
    assert not apart(slow["ours-100"], slow["ddp-100"])
    assert apart(slow["ours-100"], serial["P2P off"])
    assert apart(slow["ddp-100"], serial["P2P off"])
    assert not apart(slow["per-parameter"], serial["P2P off"])


def test_the_two_links_ran_with_the_batches_that_are_printed():
    assert {(r.link, r.batch) for r in measured()} == {("NVLink", 8), ("P2P off", 2)}
    assert [line.split(":")[0] for line in measured_alone()] == [
        "NVLink, batch 8",
        "P2P off, batch 2",
    ]
    nvlink, slow = measured()[0], measured()[-1]
    assert nvlink.tc > slow.tm > slow.tc
