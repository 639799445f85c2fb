"""8.5: what to double is judged by what the answer loses, in time and in bytes."""

from __future__ import annotations

from itertools import combinations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab08 import bill_checks as checks
from overlaplab_course.lab08.bill import BUFFERS, CHOICES, Job

IN_LINE = {"batch": "copy", "gradients": "exposed", "weights": "publish"}


def choose(
    ms,
    mib,
    free_mib,
    *,
    engines=True,
    memory=True,
    fewest=True,
    beside="messages",
    slack=1.01,
):
    """What the exercise asks for, with a knob for each mistake."""

    def step_ms(doubled):
        line = ms["compute"] + sum(ms[IN_LINE[b]] for b in mib if b not in doubled)
        other = {**IN_LINE, "gradients": beside}
        return max([line, *(ms[other[b]] for b in doubled if engines)])

    def size(doubled):
        return sum(mib[b] for b in doubled)

    every = [c for n in range(4) for c in combinations(mib, n)]
    fitting = [c for c in every if size(c) <= free_mib or not memory]
    best = min(map(step_ms, fitting))
    near = [c for c in fitting if step_ms(c) <= slack * best]
    return list(min(near, key=size) if fewest else max(near, key=size))


def engines_are_free(ms, mib, free_mib):
    return choose(ms, mib, free_mib, engines=False)


def exposed_is_all_that_travels(ms, mib, free_mib):
    """The wire is busy with what is hidden, too."""
    return choose(ms, mib, free_mib, beside="exposed")


def the_publish_is_free(ms, mib, free_mib):
    return choose({**ms, "publish": 0.0}, mib, free_mib)


def the_copy_is_free(ms, mib, free_mib):
    return choose({**ms, "copy": 0.0}, mib, free_mib)


def no_regard_for_memory(ms, mib, free_mib):
    return choose(ms, mib, free_mib, memory=False)


def all_that_fits(ms, mib, free_mib):
    return choose(ms, mib, free_mib, fewest=False)


def what_is_longest(ms, mib, free_mib):
    """The buffer with the longest time in line, if it fits."""
    longest = max(mib, key=lambda b: ms[IN_LINE[b]])
    return [longest] if mib[longest] <= free_mib else []


def whatever_is_in_line(ms, mib, free_mib):
    """All that takes more than 1 % of the step, while it fits."""
    doubled = []
    for name in sorted(mib, key=mib.get):
        if ms[IN_LINE[name]] > 0.01 * sum(ms.values()) and mib[name] <= free_mib:
            doubled.append(name)
            free_mib -= mib[name]
    return doubled


def the_cheapest_win(ms, mib, free_mib):
    """One buffer: the most ms for a MiB."""
    name = max(mib, key=lambda b: ms[IN_LINE[b]] / mib[b])
    return [name] if mib[name] <= free_mib else []


def one_too_generous(ms, mib, free_mib):
    return choose(ms, mib, free_mib, slack=1.5)


WRONG = {
    **{
        f"always_{'_and_'.join(c) or 'nothing'}": (lambda *_, c=c: list(c), None)
        for c in CHOICES
    },
    "engines_are_free": (engines_are_free, checks.NOTHING_SPARE),
    "exposed_is_all_that_travels": (exposed_is_all_that_travels, checks.NOTHING_SPARE),
    "the_publish_is_free": (the_publish_is_free, checks.REGRET),
    "the_copy_is_free": (the_copy_is_free, checks.REGRET),
    "no_regard_for_memory": (no_regard_for_memory, checks.FITS),
    "all_that_fits": (all_that_fits, checks.NOTHING_SPARE),
    "what_is_longest": (what_is_longest, checks.REGRET),
    "whatever_is_in_line": (whatever_is_in_line, checks.NOTHING_SPARE),
    "the_cheapest_win": (the_cheapest_win, checks.REGRET),
    "one_too_generous": (one_too_generous, checks.REGRET),
    "a_text": (lambda *_: "batch", checks.USABLE),
    "nothing": (lambda *_: None, checks.USABLE),
    "other_names": (lambda *_: ["copy"], checks.USABLE),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_choice_is_refused_for_its_own_reason(wrong, faults):
    function, sentence = WRONG[wrong]
    found = faults(judge(find_exercise("8.5"), function))
    assert found
    assert sentence is None or sentence in found


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (all_that_fits, "and without 'gradients'"),
        (no_regard_for_memory, "MiB of 450"),
        (what_is_longest, "the best that fits"),
    ],
)
def test_the_refusal_has_numbers(wrong, told, faults):
    assert told in " ".join(faults(judge(find_exercise("8.5"), wrong)).values())


def right(ms, mib, free_mib):
    return choose(ms, mib, free_mib)


def greedy(ms, mib, free_mib):
    """Adds what shortens the step most, while that is 1 %; gives back what is spare."""

    def step_ms(doubled):
        line = ms["compute"] + sum(ms[IN_LINE[b]] for b in mib if b not in doubled)
        beside = {**IN_LINE, "gradients": "messages"}
        return max([line, *(ms[beside[b]] for b in doubled)])

    doubled = []
    while True:
        free = free_mib - sum(mib[b] for b in doubled)
        more = [b for b in mib if b not in doubled and mib[b] <= free]
        best = min(more, key=lambda b: step_ms([*doubled, b]), default=None)
        if best is None or step_ms([*doubled, best]) > 0.99 * step_ms(doubled):
            break
        doubled.append(best)
    limit = 1.005 * step_ms(doubled)
    spare = [b for b in doubled if step_ms([x for x in doubled if x != b]) <= limit]
    return {b for b in doubled if b not in spare}


@pytest.mark.parametrize("function", [right, greedy])
def test_a_right_choice_passes_however_it_is_made(function):
    verdict = judge(find_exercise("8.5"), function)
    assert verdict.passed, str(verdict)


def test_every_kind_of_answer_is_right_somewhere():
    answers = {tuple(right(job.ms, job.mib, job.free_mib)) for job in checks.jobs()}
    singles = {(name,) for name in BUFFERS}
    assert {(), BUFFERS, *singles} <= answers
    assert len({job.profile for job in checks.jobs()}) == 4


@pytest.mark.parametrize("choice", CHOICES, ids="+".join)
def test_the_sum_foretells_the_step_where_nothing_slows_anything(choice):
    """Messages slow kernels on the other profiles; there it promises too much."""
    for job in checks.jobs():
        ms = job.ms
        line = ms["compute"] + sum(ms[IN_LINE[b]] for b in BUFFERS if b not in choice)
        beside = {**IN_LINE, "gradients": "messages"}
        said = max([line, *(ms[beside[b]] for b in choice)])
        if job.profile.startswith("ethernet"):
            assert said == pytest.approx(job.step_ms(choice), rel=0.06)
        assert said <= 1.001 * job.step_ms(choice)


def test_a_program_copies_and_sends_the_same_whatever_is_doubled():
    job = Job("small", "ethernet-100g", 4, 1, 64, 2, 4, 100)
    moved = {
        c: sum(s.bytes for s in job.timed(c).spans if s.kind != "compute")
        for c in CHOICES
    }
    assert len(set(moved.values())) == 1
