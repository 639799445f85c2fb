"""Errors in plain words, and causes before what follows from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlaplab.grading import Sheet, Verdict, judge, judging
from overlaplab.grading.exercise import Exercise
from overlaplab.grading.notebook import _first_reason


def raised_by(solution: Any) -> list[str]:
    def grade(sheet: Sheet, solution: Any) -> None:
        solution()

    task = Exercise("98.9", "Made up", ("thing",), ("it is so",), 1, grade)
    verdict = judge(task, solution)
    assert _first_reason(verdict.to_dict()) == verdict.error.splitlines()[0]
    return verdict.error.splitlines()


def nobody(_: Any) -> None:
    raise NotImplementedError("9.1")


def returns_from_hook() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: p.grad)
    x.sum().backward()


def in_place_on_a_leaf() -> None:
    torch.ones(2, requires_grad=True).add_(1)


def backward_twice() -> None:
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def overwritten() -> None:
    x = torch.ones(2, requires_grad=True).exp()
    y = x * x
    x.add_(1)
    y.sum().backward()


NONE: Any = None
ANY: Any = [1]
ERRORS = {
    "something is not written yet": lambda: nobody(0),
    "wait() is called on None, where a work": lambda: NONE.wait(),
    "your hook returns something": returns_from_hook,
    "gradient has not arrived (.grad is None)": lambda: torch.ones(2).copy_(NONE),
    "something of type list is called": lambda: ANY(2),
    ".numel is asked of None": lambda: NONE.numel(),
    "/ is asked of None": lambda: NONE / 2,
    "the shapes do not fit: 2 elements beside 3": lambda: torch.ones(2) + torch.ones(3),
    "of a product do not fit: 2x3 times 4x3": lambda: (
        torch.ones(2, 3) @ torch.ones(4, 3)
    ),
    "6 elements do not fit into the shape [4]": lambda: torch.ones(6).view(4),
    "no such view: use reshape()": lambda: torch.ones(2, 3).t().view(6),
    "keeps the shape [2], and the result has [3, 2]": lambda: torch.ones(2).add_(
        torch.ones(3, 2)
    ),
    "a parameter is changed in place": in_place_on_a_leaf,
    "backward() has nothing to go back through": lambda: torch.ones(1).backward(),
    "backward() is called twice": backward_twice,
    "still needs was overwritten": overwritten,
    "numpy cannot take a tensor that autograd follows": lambda: torch.ones(
        1, requires_grad=True
    ).numpy(),
    "called with 2 arguments, and takes 1": lambda: nobody(1, 2),
}


@pytest.mark.parametrize("meaning", ERRORS)
def test_an_error_of_torchs_is_led_by_what_it_means(meaning):
    first, *rest = raised_by(ERRORS[meaning])
    assert meaning in first
    assert " raised " in rest[0], "torch's own words stand below"


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [
        ("answer", [3], "the check cannot use what it was given: answer is [3]"),
        ("answer", lambda: 3, "the check cannot use what your code returned"),
        ("my_number", "five", "my_number is 'five'; expected a whole number"),
        ("my_number", 2.5, "my_number is 2.5; expected a whole number"),
    ],
)
def test_what_has_another_form_is_said_to_have_it(names, given, says):
    def grade(sheet: Sheet, answer: Any) -> None:
        (answer() if callable(answer) else answer).get("kind")

    grade.__code__ = grade.__code__.replace(co_filename=judging.__file__)
    task = Exercise("98.9", "Made up", (names,), ("it is so",), 1, grade)
    assert judge(task, given).error.startswith(says)


def test_an_error_that_speaks_for_itself_stands_alone():
    def own() -> None:
        raise ValueError("the learner's own")

    own.__code__ = own.__code__.replace(co_filename="cell.py")
    assert raised_by(own)[0].endswith("raised ValueError: the learner's own")


def test_what_failed_first_is_said_first_wherever_its_sentence_stands():
    def grade(sheet: Sheet, solution: Any) -> None:
        sheet.expect("it is quick", True)
        sheet.expect("it is waited for", False, seen="nobody waits", hint="wait")
        sheet.expect("it is right", False, seen="element 3 is 7", hint="add")

    promised = ("it is right", "it is waited for", "it is quick")
    task = Exercise("98.9", "Made up", ("thing",), promised, 1, grade)
    verdict = judge(task, 1)
    assert _first_reason(verdict.to_dict()) == "nobody waits" and verdict.hint == "wait"
    assert [check.name for check in verdict.checks] == list(promised)
    lines = [line for line in str(verdict).splitlines() if line.startswith("  -")]
    assert lines == ["  - it is waited for: NO", "  - it is right: NO"]
    assert str(Verdict.from_dict(verdict.to_dict())) == str(verdict)
