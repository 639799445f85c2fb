"""What a notebook keeps of its learner: which checks passed, and what with.

Where a check that fails does not stop the notebook (see `judging.check`), the cells
below it ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

from overlaplab.grading.wording import fold, readable

_checked: dict[str, bool] = {}


def note(exercise_id: str, passed: bool) -> None:
    """How the last check of an exercise ended in this process."""
    _checked[exercise_id] = passed


def solved(exercise_id: str) -> bool:
    """Whether the last check of the exercise passed; says so if not.

    For cells that show what the exercise asks for.
    """
    if passed := _checked.get(exercise_id, False):
        return passed
    print(f"(Solve {exercise_id} first: this cell shows what it asks for.)")
    return False


class Kept:
    """The learner's solutions of one lab, and the course's own in their place.

    Args:
        ours: by exercise, what later cells run until it is solved: the solution, or
            "package.module:name", which is imported when it first runs.
        lab: a package; the names of what its `reference` has will do then.
    """

    def __init__(self, ours: Mapping[str, Any], lab: str = "") -> None:
        self._ours, self._lab = ours, lab
        self._mine: dict[str, Any] = {}

    def __contains__(self, exercise_id: str) -> bool:
        return exercise_id in self._mine

    def keep(self, exercise_id: str, solution: object) -> None:
        """Keep what passed its check: later cells run it. Stands below the check."""
        if _checked.get(exercise_id, True):
            self._mine[exercise_id] = solution

    def mine_or_ours(self, exercise_id: str) -> Any:
        """The learner's solution if it passed its check, else the course's own."""
        if exercise_id not in self:
            print(
                f"({exercise_id} is not solved yet: the course's own runs in its place)"
            )
            return self.ours(exercise_id)
        return self._mine[exercise_id]

    def ours(self, exercise_id: str) -> Any:
        """The course's own."""
        own = self._ours[exercise_id]
        if not isinstance(own, str):
            return own
        return resolve_name(own if ":" in own else f"{self._lab}.reference:{own}")

    def whose(self, exercise_id: str) -> str:
        """ "yours", or "the course's" where the learner's has not passed."""
        return "yours" if exercise_id in self else "the course's"


def import_later(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`: imports what is asked for, and not before.

    Args:
        places: by name, where it stands in the package: "reference:train".
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return resolve_name(f"{module}.{places[name]}")

    return find


def print_finding(finding: object) -> None:
    """What a run found, in lines that a notebook does not break within a word."""
    print("\n".join(fold("", readable(str(finding)), indent=0)))


def side_by_side(what: str, yours: object, seen: object) -> None:
    """A prediction beside the outcome. Not marked.

    Args:
        yours: None, or a tuple of nothing else, if none was made.
    """
    parts = yours if isinstance(yours, tuple) else (yours,)
    made = any(part is not None for part in parts)
    guess = f"your guess: {yours}" if made else "no guess"
    print(f"{what}:  {guess}; actual: {seen}")
