"""Right solutions that nobody expects pass."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from tests.labs import unusual_numbers, unusual_programs, unusual_repairs

CASES = {**unusual_numbers.CASES, **unusual_programs.CASES, **unusual_repairs.CASES}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that torch has changed
@pytest.mark.parametrize("case", CASES)
def test_an_unusual_solution_that_is_right_passes(case):
    id, solutions = CASES[case]
    verdict = judge(find_exercise(id), *solutions)
    assert verdict.passed, str(verdict)
