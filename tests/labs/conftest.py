"""How tests of labs ask why a solution was refused, and that no verdict changes.

verdicts.tsv has the verdict of every right and wrong solution in these tests: a row for
each is the test, the exercise, and "passed" or the sentences that are false. What
passes was tried in two worlds and shapes and on two clocks (`exercise.TWICE`), or its
exercise says why not. A verdict that is meant to change shows in its diff; write the
rows of some tests anew so:

    WRITE_VERDICTS=1 python -m pytest -n 0 tests/labs/test_lab04_small.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overlaplab.grading import (
    Verdict,
    find_exercise,
    judging,
    origins,
    program_laws,
)
from overlaplab.grading.exercise import TWICE, Sheet
from overlaplab.program import Program
from overlaplab.program.access import num_bytes
from overlaplab.program.resolve import _Resolution
from tests.grading.hosted import Hosts

if os.environ.get("OVERLAPLAB_HOSTED"):
    judging.judge = Hosts().judge
TABLE = Path(__file__).with_name("verdicts.tsv")
STORED = TABLE.read_text("utf-8").splitlines()
WRITE = bool(os.environ.get("WRITE_VERDICTS"))


class Tried:
    """The programs that graders hold to the laws, and the clocks they are timed on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[Sheet, list[Any]] = {}
        self.clocks: dict[int, set[str]] = {}
        self.kept: list[Any] = []  # so that no id is given twice
        hold, start = program_laws.hold, _Resolution.__init__

        def held(sheet: Sheet, run: Any, **options: Any) -> bool:
            self.held.setdefault(sheet, []).append(run)
            return hold(sheet, run, **options)

        def timed(self_: Any, graph: Any, hardware: Any) -> None:
            # Edited records share what the storages are.
            storages = graph.program.storages
            self.kept.append(storages)
            known = self.clocks.setdefault(id(storages), set())
            known.add(hardware.name)
            start(self_, graph, hardware)

        monkeypatch.setattr(program_laws, "hold", held)
        monkeypatch.setattr(_Resolution, "__init__", timed)

    def once(self, sheet: Sheet) -> list[str]:
        """What of `TWICE` a sheet that passes did not have, nor left out."""
        exercise, runs = find_exercise(sheet.exercise), self.held.get(sheet, [])
        programs = [run.program for run in runs]
        timed = [len(self.clocks.get(id(p.storages), ())) for p in programs]
        several = {
            "worlds": len({len(p.ranks) for p in programs} - {1}) > 1,
            "shapes": len({*map(_sizes, programs)}) > 1,
            "clocks": max(timed, default=0) > 1,
        }
        return [
            f"{exercise.id}: {what} {'twice, too' if several[what] else 'once'}"
            for what in TWICE
            if several[what] is (what in exercise.left_out)
        ]


def _sizes(program: Program) -> frozenset[int]:
    """Bytes that are touched at once, of what the fixture gave if that is known."""
    given = [n.access for n in program.names if n.name == origins.GIVEN]
    every = (a for op in program.ranks[0] for a in (*op.reads, *op.writes))
    return frozenset(map(num_bytes, given or every))


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
    once: list[str] = []
    tried = Tried(monkeypatch)
    test = f"{request.node.path.name}::{request.node.name}"
    make = Sheet.verdict

    def verdict(sheet: Sheet, **reasons: Any) -> Verdict:
        found = make(sheet, **reasons)
        false = "; ".join(check.name for check in found.checks if not check.passed)
        outcome = "passed" if found.passed else f"refused: {false or 'an error'}"
        rows["\t".join((test, found.exercise, outcome))] = None
        if found.passed:
            once.extend(tried.once(sheet))
        return found

    monkeypatch.setattr(Sheet, "verdict", verdict)
    yield
    assert not once
    stored = [row for row in STORED if row.startswith(f"{test}\t")]
    if WRITE and list(rows) != stored:
        STORED[:] = [*(row for row in STORED if row not in stored), *rows]
        TABLE.write_text("".join(f"{row}\n" for row in STORED), "utf-8")
    elif not WRITE:
        assert sorted(rows) == sorted(stored)
