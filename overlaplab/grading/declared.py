"""Exercises that are declared as data: `exercises.toml`, beside their graders.

    ["2.3"]
    title = "hidden or exposed?"
    solution = ["overlap"]          # the names in the notebook
    points = 2
    timeout_s = 20.0                # 60 if left out
    optional = true                 # false if left out
    left_out = "two lists of times"  # why no law of programs is held, or by law

    [["2.3".verifies]]
    says = "what runs side by side counts once"
    hint = "merge() the intervals of each kind before you add up"
    seen = "{took_ms:.1f} ms"       # format strings, for `expect`
    expected = "{best_ms:.1f} ms"
    hints.gone = "..."              # by reason, for `hint` and `refuse`
    laws = ["hazard", "unwaited"]   # of programs, which this sentence carries
    rows = [...]                    # whatever else the grader knows of this sentence

In the grader's module:

    DECLARED = Declared(__file__)
    PARTS, ONCE = DECLARED.sentences("2.3")

    @DECLARED.grader("2.3")
    def grade_overlap(sheet: Sheet, overlap: object) -> None:
        for sentence, rows in DECLARED.cases("2.3", "rows").items():
            ...
        DECLARED.expect(sheet, ONCE, took == best, took_ms=took, best_ms=best)
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overlaplab.grading.exercise import Grader, Sheet, exercise
from overlaplab.grading.violation import Violation


class Declared:
    """The exercises of the `exercises.toml` that lies beside a module.

    Args:
        module: its `__file__`.
    """

    def __init__(self, module: str) -> None:
        path = Path(module).with_name("exercises.toml")
        self._tables: Mapping[str, Any] = tomllib.loads(path.read_text("utf-8"))
        self._texts: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
        for id, table in self._tables.items():
            for one in table["verifies"]:
                self._texts.setdefault(one["says"], []).append((id, one))

    def sentences(self, id: str) -> tuple[str, ...]:
        """What exercise `id` verifies, in the order of the file."""
        return tuple(one["says"] for one in self._tables[id]["verifies"])

    def cases(self, id: str, field: str) -> dict[str, Any]:
        """The `field` of each sentence of exercise `id` that has one."""
        every = self._tables[id]["verifies"]
        return {one["says"]: one[field] for one in every if field in one}

    def tables(self, id: str) -> tuple[Mapping[str, Any], ...]:
        """All that the file has of each sentence of exercise `id`."""
        return tuple(self._tables[id]["verifies"])

    def expect(
        self, sheet: Sheet, sentence: str, passed: bool, *, hint: str = "", **facts: Any
    ) -> bool:
        """Write a sentence as true or false, in its own words; returns `passed`.

        Args:
            hint: "": the sentence's own, if it has one.
            facts: what `seen` and `expected` are formatted with.
        """
        texts = (self._text(sentence, k, sheet.exercise) for k in ("seen", "expected"))
        seen, expected = (text.format(**facts) for text in texts)
        return sheet.expect(sentence, passed, seen=seen, expected=expected, hint=hint)

    def hint(self, sentence: str, why: str, id: str = "") -> str:
        """One of the sentence's `hints`; "" where `why` is "".

        Args:
            id: the exercise whose sentence it is, if several promise it.

        Raises:
            LookupError: no exercise has such a hint of the sentence.
        """
        if not why:
            return ""
        rows = self._rows(sentence, id)
        found = [one["hints"][why] for one in rows if why in one.get("hints", {})]
        if not found:
            raise LookupError(f"no hint {why!r} of {sentence!r} in exercises.toml")
        hint: str = found[0]
        return hint

    def violation(
        self, sheet: Sheet, sentence: str, *, why: str = "", **facts: Any
    ) -> Violation:
        """What `refuse` would write, for a law.

        Args:
            why: see `hint`.
        """
        texts = (self._text(sentence, k, sheet.exercise) for k in ("seen", "expected"))
        seen, expected = (text.format(**facts) for text in texts)
        hint = self.hint(sentence, why, sheet.exercise)
        return Violation("declared", seen, expected, hint, rank=facts.get("rank"))

    def _text(self, sentence: str, key: str, id: str) -> str:
        text: str = next((x[key] for x in self._rows(sentence, id) if key in x), "")
        return text

    def _rows(self, sentence: str, id: str) -> list[Mapping[str, Any]]:
        """What the file has of a sentence: of exercise `id` first, then of others.

        A grader that several exercises share needs its texts once.
        """
        rows = sorted(self._texts[sentence], key=lambda row: row[0] != id)
        return [one for _, one in rows]

    def refuse(
        self, sheet: Sheet, sentence: str, wrong: bool, *, why: str = "", **facts: Any
    ) -> None:
        """Write a sentence as false if `wrong`; as true, without numbers, if not.

        Args:
            why: see `hint`.
        """
        if wrong:
            hint = self.hint(sentence, why, sheet.exercise)
            self.expect(sheet, sentence, False, hint=hint, **facts)
        else:
            sheet.expect(sentence, True)

    def grader(self, id: str) -> Callable[[Grader], Grader]:
        """Register the decorated function as the grader of exercise `id`.

        Raises:
            TypeError: its table has a key that `exercise` does not know.
        """
        table = self._tables[id]
        hints = {one["says"]: one.get("hint", "") for one in table["verifies"]}
        carried = {
            law: one["says"] for one in table["verifies"] for law in one.get("laws", ())
        }
        return exercise(id, **{**table, "verifies": hints, "laws": carried})
