"""A few of the mutants of `mutants`, and every seed that failed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.mutants import FAILED, fault


def test_a_few_mutants_give_a_result_or_one_error_in_words(tmp_path: Path):
    assert [said for seed in range(40) if (said := fault(seed, tmp_path))] == []


@pytest.mark.parametrize("seed", FAILED)
def test_a_mutant_that_failed_once_does_not_again(seed: int, tmp_path: Path):
    assert fault(seed, tmp_path) == ""
