"""5.2: a table of hooks that torch contradicts is refused, entry by entry."""

from __future__ import annotations

import copy

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import checks as lab
from overlaplab_course.lab05.given import hook_case

NUMBER = 5  # weight 6, .grad 24 before, factors 7 and 10
POST = "register_post_accumulate_grad_hook"


def right_table():
    return {
        "register_hook": {"given": 17, "grad": 24, "calls": 1},
        POST: {"given": 6, "grad": 41, "calls": 1},
        "register_full_backward_hook": {"given": 1, "grad": 24, "calls": 2},
        "backward returns": "None",
        "send from": POST,
    }


def test_the_table_of_the_test_is_what_torch_does():
    found = lab.true_answers(hook_case(NUMBER))
    assert found == {n: row for n, row in right_table().items() if n in lab.HOOKS}


def test_the_right_table_passes():
    verdict = judge(find_exercise("5.2"), NUMBER, right_table())
    assert verdict.passed, str(verdict)


def test_any_number_may_stand_for_a_number():
    table = right_table()
    table["register_hook"] = {"given": 17.0, "grad": 24.0, "calls": 1.0}
    assert judge(find_exercise("5.2"), NUMBER, table).passed


WRONG = {
    "a gradient for the parameter": ((POST, "given"), 17, lab.GIVEN, "alone"),
    "a parameter for the gradient": (
        ("register_hook", "given"),
        6,
        lab.GIVEN,
        "the weight itself",
    ),
    "one use alone": (("register_hook", "given"), 10, lab.GIVEN, "one use alone"),
    "before accumulation": ((POST, "grad"), 24, lab.GRAD, "before this backward"),
    "after accumulation": (("register_hook", "grad"), 41, lab.GRAD, "after this"),
    "the module waits for both": (
        ("register_full_backward_hook", "grad"),
        41,
        lab.GRAD,
        "after this",
    ),
    "once a use": ((POST, "calls"), 2, lab.CALLS, "used twice"),
    "once a module": (("register_full_backward_hook", "calls"), 1, lab.CALLS, "twice"),
    "not filled in": ((POST, "given"), None, lab.GIVEN, "print what the hook gets"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_entry_is_refused_and_explained(name, faults):
    (hook, field), answer, sentence, hint = WRONG[name]
    table = copy.deepcopy(right_table())
    table[hook][field] = answer
    verdict = judge(find_exercise("5.2"), NUMBER, table)
    found = faults(verdict)
    assert list(found) == [sentence]
    assert f"{hook}, {field!r}: {answer!r}" in found[sentence]
    assert hint in verdict.hint


@pytest.mark.parametrize(
    ("entry", "answer"),
    [
        ("backward returns", None),
        ("backward returns", "the gradient"),
        ("backward returns", "the loss"),
        ("send from", "register_hook"),
        ("send from", "register_full_backward_hook"),
    ],
)
def test_what_backward_returns_and_where_to_send_are_asked(entry, answer, faults):
    table = {**right_table(), entry: answer}
    found = faults(judge(find_exercise("5.2"), NUMBER, table))
    assert list(found) == [lab.READY]
    assert f"{entry!r}: {answer!r}" in found[lab.READY]


def test_a_row_that_is_missing_is_an_entry_that_is_missing(faults):
    table = {n: row for n, row in right_table().items() if n != POST}
    found = faults(judge(find_exercise("5.2"), NUMBER, {**table, POST: 17}))
    assert list(found) == [lab.GIVEN, lab.GRAD, lab.CALLS]


def test_a_neighbours_table_is_refused():
    assert not judge(find_exercise("5.2"), NUMBER + 1, right_table()).passed


@pytest.mark.parametrize("number", range(20))
def test_no_two_numbers_of_a_case_are_one(number):
    case = hook_case(number)
    total = sum(case.factors)
    numbers = [case.weight, case.grad, *case.factors, total, case.grad + total]
    assert len({1.0, *numbers}) == len(numbers) + 1
