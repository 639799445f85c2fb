"""5.4a: what may be launched now, where gradients arrive in any order."""

from __future__ import annotations

from itertools import takewhile

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import checks

IN_FRONT, TWICE, ALL_NOW = checks.LAB.sentences("5.4a")


def all_that_arrived(order, num_launched, arrived):
    return [one for one in order[num_launched:] if one in arrived]


def in_the_order_of_arrival(order, num_launched, arrived):
    return [one for one in sorted(arrived) if one not in order[:num_launched]]


def from_the_beginning(order, num_launched, arrived):
    return list(takewhile(arrived.__contains__, order))


def over_and_over(order, num_launched, arrived):
    return 2 * list(takewhile(arrived.__contains__, order[num_launched:]))


def one_at_a_time(order, num_launched, arrived):
    return from_the_beginning(order[num_launched:], 0, arrived)[:1]


def last_first(order, num_launched, arrived):
    return from_the_beginning(order[num_launched:], 0, arrived)[::-1]


def as_a_set(order, num_launched, arrived):
    return set(from_the_beginning(order[num_launched:], 0, arrived))


def nothing(order, num_launched, arrived):
    """Returns None."""


def runs_over_the_end(order, num_launched, arrived):
    ready = []
    while order[num_launched] in arrived:
        ready.append(order[num_launched])
        num_launched += 1
    return ready


WRONG = {
    all_that_arrived: (IN_FRONT, "0 launched, ['c'] arrived: your function returns"),
    in_the_order_of_arrival: (IN_FRONT, "returns ['c']"),
    from_the_beginning: (TWICE, "2 launched, ['a', 'c', 'd'] arrived"),
    over_and_over: (TWICE, "returns ['d', 'c', 'd', 'c']"),
    one_at_a_time: (ALL_NOW, "returns ['d']"),
    last_first: (ALL_NOW, "returns ['c', 'd']"),
    as_a_set: (ALL_NOW, "returns set()"),
    nothing: (ALL_NOW, "returns None"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_turn_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("5.4a"), wrong))
    assert reason in found[sentence]


def test_who_runs_over_the_end_of_the_order_sees_the_index_error():
    verdict = judge(find_exercise("5.4a"), runs_over_the_end)
    assert not verdict.passed
    assert "IndexError" in str(verdict)


def in_place(order, num_launched, arrived):
    """Empties what it is given."""
    del order[:num_launched]
    ready = []
    while order and order[0] in arrived:
        ready.append(order.pop(0))
        arrived.remove(ready[-1])
    return ready


def one_after_the_other(order, num_launched, arrived):
    if num_launched == len(order) or order[num_launched] not in arrived:
        return []
    rest = one_after_the_other(order, num_launched + 1, arrived)
    return [order[num_launched], *rest]


def with_takewhile(order, num_launched, arrived):
    return tuple(takewhile(arrived.__contains__, order[num_launched:]))


@pytest.mark.parametrize(
    "right", [in_place, one_after_the_other, with_takewhile], ids=lambda f: f.__name__
)
def test_a_right_turn_passes_however_it_is_written(right):
    verdict = judge(find_exercise("5.4a"), right)
    assert verdict.passed, str(verdict)
