"""16.4: what a block keeps is judged by time and bytes; a policy has two answers."""

from __future__ import annotations

import pytest
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab16 import policy_checks

SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


def keeps(*names):
    def policy(ctx, op, *args, **kwargs):
        return SAVE if any(name in str(op) for name in names) else AGAIN

    return policy


def what_has_flops(ctx, op, *args, **kwargs):
    """torch's registry has no attention of CPUs."""
    counted = op._overloadpacket in flop_registry or "attention" in str(op)
    return SAVE if counted else AGAIN


def all_but_what_is_cheap(ctx, op, *args, **kwargs):
    """The other way round: what is not kept has names."""
    cheap = ("norm", "gelu", "silu", "add.", "mul", "view", "t.", "clone", "copy")
    cheap += ("transpose", "unbind", "detach", "split", "select", "empty", "unsafe")
    return AGAIN if any(name in str(op) for name in cheap) else SAVE


WRONG_POLICIES = {
    "nothing": (keeps("no such"), policy_checks.DEAR),
    "attention alone": (keeps("attention"), policy_checks.DEAR),
    "matmuls alone": (keeps("mm"), policy_checks.DEAR),
    "matmuls with a bias": (keeps("addmm", "attention"), policy_checks.DEAR),
    "the cheap ones": (keeps("gelu", "norm", "silu"), policy_checks.DEAR),
    "everything": (keeps(""), policy_checks.CHEAP),
    "GELU, too": (keeps("mm", "attention", "gelu"), policy_checks.CHEAP),
    "norms, too": (keeps("mm", "attention", "norm"), policy_checks.CHEAP),
}


@pytest.mark.parametrize("name", WRONG_POLICIES)
def test_a_wrong_policy_is_refused_for_its_own_reason(name, faults):
    policy, sentence = WRONG_POLICIES[name]
    assert sentence in faults(judge(find_exercise("16.4"), policy))


@pytest.mark.parametrize(
    "policy",
    [keeps("mm", "attention"), what_has_flops, all_but_what_is_cheap],
    ids=["names", "what_has_flops", "all_but_what_is_cheap"],
)
def test_a_right_policy_passes_however_it_decides(policy):
    verdict = judge(find_exercise("16.4"), policy)
    assert verdict.passed, str(verdict)


def in_words(ctx, op, *args, **kwargs):
    return "MUST_SAVE" if "mm" in str(op) else "PREFER_RECOMPUTE"


def what_it_keeps_alone(ctx, op, *args, **kwargs):
    if "mm" in str(op) or "attention" in str(op):
        return SAVE


@pytest.mark.parametrize(
    ("policy", "answer"),
    [(in_words, "'PREFER_RECOMPUTE'"), (what_it_keeps_alone, "None")],
    ids=["in words", "what it keeps alone"],
)
def test_a_policy_that_gives_no_answer_is_told_the_two_there_are(policy, answer):
    error = judge(find_exercise("16.4"), policy).error
    assert f"for aten.native_layer_norm.default your policy returned {answer}" in error
    assert "CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE" in error
