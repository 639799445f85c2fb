"""How verdicts are written, and what counts as a number."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from overlaplab.grading import Sheet, Verdict, judge, wording
from overlaplab.grading.answered import as_answer, as_number
from overlaplab.grading.exercise import Exercise
from overlaplab.grading.kept import print_finding
from overlaplab.grading.verdict import CheckResult

LONG = " ".join(["all ranks launch the same buckets"] * 6)


def test_no_line_of_a_verdict_is_wider_than_95_columns_and_the_rest_hangs():
    wrong = CheckResult(LONG, False, f"{LONG}\n  2 x {LONG}", LONG, LONG)
    verdict = Verdict(
        *("98.1", "Double", False, LONG, (CheckResult(LONG, True), wrong)),
        hint=LONG,
        error=LONG,
        unjudged=(LONG,),
    )
    lines = str(verdict).splitlines()
    assert max(map(len, lines)) <= wording.WIDTH
    seen = next(i for i, line in enumerate(lines) if "seen:" in line)
    assert lines[seen].startswith("      seen:     all ranks launch")
    assert lines[seen + 1].startswith(" " * 18 + "launch the same")
    expected = next(i for i, line in enumerate(lines) if "expected:" in line)
    assert lines[expected + 1].startswith(" " * 16 + "launch the same")
    assert any(line.startswith(" " * 18 + "2 x all ranks") for line in lines)
    assert any(line.startswith("  hint: all ranks") for line in lines)
    assert " ".join(" ".join(lines).split()).count(LONG) == 9


def test_what_is_passed_is_as_narrow():
    verdict = Verdict("98.1", "D", True, "", (CheckResult(LONG, True),), note=LONG)
    assert max(map(len, str(verdict).splitlines())) <= wording.WIDTH


def test_a_line_keeps_what_it_is_indented_by_and_short_ones_their_columns():
    lines = wording.fold("seen:     ", "a\n  b   c\n")
    assert lines == ["      seen:     a", "                  b   c"]


def test_a_finding_is_printed_in_lines_that_a_notebook_does_not_break(capsys):
    print_finding(f"hazard: two streams\n  Repair: {LONG} [/tmp/1161135425.py:8 in f]")
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "hazard: two streams"
    assert others[0].startswith("  Repair: all ranks") and len(others) > 1
    assert max(map(len, others)) <= wording.WIDTH
    assert (
        " ".join(" ".join(others).split()) == f"Repair: {LONG} [your cell, line 8 in f]"
    )


@pytest.mark.parametrize(
    ("said", "reads"),
    [
        ("/tmp/ipykernel_7/1161135425.py:8 in train", "your cell, line 8 in train"),
        ("(1161135425.py:8 in f)", "(your cell, line 8 in f)"),
        ("<ipython-input-3-ab12>:9 in f", "your cell, line 9 in f"),
        ('File "<ipython-input-3>", line 9', 'File your cell, line 9'),
        ("model.py:8 in train, 12:30", "model.py:8 in train, 12:30"),
    ],
)  # fmt: skip
def test_a_cell_is_named_as_a_person_finds_it(said, reads):
    assert wording.readable(said) == reads


def test_a_check_says_your_cell_wherever_a_grader_quotes_a_line():
    def grade(sheet: Sheet, thing: object) -> None:
        where = "1161135425.py:8 in train"
        sheet.expect("it is so", False, seen=where, expected=where)

    task = Exercise("98.9", "Made up", ("thing",), ("it is so",), 1, grade)
    (check,) = judge(task, 1).checks
    assert check.seen == check.expected == "your cell, line 8 in train"


@pytest.mark.parametrize(
    "number",
    [
        *(np.int64(3), np.float32(3), np.array(3), np.uint8(3), 3, 3.0),
        *(Fraction(3), Decimal(3), torch.tensor(3), torch.tensor(3.0)),
    ],
    ids=lambda number: f"{type(number).__name__}",
)
def test_a_number_of_any_library_is_one(number):
    assert as_number(number) == 3 and type(as_answer(number)) in (int, float)


@pytest.mark.parametrize(
    "other", [True, np.bool_(True), "3", b"3", None, float("nan"), np.inf, [3], 3j]
)
def test_what_is_no_number_is_none(other):
    assert as_number(other) is None


def test_tables_of_any_library_reach_the_grader_as_pythons_own():
    seen = []

    def grade(sheet: Sheet, thing: object) -> None:
        seen.append(thing)
        sheet.expect("it is so", True)

    task = Exercise("98.9", "Made up", ("thing",), ("it is so",), 1, grade)
    thing = MappingProxyType({"a": (np.int64(1), [np.bool_(True)]), "b": np.arange(2)})
    assert judge(task, thing).passed
    assert seen == [{"a": (1, [True]), "b": [0, 1]}]
    assert type(seen[0]) is dict and type(seen[0]["a"][1][0]) is bool


def test_functions_classes_and_tensors_reach_the_grader_as_they_are():
    tensor, loop = torch.ones(3), []
    loop.append(loop)
    assert all(as_answer(x) is x for x in (tensor, len, int, "text", None))
    as_answer(loop)  # ends
