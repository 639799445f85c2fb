"""A deadline that is short, and a place to hide that there is not."""

from __future__ import annotations

from typing import Any

from overlaplab.grading import Sheet, exercise, stage


@exercise("97.1", title="Haste", solution="ready", verifies=("yes",), timeout_s=0.2)
def grade_haste(sheet: Sheet, ready: Any) -> None:
    sheet.expect("yes", ready() is True)


@exercise("97.9", title="Lost", solution="x", verifies=("yes",), hides=("os:nowhere",))
def grade_lost(sheet: Sheet, x: Any) -> None:
    sheet.expect("yes", True)


@exercise("97.2", title="Again", solution="again", verifies=("yes",), timeout_s=0.2)
def grade_again(sheet: Sheet, again: Any) -> None:
    sheet.expect("yes", all(stage.job(again) is True for _ in range(50)))
