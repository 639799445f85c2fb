"""Right solutions that nobody expects, as a table: by name, the exercise and them."""

from __future__ import annotations

from typing import Any


class Cases(dict[str, tuple[str, tuple[Any, ...]]]):
    """By name, the exercise and what is handed in for it."""

    def add(self, id: str, *solutions: Any, name: str = "") -> None:
        """One more, under the name of the last solution if it is given none."""
        what = name or getattr(solutions[-1], "__name__", str(len(self)))
        self[f"{id} {what}"] = id, solutions
