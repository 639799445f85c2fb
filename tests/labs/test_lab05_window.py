"""5.1: windows and bounds that forget what comes when are refused."""

from __future__ import annotations

import itertools

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import checks as lab
from overlaplab_course.lab05 import reference


def windows(backward_ms, layers):
    return reference.windows(backward_ms, layers)


def least_exposed(windows_ms, message_ms):
    return reference.least_exposed(windows_ms, message_ms)


def own_layer_counts_too(backward_ms, layers):
    left = list(itertools.accumulate(backward_ms))
    found = {}
    for name, ms in zip(layers, left, strict=True):
        found.setdefault(name, ms)
    return found


def forward_order(backward_ms, layers):
    """What comes behind in the forward."""
    total = sum(backward_ms)
    found = {}
    for name, done in zip(layers, itertools.accumulate(backward_ms), strict=True):
        found.setdefault(name, total - done)
    return found


def first_gradient_counts(backward_ms, layers):
    """The window of the use that comes first in the backward pass."""
    left, found = 0, {}
    for ms, name in zip(backward_ms, layers, strict=True):
        found[name] = left
        left += ms
    return found


def whole_backward(backward_ms, layers):
    return dict.fromkeys(layers, sum(backward_ms))


def in_seconds(backward_ms, layers):
    return {n: w / 1e3 for n, w in windows(backward_ms, layers).items()}


def one_weight_is_missing(backward_ms, layers):
    return {n: w for n, w in windows(backward_ms, layers).items() if n != "embedding"}


def one_that_does_not_exist(backward_ms, layers):
    return {**windows(backward_ms, layers), "bias": 0}


WRONG_WINDOWS = {
    own_layer_counts_too: (lab.WINDOWS, "the window of w0: 2", "has *ended*"),
    forward_order: (lab.WINDOWS, "the window of embedding: 14", "comes last?"),
    first_gradient_counts: (lab.SHARED, "the window of embedding: 8", "*every* use"),
    whole_backward: (lab.WINDOWS, "expected 0 ms of 14", ""),
    in_seconds: (lab.WINDOWS, "the window of w1: 0.002", ""),
    one_weight_is_missing: (lab.WINDOWS, "the window of embedding: None", ""),
    one_that_does_not_exist: (lab.WINDOWS, "['bias']: no such weight", ""),
}


@pytest.mark.parametrize("wrong", WRONG_WINDOWS, ids=lambda f: f.__name__)
def test_wrong_windows_are_refused_for_their_own_fault(wrong, faults):
    sentence, reason, hint = WRONG_WINDOWS[wrong]
    verdict = judge(find_exercise("5.1"), wrong, least_exposed)
    found = faults(verdict)
    assert list(found) == [sentence]
    assert reason in found[sentence]
    assert hint in verdict.hint
    assert verdict.timeline is not None


def all_behind_the_whole_backward(windows_ms, message_ms):
    """The bound of lab 01, with the backward pass for the computation."""
    return max(0, sum(message_ms.values()) - max(windows_ms.values()))


def the_last_message_only(windows_ms, message_ms):
    return message_ms[min(windows_ms, key=windows_ms.get)]


def each_for_itself(windows_ms, message_ms):
    return sum(max(0, message_ms[n] - w) for n, w in windows_ms.items())


def windows_are_added_up(windows_ms, message_ms):
    return max(0, sum(message_ms.values()) - sum(windows_ms.values()))


def ties_are_forgotten(windows_ms, message_ms):
    """Two gradients that arrive together: only one is counted."""
    most = 0
    for name, window in windows_ms.items():
        late = [n for n, w in windows_ms.items() if w < window or n == name]
        most = max(most, sum(message_ms[n] for n in late) - window)
    return most


def hidden_instead(windows_ms, message_ms):
    return sum(message_ms.values()) - least_exposed(windows_ms, message_ms)


def forgets_to_return(windows_ms, message_ms):
    least_exposed(windows_ms, message_ms)


WRONG_EXPOSED = {
    all_behind_the_whole_backward: ("", "comes after a part of it"),
    the_last_message_only: ("", "still busy with earlier ones"),
    each_for_itself: ("", "not each one anew"),
    windows_are_added_up: ("you say 0 ms", ""),
    ties_are_forgotten: ("", ""),
    hidden_instead: ("", ""),
    forgets_to_return: ("you say None ms", ""),
}


@pytest.mark.parametrize("wrong", WRONG_EXPOSED, ids=lambda f: f.__name__)
def test_a_wrong_bound_is_refused_for_its_own_fault(wrong, faults):
    reason, hint = WRONG_EXPOSED[wrong]
    verdict = judge(find_exercise("5.1"), windows, wrong)
    found = faults(verdict)
    assert list(found) == [lab.EXPOSED]
    assert reason in found[lab.EXPOSED]
    assert hint in verdict.hint


def from_the_back(backward_ms, layers):
    """As the backward pass goes, overwriting what came too early."""
    found, left = {}, sum(backward_ms)
    for name, ms in zip(reversed(layers), reversed(backward_ms), strict=True):
        left -= ms
        found[name] = left
    return found


def by_index(backward_ms, layers):
    return {name: sum(backward_ms[: layers.index(name)]) for name in set(layers)}


def by_playing_the_wire(windows_ms, message_ms):
    """When the wire is free, seen from the end of the backward pass."""
    free = -max(windows_ms.values())
    for name in sorted(windows_ms, key=windows_ms.get, reverse=True):
        free = max(free, -windows_ms[name]) + message_ms[name]
    return max(0, free)


def by_suffixes(windows_ms, message_ms):
    names = sorted(windows_ms, key=windows_ms.get)
    sums = itertools.accumulate(message_ms[name] for name in names)
    return max(s - windows_ms[n] for n, s in zip(names, sums, strict=True))


def by_a_running_sum(windows_ms, message_ms):
    """Windows grow in the order in which `windows` gives them."""
    sums = itertools.accumulate(message_ms[name] for name in windows_ms)
    return max(s - w for s, w in zip(sums, windows_ms.values(), strict=True))


@pytest.mark.parametrize(
    "right",
    [
        (from_the_back, by_playing_the_wire),
        (by_index, by_suffixes),
        (windows, by_a_running_sum),
    ],
    ids=lambda pair: pair[0].__name__,
)
def test_unusual_right_ones_pass(right):
    verdict = judge(find_exercise("5.1"), *right)
    assert verdict.passed, str(verdict)
