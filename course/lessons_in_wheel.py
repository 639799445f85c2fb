"""A wheel carries the lessons: labs run marked cells of them (marked_cells.py).

An editable install has none of its own and reads them where they are edited.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LessonsInWheel(BuildHookInterface[Any]):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            for lesson in Path(self.root, "course").glob("[0-9][0-9]_*.py"):
                place = f"overlaplab_course/lessons/{lesson.name}"
                build_data["force_include"][str(lesson)] = place
