"""How tests of labs ask why a solution was refused, and that no verdict changes.

verdicts.tsv has the verdict of every right and wrong solution in these tests: a row for
each is the test, the exercise, and "passed" or the sentences that are false. A verdict
that is meant to change shows in its diff; write the rows of some tests anew so:

    WRITE_VERDICTS=1 python -m pytest -n 0 tests/labs/test_lab04_small.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlaplab.grading import Verdict, judging
from overlaplab.grading.exercise import Sheet
from tests.grading.hosted import Hosts

if os.environ.get("OVERLAPLAB_HOSTED"):
    judging.judge = Hosts().judge
TABLE = Path(__file__).with_name("verdicts.tsv")
STORED = TABLE.read_text("utf-8").splitlines()
WRITE = bool(os.environ.get("WRITE_VERDICTS"))


@pytest.fixture
def faults() -> Callable[[Verdict], dict[str, str]]:
    """The sentences of a verdict that are false, each with what was seen."""

    def read(verdict: Verdict) -> dict[str, str]:
        return {
            check.name: f"{check.seen}, expected {check.expected}"
            for check in verdict.checks
            if not check.passed
        }

    return read


@pytest.fixture(autouse=True)
def verdict_as_stored(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """What the test's solutions are judged is what the table says."""
    rows: dict[str, None] = {}
    test = f"{request.node.path.name}::{request.node.name}"
    make = Sheet.verdict

    def verdict(sheet: Sheet, **reasons: Any) -> Verdict:
        found = make(sheet, **reasons)
        false = "; ".join(check.name for check in found.checks if not check.passed)
        outcome = "passed" if found.passed else f"refused: {false or 'an error'}"
        rows["\t".join((test, found.exercise, outcome))] = None
        return found

    monkeypatch.setattr(Sheet, "verdict", verdict)
    yield
    stored = [row for row in STORED if row.startswith(f"{test}\t")]
    if WRITE and list(rows) != stored:
        STORED[:] = [*(row for row in STORED if row not in stored), *rows]
        TABLE.write_text("".join(f"{row}\n" for row in STORED), "utf-8")
    elif not WRITE:
        assert sorted(rows) == sorted(stored)
