"""An exercise whose deadline is short, for tests of what does not end."""

from __future__ import annotations

from typing import Any

from overlaplab.grading import Sheet, exercise


@exercise("97.1", title="Haste", solution="ready", verifies=("yes",), timeout_s=0.2)
def grade_haste(sheet: Sheet, ready: Any) -> None:
    sheet.expect("yes", ready() is True)
