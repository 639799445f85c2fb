"""10.7: settings are known by what they do; and what the extras count is right."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab10 import extras, setting_checks
from overlaplab_course.lab10.extras import LAYER_ELEMENTS, deepspeed_ahead

KEPT = {"reshard_after_forward": False}


def wishes(**changed):
    right = {
        "gathered once": KEPT,
        "nothing to prefetch": {**KEPT, "backward": 2},
        "two layers ahead": 2 * LAYER_ELEMENTS,
    }
    return right | {name.replace("_", " "): wish for name, wish in changed.items()}


@pytest.mark.parametrize(
    "wish",
    [
        wishes(),
        wishes(gathered_once={**KEPT, "backward": 1}),
        wishes(nothing_to_prefetch={**KEPT, "backward": 1, "forward": 2}),
        wishes(two_layers_ahead=2.0 * LAYER_ELEMENTS - 1),  # the last one may pass it
    ],
)
def test_any_right_wish_passes(wish):
    verdict = judge(find_exercise("10.7"), wish)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (wishes(gathered_once={}), setting_checks.ONCE),
        (wishes(gathered_once={"forward": 2}), setting_checks.ONCE),
        (wishes(nothing_to_prefetch={"backward": 2}), setting_checks.NOTHING),
        (wishes(nothing_to_prefetch=KEPT), setting_checks.NOTHING),
        (wishes(two_layers_ahead=2), setting_checks.AHEAD),
        (wishes(two_layers_ahead=2 * 4 * LAYER_ELEMENTS), setting_checks.AHEAD),
        (wishes(two_layers_ahead=2 * LAYER_ELEMENTS + 1), setting_checks.AHEAD),
        (wishes(two_layers_ahead=LAYER_ELEMENTS), setting_checks.AHEAD),
        (wishes(two_layers_ahead=None), setting_checks.USABLE),
        (wishes(gathered_once=None), setting_checks.USABLE),
        (wishes(gathered_once={"prefetch": 2}), setting_checks.USABLE),
    ],
)
def test_a_wrong_wish_is_refused_for_its_own_reason(wrong, sentence, faults):
    assert set(faults(judge(find_exercise("10.7"), wrong))) == {sentence}


def test_backward_prefetch_of_kept_weights_changes_nothing():
    kept = extras.try_fsdp2(**KEPT)
    asked = extras.try_fsdp2(**KEPT, backward=2)
    assert (kept.backward, asked.backward) == (0, 0)
    assert (kept.step_ns, kept.layers) == (asked.step_ns, asked.layers)


def test_ours_holds_one_layer_more_than_its_depth():
    assert [extras.try_ours(prefetch=d).layers for d in (0, 1, 2)] == [1, 2, 3]


def test_deepspeed_takes_the_tensor_that_passes_the_bucket():
    assert deepspeed_ahead(0, [10, 10]) == 0
    assert deepspeed_ahead(1, [10, 10]) == 1
    assert deepspeed_ahead(10, [10, 10]) == 1
    assert deepspeed_ahead(11, [10, 10]) == 2
    assert deepspeed_ahead(1e9, [10, 10]) == 2
