"""1.1 and 1.2: chains of one's own step, and bounds on either side of Tc = Tm."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.program import resolve
from overlaplab_course.lab01 import checks as lab
from overlaplab_course.lab01.given import CHALK, NS_PER_MS, Job, job, write_step

NUMBERS = (6, 7, 23)


def chains(own: Job) -> dict[str, float]:
    last = own.forward_ms + own.num_layers * own.layer_ms + own.message_ms
    first = own.forward_ms + own.layer_ms + own.num_layers * own.message_ms
    both = {"last message": last + own.update_ms, "all messages": first + own.update_ms}
    return {**both, "shortest": max(both.values())}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", [int, float, np.float64, np.int64])
def test_right_chains_pass_as_any_number(number, kind):
    said = {name: kind(ms) for name, ms in chains(job(number)).items()}
    verdict = judge(find_exercise("1.1"), number, said)
    assert verdict.passed, str(verdict)
    assert verdict.step_ns == verdict.target_ns


WRONG_CHAINS = {
    "the bound": ("shortest", "cannot reach"),
    "serial": ("shortest", "no overlap"),
    "the shorter chain": ("shortest", "both chains must fit"),
    "no update": ("last message", "the update needs the last message"),
    "computing alone": ("last message", "the computing alone"),
    "wire from the start": ("all messages", "cannot start before"),
    "no first layer": ("all messages", "one layer's backward pass"),
    "no forward pass": ("all messages", "no gradient before the forward pass"),
}


def wrong_value(name: str, own: Job) -> float:
    right = chains(own)
    return {
        "the bound": max(own.compute_ms, own.communication_ms),
        "serial": own.compute_ms + own.communication_ms,
        "the shorter chain": min(right["last message"], right["all messages"]),
        "no update": right["last message"] - own.update_ms,
        "computing alone": own.compute_ms,
        "wire from the start": own.communication_ms,
        "no first layer": right["all messages"] - own.layer_ms,
        "no forward pass": right["all messages"] - own.forward_ms,
    }[name]


@pytest.mark.parametrize("name", WRONG_CHAINS)
def test_a_chain_with_a_link_missing_is_described_which(name, faults):
    key, words = WRONG_CHAINS[name]
    sentences = {
        "last message": lab.LAST,
        "all messages": lab.ALL,
        "shortest": lab.SHORTEST,
    }
    said = {**chains(job(6)), key: wrong_value(name, job(6))}
    verdict = judge(find_exercise("1.1"), 6, said)
    found = faults(verdict)
    assert list(found) == [sentences[key]]
    assert words in found[sentences[key]]
    assert verdict.step_ns is None  # the figure of the right step would be the answer


def test_what_is_not_filled_in_is_called_so(faults):
    said = {**chains(job(6)), "shortest": None}
    found = faults(judge(find_exercise("1.1"), 6, said))
    assert "'shortest' is not filled in" in found[lab.SHORTEST]


def test_a_text_for_a_number_is_reported(faults):
    said = {**chains(job(6)), "shortest": "85"}
    found = faults(judge(find_exercise("1.1"), 6, said))
    assert "a string; expected a number" in found[lab.SHORTEST]


def test_a_message_of_many_layers_bears_their_names():
    names = [
        [
            s.attributes["label"]
            for s in job(6).timeline(k).spans
            if s.kind == "communication"
        ]
        for k in (8, 3)
    ]
    assert names == [
        ["all layers"],
        ["layers 8 to 6", "layers 5 to 3", "layers 2 to 1"],
    ]


def test_the_chains_of_another_number_are_refused():
    assert not judge(find_exercise("1.1"), 7, chains(job(6))).passed


@pytest.mark.parametrize(
    "said", [{}, {"last message": None}, {"shortest": "85 ms"}, {"shortest": True}]
)
def test_what_is_no_number_is_reported(said, faults):
    found = faults(judge(find_exercise("1.1"), 6, said))
    assert lab.SHORTEST in found


@pytest.mark.parametrize("number", range(12))
def test_no_way_of_sharing_messages_is_shorter_than_the_longer_chain(number):
    own = job(number)
    steps = [own.timeline(k).step_ns for k in range(1, own.num_layers + 1)]
    assert min(steps) == steps[0] == chains(own)["shortest"] * NS_PER_MS
    longer = "all messages" if number % 2 else "last message"
    right = chains(own)
    assert right[longer] == right["shortest"] > min(right.values())


def test_not_even_uneven_buckets_are_shorter():
    own = Job(5, 6, 4, 6, 3)
    best = []
    for cuts in itertools.product((False, True), repeat=own.num_layers - 1):
        sizes = [1]
        for cut in cuts:
            if cut:
                sizes.append(1)
            else:
                sizes[-1] += 1
        layers, messages = [], []
        for size in sizes:  # a bucket is a layer that takes as long as its own layers
            layers.append(size * own.layer_ms)
            messages.append(size * own.message_ms)
        program = write_step(
            layers,
            messages,
            forward_ms=own.forward_ms,
            update_ms=own.update_ms,
        )
        best.append(resolve(program, CHALK).step_ns)
    assert min(best) == chains(own)["shortest"] * NS_PER_MS


# 1.2, right


def three_lines(tc, tm):
    return tc + tm, max(tc, tm), (tc + tm) / max(tc, tm)


def in_closed_form(tc, tm):
    bound = (tc + tm + abs(tc - tm)) / 2
    return [tc + tm, bound, 1 + min(tc, tm) / bound]


def in_fractions(tc, tm):
    share = Fraction(tm, tc + tm)
    return tc + tm, max(tc, tm), 1 / max(share, 1 - share)


def in_an_array(tc, tm):
    both = np.array([tc, tm], dtype=float)
    return np.array([both.sum(), both.max(), both.sum() / both.max()])


@pytest.mark.parametrize(
    "right", [three_lines, in_closed_form, in_fractions, in_an_array]
)
def test_any_way_to_the_right_bounds_passes(right):
    verdict = judge(find_exercise("1.2"), lambda *a: right(*a))
    assert verdict.passed, str(verdict)


def by_share(tc, tm):
    share = tm / (tc + tm)
    return 1 / (1 - share) if share < 1 else 1


WRONG_BOUNDS = {
    "hides behind nothing": (lambda c, m: (c + m, max(c, m), 1 + m / c if c else 1),
                             lab.SPEEDUP, "Tm = 100 ms: best speed-up is 3"),
    "by the share alone": (lambda c, m: (c + m, max(c, m), by_share(c, m)),
                           lab.SPEEDUP, "Tm = 100 ms: best speed-up is 3"),
    "compute is the bound": (lambda c, m: (c + m, c, (c + m) / c if c else 1),
                             lab.SENDING, "bound is 50"),
    "the shorter": (lambda c, m: (c + m, min(c, m), (c + m) / max(c, m)),
                    lab.BOUND, "bound is 50"),
    "half of the sum": (lambda c, m: (c + m, (c + m) / 2, (c + m) / max(c, m)),
                        lab.BOUND, "bound is 75"),
    "serial is the longer": (lambda c, m: (max(c, m), max(c, m), (c + m) / max(c, m)),
                             lab.SERIAL, "serial is 100"),
    "upside down": (lambda c, m: (c + m, max(c, m), max(c, m) / (c + m)),
                    lab.SPEEDUP, "best speed-up is 0.666"),
    "always twice": (lambda c, m: (c + m, max(c, m), 2),
                     lab.SPEEDUP, "best speed-up is 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_BOUNDS)
def test_wrong_bounds_are_refused_by_their_own_sentence(name, faults):
    wrong, sentence, words = WRONG_BOUNDS[name]
    verdict = judge(find_exercise("1.2"), lambda *a: wrong(*a))
    found = faults(verdict)
    assert sentence in found
    if "is 3" in words:
        assert "behind nothing" in verdict.hint
    assert words in found[sentence]
    assert verdict.timeline is not None


def test_a_right_bound_is_called_right_beside_a_wrong_speed_up(faults):
    verdict = judge(
        find_exercise("1.2"), lambda c, m: (c + m, max(c, m), 1 + m / c if c else 1)
    )
    assert list(faults(verdict)) == [lab.SPEEDUP]


def stub(tc, tm):
    raise NotImplementedError


def no_side_is_0(tc, tm):
    return tc + tm, max(tc, tm), 1 + min(tc, tm) / max(tc, tm) + 0 / tm


@pytest.mark.parametrize("broken", [stub, no_side_is_0, lambda c, m: None])
def test_who_breaks_off_is_credited_with_nothing(broken):
    verdict = judge(find_exercise("1.2"), lambda *a: broken(*a))
    assert verdict.error
    assert "  + " not in str(verdict)
    if broken is no_side_is_0:
        assert "division by zero in bounds(70, 0)" in verdict.error


def test_what_was_wrong_before_it_broke_off_is_reported(faults):
    verdict = judge(find_exercise("1.2"), lambda c, m: (c + m, max(c, m), 1 + m / c))
    assert list(faults(verdict)) == [lab.SPEEDUP]
    assert "division by zero in bounds(0, 20)" in verdict.error


@pytest.mark.parametrize("answer", [None, 3, (1, 2), "abc", (1, 2, float("nan"))])
def test_what_are_no_three_numbers_is_reported(answer):
    verdict = judge(find_exercise("1.2"), lambda c, m: answer)
    assert not verdict.passed
    assert "expected (serial, bound, speed-up)" in str(verdict)
