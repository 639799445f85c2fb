"""8.6: two sets of weights change places by reference, and no answer waits for it."""

from __future__ import annotations

import pytest

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab08 as lab
from overlaplab_course.lab08 import reference
from overlaplab_course.lab08 import serving_checks as checks


def serving(swap, *, before=True, after=True, answers=True):
    """The loop, with another swap; each wait can be left out."""

    def serve(front, back, versions, answer):
        main, loading = streams.current_stream(), streams.Stream()
        for version in versions:
            if before:
                loading.wait_stream(main)
            with streams.stream(loading):
                back.copy_(version, non_blocking=True)
            if answers:
                answer(front)
            if after:
                main.wait_stream(loading)
            front, back = swap(front, back)
        answer(front)

    return serve


def by_reference(front, back):
    return back, front


def by_copy(front, back):
    front.copy_(back)
    return front, back


def by_clone(front, back):
    return back.clone(), back


def not_at_all(front, back):
    return front, back


def behind_a_synchronize(front, back):
    streams.synchronize()
    return back, front


def one_set(front, back, versions, answer):
    main, loading = streams.current_stream(), streams.Stream()
    for version in versions:
        with streams.stream(loading):
            front.copy_(version, non_blocking=True)
        answer(front)
        main.wait_stream(loading)
    answer(front)


def in_line(front, back, versions, answer):
    """One set, and it is loaded between the answers."""
    answer(front)
    for version in versions:
        front.copy_(version, non_blocking=True)
        answer(front)


def copied_beside(front, back, versions, answer):
    """The copy of the weights goes to the side stream; an answer still reads them."""
    main, loading = streams.current_stream(), streams.Stream()
    for version in versions:
        loading.wait_stream(main)
        with streams.stream(loading):
            back.copy_(version, non_blocking=True)
        answer(front)
        with streams.stream(loading):
            front.copy_(back)
        main.wait_stream(loading)
    answer(front)


WRONG = {
    "by_copy": (serving(by_copy), checks.BY_REFERENCE, "320 KiB"),
    "by_clone": (serving(by_clone), checks.BY_REFERENCE, "KiB"),
    "copied_beside": (copied_beside, checks.UNTOUCHED, "set A"),
    "not_at_all": (serving(not_at_all), checks.NEWEST, "the first wrong one is 1"),
    "no_answers": (serving(by_reference, answers=False), checks.NEWEST, "1 answers"),
    "one_set": (one_set, checks.UNTOUCHED, "set A"),
    "in_line": (in_line, checks.SHORT, "ms"),
    "no_wait_before": (serving(by_reference, before=False), checks.UNTOUCHED, "set"),
    "no_wait_after": (serving(by_reference, after=False), checks.UNTOUCHED, "set"),
    "synchronized": (serving(behind_a_synchronize), checks.CPU, "synchronize"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_swap_is_refused_for_its_own_reason(wrong, faults):
    program, sentence, reason = WRONG[wrong]
    verdict = judge(find_exercise("8.6"), program)
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]
    assert verdict.timeline is not None


def by_turns(front, back, versions, answer):
    """A list and an index in the place of two names."""
    main, loading = streams.current_stream(), streams.Stream()
    sets = [front, back]
    for turn, version in enumerate(versions):
        loading.wait_stream(main)
        with streams.stream(loading):
            sets[(turn + 1) % 2].copy_(version, non_blocking=True)
        answer(sets[turn % 2])
        main.wait_stream(loading)
    answer(sets[len(versions) % 2])


def by_events(front, back, versions, answer):
    main, loading = streams.current_stream(), streams.Stream()
    read = None
    for version in versions:
        if read is not None:
            loading.wait_event(read)
        with streams.stream(loading):
            back.copy_(version, non_blocking=True)
            loaded = loading.record_event()
        answer(front)
        read = main.record_event()
        main.wait_event(loaded)
        front, back = back, front
    answer(front)


@pytest.mark.parametrize("right", [serving(by_reference), by_turns, by_events])
def test_any_swap_by_reference_passes(right):
    verdict = judge(find_exercise("8.6"), right)
    assert verdict.passed, str(verdict)


def test_a_copy_of_all_weights_costs_two_ms_a_version():
    runs = [lab.serve(serving(swap)) for swap in (by_copy, by_reference)]
    assert all(run.step_ns == run.timeline.step_ns for run in runs)
    steps = [run.step_ns for run in runs]
    assert round((steps[0] - steps[1]) / 4e6, 2) == 2.0


def test_more_slots_than_two_pay_where_a_loader_stutters_and_nowhere_else():
    one, two, four = (lab.feed_at_depth(depth).step_ns for depth in (1, 2, 4))
    assert two < four < one
    stutters = [lab.feed_at_depth(d, stutter=True).step_ns for d in (2, 3)]
    assert stutters[1] < 0.95 * stutters[0]


def test_two_of_everything_serves_what_it_trained_in_less_time():
    plain, doubled = (
        lab.play_trainer(train)
        for train in (reference.plainly, reference.two_of_everything)
    )
    assert plain.values == doubled.values == (True, True)
    assert not plain.findings and not doubled.findings
    assert doubled.timeline.step_ns < 0.7 * plain.timeline.step_ns
