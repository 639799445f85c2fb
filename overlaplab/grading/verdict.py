"""What a check says. Knows no exercise, no torch; a picture is drawn only if asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from overlaplab.grading.wording import fold
from overlaplab.timeline import Timeline

_OF_A_CHECK = ("name", "passed", "seen", "expected")
_FIELDS = (
    *("exercise", "title", "passed", "judged", "ran", "hint", "error", "note"),
    *("step_ns", "target_ns"),
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that was looked at.

    Args:
        name: the sentence that is true if it passed: "each bucket is sent once a step".
        passed: whether it is.
        seen: what the run showed, with numbers, ranks, streams and times.
        expected: what it should have shown.
        hint: the smallest hint that helps, "" if none.
        place: among those that failed, as they were found: the first is the cause, or
            nearest to it.
    """

    name: str
    passed: bool
    seen: str = ""
    expected: str = ""
    hint: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one exercise's check.

    Args:
        exercise: its number, "6.3".
        title: its title.
        passed: every promised check was made, and passed.
        ran: what ran, one sentence.
        checks: what was looked at, in the exercise's order.
        hint: of the first in `failed` that has one.
        timeline: the learner's own run, if there was one.
        timeline_title: which run that is: "your run on 'branches', step 1".
        step_ns: the step time that the learner reached, None where no time counts.
        target_ns: the step time of the reference.
        error: what ended the check: "your code raised KeyError: ..." with the frames
            of the learner's, or why it was not run; "" if it ran to its end.
        note: what somebody who passed should know, "" if nothing.
        unjudged: sentences that the failure above them left open.
        judged: False if the machine was to blame: this is neither right nor wrong.
    """

    exercise: str
    title: str
    passed: bool
    ran: str = ""
    checks: tuple[CheckResult, ...] = ()
    hint: str = ""
    timeline: Timeline | None = None
    step_ns: int | None = None
    target_ns: int | None = None
    error: str = ""
    timeline_title: str = "your run"
    note: str = ""
    unjudged: tuple[str, ...] = ()
    judged: bool = True

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """What did not pass, causes first."""
        wrong = [check for check in self.checks if not check.passed]
        return tuple(sorted(wrong, key=lambda check: check.place))

    def __str__(self) -> str:
        return "\n".join(self._right() if self.passed else self._wrong())

    def _heading(self) -> str:
        wrong = "not yet" if self.judged else "not judged"
        outcome = "passed" if self.passed else wrong
        return f"{self.exercise} {self.title}: {outcome}"

    def _right(self) -> list[str]:
        lines = [self._heading()]
        for check in self.checks:
            lines += fold("+ ", check.name, indent=2)
        if self.note:
            lines += fold("note: ", self.note, indent=2)
        return lines + self._times()

    def _wrong(self) -> list[str]:
        lines = [self._heading()]
        if self.ran:
            lines += fold("ran: ", self.ran, indent=2)
        for check in self.checks:
            if check.passed:
                lines += fold("+ ", check.name, indent=2)
        for check in self.failed:
            lines += fold("- ", f"{check.name}: NO", indent=2)
            if check.seen:
                lines += fold("seen:     ", check.seen)
            if check.expected:
                lines += fold("expected: ", check.expected)
        for name in self.unjudged:
            lines += fold("? ", f"{name}: not judged yet", indent=2)
        if self.error:
            lines += fold("", self.error)
        if self.hint:
            lines += fold("hint: ", self.hint, indent=2)
        return lines + self._times()

    def _times(self) -> list[str]:
        if self.step_ns is None:
            return []
        if not self.passed and self.step_ns <= (self.target_ns or 0):
            return []  # what is wrong may be what makes it fast
        times = {"step": self.step_ns, "target": self.target_ns}
        known = {name: ns for name, ns in times.items() if ns is not None}
        if max(known.values()) < 1_000_000:  # two digits of a ms say too little
            said = (f"{name}: {ns / 1e3:.0f} us" for name, ns in known.items())
        else:
            said = (f"{name}: {ns / 1e6:.2f} ms" for name, ns in known.items())
        return ["  " + ", ".join(said)]

    def _repr_html_(self) -> str:
        colour = "#1a7f37" if self.passed else "#b35900"
        return (
            f'<pre style="border-left: 4px solid {colour}; padding-left: 8px">'
            f"{escape(str(self))}</pre>"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values: everything but the timeline; what failed last, causes first."""
        ordered = [*(c for c in self.checks if c.passed), *self.failed]
        checks = [{n: getattr(c, n) for n in _OF_A_CHECK} for c in ordered]
        fields = {name: getattr(self, name) for name in _FIELDS}
        return fields | {"unjudged": list(self.unjudged), "checks": checks}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Verdict:
        """Of what `to_dict` gave: it says the same."""
        return cls(
            **{name: values[name] for name in _FIELDS},
            unjudged=tuple(values["unjudged"]),
            checks=tuple(CheckResult(**check) for check in values["checks"]),
        )
