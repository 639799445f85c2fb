"""0.0: when a call returns and when the GPU has finished; each slip has its words."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import checks as lab00
from overlaplab_course.lab00.launches import own_products

NUMBER = 6


def right(number=NUMBER):
    products = own_products(number)
    return {
        "returns_us": 10 * products.number,
        "finishes_us": 10 + products.number * products.each_us,
    }


@pytest.mark.parametrize("number", [6, 1, 17, 31])
def test_the_right_times_pass_for_every_number(number):
    verdict = judge(find_exercise("0.0"), number, right(number))
    assert verdict.passed, str(verdict)
    assert verdict.timeline is not None


def test_times_as_floats_and_with_more_keys_pass():
    said = {key: float(value) for key, value in right().items()} | {"note": "mine"}
    assert judge(find_exercise("0.0"), NUMBER, said).passed


@pytest.mark.parametrize("number", range(40))
def test_every_number_draws_products_on_which_each_slip_is_another_number(number):
    products = own_products(number)
    launched_us, kernels_us = 10 * products.number, products.number * products.each_us
    others = launched_us + products.each_us, launched_us + kernels_us
    assert len({launched_us, kernels_us, 10 + kernels_us, *others}) == 5


P = own_products(NUMBER)
WRONG = {
    "it returns when the GPU ends": (
        {"returns_us": right()["finishes_us"]},
        lab00.RETURNS,
        "the CPU does not wait for it",
    ),
    "it returns after one launch": ({"returns_us": 10}, lab00.RETURNS, "all products"),
    "it returns as its last launch begins": (
        {"returns_us": right()["returns_us"] - 10},
        lab00.RETURNS,
        "when the last launch begins",
    ),
    "the GPU begins at 0": (
        {"finishes_us": P.number * P.each_us},
        lab00.FINISHES,
        "nothing to do until the first launch",
    ),
    "the GPU begins when all are launched": (
        {"finishes_us": P.number * (10 + P.each_us)},
        lab00.FINISHES,
        "launches go on beside it",
    ),
    "the GPU ends with the last launch": (
        {"finishes_us": right()["returns_us"]},
        lab00.FINISHES,
        "the GPU is slower",
    ),
    "the last product runs at once": (
        {"finishes_us": right()["returns_us"] + P.each_us},
        lab00.FINISHES,
        "waits in the queue",
    ),
    "nothing filled in": ({"finishes_us": None}, lab00.FINISHES, "is not filled in"),
    "nonsense": ({"returns_us": "soon"}, lab00.RETURNS, "expected: a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slip_is_refused_and_described_by_what_ends_then(name, faults):
    slip, sentence, words = WRONG[name]
    verdict = judge(find_exercise("0.0"), NUMBER, right() | slip)
    assert list(faults(verdict)) == [sentence]
    assert words in str(verdict)


def test_what_is_no_dict_is_refused_with_what_is_expected():
    verdict = judge(find_exercise("0.0"), NUMBER, (80, 210))
    assert not verdict.passed
    assert "times is tuple; expected a dict" in str(verdict)
