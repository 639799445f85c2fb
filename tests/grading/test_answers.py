"""What a learner's function returned: numbers, pairs, and what a wrong number is."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from overlaplab.grading import Exercise, Sheet
from overlaplab.grading.forms import (
    KnobProgram,
    KnobTasks,
    as_number,
    find_slip,
    is_close,
    read_numbers,
    read_pairs,
    said_timeline,
    write_number,
)
from overlaplab.view import Knob

NAN = float("nan")


@pytest.mark.parametrize("answer", [2, 2.0, np.float64(2), np.int64(2), Fraction(2)])
def test_a_number_of_any_type_is_one(answer):
    assert as_number(answer) == 2


@pytest.mark.parametrize("answer", [None, True, "2", b"2", NAN, float("inf"), [2]])
def test_what_is_no_finite_number_is_none(answer):
    assert as_number(answer) is None


def test_rounding_is_free_and_a_forgotten_term_is_not():
    assert is_close(100.005, 100) and not is_close(100.1, 100)
    assert not is_close(None, 0) and not is_close(NAN, 0)
    assert (write_number(None), write_number(1 / 3, ".2f")) == ("None", "0.33")


def test_a_slip_is_the_first_whose_number_was_said():
    slips = {"serial": "no overlap", "half": "half of it", "sum": "no overlap either"}
    numbers = {"serial": 150.0, "sum": 75.0}
    assert find_slip(150, slips, numbers) == "no overlap"
    assert find_slip(75, slips, numbers) == "no overlap either"
    assert find_slip(75, slips, {**numbers, "half": 75.0}) == "half of it"
    assert find_slip(None, slips, numbers) == find_slip(1, slips, numbers) == ""


@pytest.mark.parametrize("answer", [None, 3, "abc", (1, 2), (1, 2, NAN), (1, "b", 2)])
def test_other_than_so_many_numbers_is_refused_by_what_is_wanted(answer):
    with pytest.raises(ValueError, match=r"f returned .*; expected \(a, b, c\): 3 num"):
        read_numbers(answer, 3, "f", "(a, b, c)")
    assert read_numbers((1, None, 2), 3, "f", "") == [1, None, 2]


@pytest.mark.parametrize(
    "answer", [None, 5, [1, 2], [(1, 2, 3)], [(NAN, 1)], [(0, 1e300)]]
)
def test_what_are_no_pairs_is_refused(answer):
    with pytest.raises(ValueError, match=r"f returned .*; expected a list of pairs"):
        read_pairs(answer, "f returned", "pairs")


def test_what_is_said_to_run_at_once_is_drawn_on_a_lane_of_its_own():
    said = [("comm", "communication", f"bucket {i}", i, i + 1.5) for i in range(2)]
    mark = ("default", "compute", "mm", 5, 4)
    spans = said_timeline([*said, mark], unit_ns=1000).spans
    assert {s.name: (s.lane, s.start_ns, s.end_ns) for s in spans} == {
        "bucket 0": ("comm", 0, 1500),
        "bucket 1": ("comm, at once", 1000, 2500),
        "mm": ("default", 5000, 5000),
    }


class Step:
    def __init__(self, step_ns):
        self.step_ns = step_ns


@pytest.mark.parametrize(("batch", "right"), [(1, True), (4, False), (2, False)])
def test_a_declared_task_holds_within_its_limits(batch, right):
    turn = KnobProgram(
        {"batch": Knob((1, 2, 4), 1)},
        lambda s: Step(100 + 100 * s["batch"]),
        what_if={"a smaller batch": lambda s: {"batch": 0}},
    )
    tables = (
        {"says": "usable", "changes": {"smaller": "a smaller batch"}},
        {"says": "saves 50", "entry": "half", "limits": {"smaller": [50, 60]},
         "seen": "{smaller:.0f} %"},
    )  # fmt: skip
    tasks = KnobTasks(turn, tables)
    sheet = Sheet(
        Exercise("9.1", "form", ("x",), tasks.sentences, 1, lambda sheet: None)
    )
    tasks.grade(sheet, {"half": {"batch": batch}})
    usable, saves = sheet.verdict().checks
    assert (usable.passed, saves.passed) == (True, right)
    assert saves.seen == f"{{'batch': {batch}}}: {100 * batch / (1 + batch):.0f} %"
