"""How tests of labs ask why a solution was refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from overlaplab.grading import Verdict


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
