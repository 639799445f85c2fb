"""1.5: a forgotten rule of the wire is refused by that rule; the truth is the run's."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.program import replay
from overlaplab_course.lab01 import checks_messages as lab
from overlaplab_course.lab01.checks_messages import LESSON, resolved
from overlaplab_course.lab01.given import (
    GRADIENT_BYTES,
    from_backward,
    recorded,
    slow_gpu,
    step_and_hidden,
)
from overlaplab_course.lab01.reference import schedule

# Right


def by_prefix_sums(num_layers, layer_ms, message_ms, per_bucket):
    """Unusual: the latest of what could hold each message, by a running maximum."""
    ends = np.minimum(np.arange(per_bucket, num_layers + per_bucket, per_bucket),
                      num_layers)  # fmt: skip
    sizes = np.diff(ends, prepend=0) * message_ms
    sent_before = np.cumsum(sizes) - sizes
    starts = np.maximum.accumulate(ends * layer_ms - sent_before) + sent_before
    return np.stack([starts, starts + sizes], axis=1)


def recursively(num_layers, layer_ms, message_ms, per_bucket):
    def until(done):
        if done == 0:
            return []
        before = (done - 1) // per_bucket * per_bucket
        pairs = until(before)
        start = max(Fraction(done * layer_ms), pairs[-1][1] if pairs else 0)
        return [*pairs, (start, start + (done - before) * message_ms)]

    return until(num_layers)


def event_by_event(num_layers, layer_ms, message_ms, per_bucket):
    now, waiting, busy_until, pairs = 0, 0, 0, []
    for layer in range(1, num_layers + 1):
        now += layer_ms
        waiting += 1
        if waiting == per_bucket or layer == num_layers:
            begin = busy_until if busy_until > now else now
            busy_until = begin + waiting * message_ms
            pairs.append([begin, busy_until])
            waiting = 0
    return tuple(pairs)


@pytest.mark.parametrize(
    "right", [schedule, by_prefix_sums, recursively, event_by_event]
)
def test_any_function_with_the_right_times_passes(right):
    verdict = judge(find_exercise("1.5"), lambda *a: right(*a))
    assert verdict.passed, str(verdict)
    assert verdict.step_ns == verdict.target_ns == 56_000_000


# Wrong


def solve(
    num_layers,
    layer_ms,
    message_ms,
    per_bucket,
    *,
    busy=True,
    early=0,
    rest=True,
    full=False,
    by_layer=True,
    late=False,
    small_first=False,
):
    """The schedule, each rule of which can be broken."""
    edges = [*range(0, num_layers, per_bucket), num_layers]
    if small_first:
        edges = sorted(num_layers - edge for edge in edges)
    pairs, free = [], 0
    for first, last in itertools.pairwise(edges):
        size = last - first
        if not rest and size < per_bucket:
            continue
        ready = (num_layers if late else last - early) * layer_ms
        start = max(ready, free) if busy else ready
        length = (per_bucket if full else size) if by_layer else 1
        free = start + length * message_ms
        pairs.append((start, free))
    return pairs


WRONG = {
    "messages at once": ({"busy": False}, lab.BUSY),
    "leaves before its last layer": ({"early": 1}, lab.READY),
    "all after the backward pass": ({"late": True}, lab.READY),
    "the rest is dropped": ({"rest": False}, lab.COUNT),
    "the last bucket counts full": ({"full": True}, lab.LENGTH),
    "a message for each bucket takes 3 ms": ({"by_layer": False}, lab.LENGTH),
    "the small bucket first": ({"small_first": True}, lab.LENGTH),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_rule_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG[name]
    verdict = judge(find_exercise("1.5"), lambda *a: solve(*a, **slips))
    found = faults(verdict)
    assert sentence in found
    assert "layers of" in found[sentence]
    assert verdict.timeline is not None


def pairs_of_start_and_length(*case):
    return [(start, end - start) for start, end in schedule(*case)]


def the_wire_holds_up_the_layers(num_layers, layer_ms, message_ms, per_bucket):
    pairs, free = [], 0
    for first in range(0, num_layers, per_bucket):
        size = min(per_bucket, num_layers - first)
        start = free + size * layer_ms
        free = start + size * message_ms
        pairs.append((start, free))
    return pairs


@pytest.mark.parametrize(
    ("wrong", "sentence", "words"),
    [
        (pairs_of_start_and_length, lab.LENGTH, "the end of the message, not its len"),
        (the_wire_holds_up_the_layers, lab.READY, "does not wait for the wire"),
        (lambda *a: solve(*a, late=True), lab.READY, "through with per_bucket layers"),
        (lambda *a: solve(*a, full=True), lab.LENGTH, "is left for message 3"),
        (lambda *a: solve(*a, by_layer=False), lab.LENGTH, "is for one layer"),
        (lambda *a: solve(*a, busy=False), lab.BUSY, "max() of two times"),
        (lambda *a: solve(*a, rest=False), lab.COUNT, "left at the end"),
    ],
)
def test_the_hint_is_about_the_rule_that_was_broken(wrong, sentence, words, faults):
    verdict = judge(find_exercise("1.5"), lambda *a: wrong(*a))
    assert sentence in faults(verdict)
    assert words in verdict.hint


def test_a_length_is_expected_with_its_unit(faults):
    verdict = judge(find_exercise("1.5"), lambda *a: solve(*a, full=True))
    assert "3 ms: 1 layer of 3 ms" in faults(verdict)[lab.LENGTH]


def test_messages_that_end_before_they_start_are_not_drawn():
    verdict = judge(find_exercise("1.5"), pairs_of_start_and_length)
    assert verdict.timeline is None


def test_the_own_schedule_is_drawn_even_if_wrong():
    verdict = judge(find_exercise("1.5"), lambda *a: solve(*a, late=True))
    sent = [s for s in verdict.timeline.spans if s.kind == "communication"]
    assert sent[0].start_ns == 50_000_000
    assert verdict.step_ns == 80_000_000


def test_messages_at_once_are_drawn_beside_each_other():
    verdict = judge(find_exercise("1.5"), lambda *a: solve(*a, busy=False))
    lanes = {s.lane for s in verdict.timeline.spans}
    assert lanes == {"default", "comm", "comm, at once"}


@pytest.mark.parametrize(
    "answer",
    [None, 56, [1, 2], [(1, 2, 3)], [("a", "b")], [(float("nan"), 1)], [(0, 1e300)]],
)
def test_what_is_no_schedule_is_reported(answer):
    verdict = judge(find_exercise("1.5"), lambda *a: answer)
    assert not verdict.passed
    assert "expected a list of pairs" in str(verdict)


def test_the_ten_layers_end_at_56_ms_and_hide_24_of_30():
    pairs = resolved(*LESSON)
    assert pairs == ((10, 16), (20, 26), (30, 36), (40, 46), (50, 56))
    assert step_and_hidden(pairs, 50) == (56, 24)


@pytest.mark.parametrize("per_bucket", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize(("layer_ms", "message_ms"), [(5, 3), (5, 8), (4, 4)])
def test_a_written_backward_pass_is_the_recorded_one(layer_ms, message_ms, per_bucket):
    """Rounding of rates to whole FLOP/s and B/s is all that may differ."""
    timeline = from_backward(
        replay(
            recorded(),
            hardware=slow_gpu(layer_ms, message_ms),
            buckets=per_bucket * GRADIENT_BYTES,
        )
    )
    sent = [s for s in timeline.spans if s.kind == "communication"]
    origin = timeline.start_ns
    seen = [((s.start_ns - origin) / 1e6, (s.end_ns - origin) / 1e6) for s in sent]
    assert np.array(seen) == pytest.approx(
        np.array(resolved(10, layer_ms, message_ms, per_bucket)), abs=1e-3
    )
