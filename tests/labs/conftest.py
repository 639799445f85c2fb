"""How tests of labs ask why a solution was refused, and that no verdict changes.

verdicts.tsv has the verdict of every right and wrong solution in these tests: a row for
each is the test, the exercise, and "passed" or the sentences that are false. A verdict
that is meant to change shows in its diff; write it anew so:

    rm tests/labs/verdicts.tsv; python -m pytest tests/labs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlaplab.grading import Verdict
from overlaplab.grading.exercise import Sheet

TABLE = Path(__file__).with_name("verdicts.tsv")
STORED = TABLE.read_text("utf-8").splitlines() if TABLE.exists() else None


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
    if STORED is None:
        with TABLE.open("a", encoding="utf-8") as table:
            table.writelines(f"{row}\n" for row in rows)
    else:
        assert list(rows) == [row for row in STORED if row.startswith(f"{test}\t")]
