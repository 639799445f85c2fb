"""How an exercise is declared, and the sheet on which its grader writes.

Fail closed: an exercise promises sentences (`verifies`); it passes only if its grader
wrote every one of them on the sheet as true. What a grader forgets, or does not reach,
counts as wrong.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from overlaplab import ours
from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading.verdict import CheckResult, Verdict
from overlaplab.grading.violation import Violation
from overlaplab.grading.wording import readable
from overlaplab.timeline import Timeline

# What holds of every run of a learner's program, by law: an exercise names the sentence
# that carries it, or says why it leaves it out. See `program_laws.hold`.
LAWS: Mapping[str, str] = {
    "hazard": "nothing touches bytes that another stream may still write",
    "unwaited": "every message is waited for",
    "once": "each task is run, each gradient sent, exactly once",
    "cpu": "the CPU waits for nothing",
    "recorded": "what is graded was made by recorded operators",
    "order": "no order comes from a set, an id or a hash: ranks would disagree",
}

# What the fixtures of such an exercise have, each at least twice; `left_out` says why
# one does not.
TWICE: Mapping[str, str] = {
    "worlds": "numbers of ranks, 2 or more; never two alone: a half is no mean",
    "shapes": "sizes of what the program gets",
    "clocks": "one of them with expensive launches and a slow link",
}


class StopGradingError(Exception):
    """Raised by a sheet: what follows would say nothing new."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What a verdict draws, and which step it is beside which."""

    timeline: Timeline | None = None
    title: str = "your run"
    step_ns: int | None = None
    target_ns: int | None = None


class Sheet:
    """What the grader of one exercise saw.

    `ran` says what is run; `verify` and `expect` write one promised sentence each;
    `show` keeps the learner's timeline and the step reached; `note` a remark for who
    passes.
    """

    def __init__(self, exercise: Exercise) -> None:
        self._exercise = exercise
        self._results: dict[str, CheckResult] = {}
        self._settled: set[str] = set()
        self._no_run = False
        self._ran = ""
        self._if_late = ""
        self._drawn = _Drawn()
        self._first: _Drawn | None = None
        self._drawn_of = ""
        self._note = ""

    @property
    def exercise(self) -> str:
        """Its number."""
        return self._exercise.id

    @property
    def laws(self) -> Mapping[str, str]:
        """By law, the sentence that carries it."""
        return self._exercise.laws

    @property
    def if_late(self) -> str:
        """The hint if the deadline passes now; "": it does not end, for all we know."""
        return self._if_late

    def ran(self, what: str, *, if_late: str = "") -> None:
        """Say what runs next: "3 steps of a 4-layer net on 2 ranks, chalk".

        Args:
            if_late: the hint if the deadline passes in it, where a right answer can
                take too long.
        """
        self._ran, self._if_late = what, if_late

    def note(self, text: str) -> None:
        """Say something to a learner who passes."""
        self._note = text

    def verify(
        self,
        name: str,
        violations: Sequence[Violation],
        *,
        list_all: bool = False,
        hint: str = "",
        settled: bool = False,
    ) -> bool:
        """The sentence `name` holds if there is no violation; returns whether.

        Args:
            name: the sentence.
            violations: the first is described, the others are counted.
            list_all: describe all, a line each.
            hint: in the place of the first violation's own.
            settled: as in `expect`.
        """
        if not violations:
            return self.expect(name, True, settled=settled)
        first = violations[0]
        more = len(violations) - 1
        seen, expected = first.message, first.expected
        if list_all:
            seen = "\n".join(v.message for v in violations)
            expected = "\n".join(dict.fromkeys(v.expected for v in violations))
        elif more:
            seen += f"\n(and {more} more like it)"
        return self.expect(
            name, False, seen=seen, expected=expected, hint=hint or first.hint
        )

    def expect(
        self,
        name: str,
        passed: bool,
        *,
        seen: str = "",
        expected: str = "",
        hint: str = "",
        settled: bool = False,
    ) -> bool:
        """Write the promised sentence `name` as true or false; returns `passed`.

        Without a `hint` the exercise's own for this sentence stands, if it has one.
        Written twice, it holds only if it held both times; the first failure stays.

        Args:
            settled: what is run after this cannot change it. Any other sentence that
                held so far is left open where a later run raises.

        Raises:
            LookupError: `name` is not among the exercise's `verifies`.
        """
        if name not in self._exercise.verifies:
            raise LookupError(
                f"exercise {self._exercise.id} does not promise {name!r}; "
                f"it promises {self._exercise.verifies}"
            )
        before = self._results.get(name)
        if settled:
            self._settled.add(name)
        if before is None or before.passed:
            # Only True passes: a truthy tensor or a forgotten call does not.
            if passed is not True:
                hint = hint or self._exercise.hints.get(name, "")
            place = sum(not result.passed for result in self._results.values())
            self._results[name] = CheckResult(
                name, passed is True, readable(seen), readable(expected), hint, place
            )
        return passed is True

    @contextlib.contextmanager
    def meeting(self, name: str, *, hint: str = "") -> Iterator[None]:
        """In here ranks that do not meet break the sentence `name`: the grading ends.

        As where a run raises, sentences that held before are left open, and nothing is
        drawn.
        """
        try:
            yield
        except (DeadlockError, MismatchError) as error:
            self._no_run = True
            self.show(None)
            self.verify(name, [Violation("order", str(error), hint=hint)])
            raise StopGradingError from error

    def show(
        self,
        timeline: Timeline | None,
        *,
        step_ns: int | None = None,
        target_ns: int | None = None,
        title: str = "your run",
    ) -> None:
        """Keep the learner's timeline, and the step reached against the target.

        A later call replaces an earlier one; with None nothing is drawn. Nor is it
        where what runs next raises.
        """
        self._drawn_of = self._ran
        self._drawn = _Drawn(timeline, title, step_ns, target_ns)
        self._first = self._first or self._drawn

    def show_first(self, ran: str = "") -> None:
        """All runs were right: draw the first one's figure, which the lesson has.

        Args:
            ran: all of them together, "": the last.
        """
        self._drawn_of = self._ran = ran or self._ran
        self._drawn = self._first or self._drawn

    def stop_if_wrong(self) -> None:
        """End the grading here if something is wrong already."""
        if not all(result.passed for result in self._results.values()):
            raise StopGradingError

    def verdict(
        self, *, error: str = "", hint: str = "", judged: bool = True
    ) -> Verdict:
        """The verdict as the sheet stands; promises not written count as wrong."""
        wrong = error != "" or any(not r.passed for r in self._results.values())
        if error and self._drawn_of != self._ran:
            self.show(None)  # a run that ended beside the error of another misleads
        checks, unjudged = [], []
        for name in self._exercise.verifies:
            result = self._results.get(name)
            held = result is not None and result.passed
            if held and name not in self._settled and (error or self._no_run):
                unjudged.append(name)  # what raised might have shown that it is false
            elif result is not None:
                checks.append(result)
            elif wrong:  # because of what is reported already
                unjudged += [] if error else [name]
            else:
                checks.append(CheckResult(name, False, "was not verified"))
        passed = (
            not error
            and bool(self._exercise.verifies)
            and len(checks) == len(self._exercise.verifies)
            and all(check.passed for check in checks)
        )
        verdict = Verdict(
            exercise=self._exercise.id,
            title=self._exercise.title,
            passed=passed,
            ran=self._ran,
            checks=tuple(checks),
            hint="" if passed else hint,
            timeline=self._drawn.timeline,
            step_ns=self._drawn.step_ns,
            target_ns=self._drawn.target_ns,
            error=readable(error),
            timeline_title=self._drawn.title,
            note=self._note,
            unjudged=tuple(unjudged),
            judged=judged,
        )
        first_hint = next((c.hint for c in verdict.failed if c.hint), "")
        return replace(verdict, hint=first_hint or verdict.hint)


Grader = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Exercise:
    """One graded task of a lab.

    Args:
        id: "6.3".
        title: as in the lesson.
        solution: the names that the notebook gives to the learner's objects, in the
            order in which `check` and `grade` take them.
        verifies: the sentences that its grader promises to write.
        points: marks.
        grade: `grade(sheet, *solutions)`.
        timeout_s: deadline of one check, in CPU time of the learner's code.
        optional: an extra, after the line where the core of the lab ends.
        hints: by sentence, for a grader that gives none of its own.
        laws: by law of `LAWS`, the sentence that carries it.
        left_out: by law, why no sentence does.
        hides: places ("module:name") that refuse to work where the
            learner's objects are: they solve it. What the lab's `reference` defines is
            hidden anyway.
        lends: names of `reference` that the lesson gives to who solves this.
    """

    id: str
    title: str
    solution: tuple[str, ...]
    verifies: tuple[str, ...]
    points: int
    grade: Grader
    timeout_s: float = 60.0
    optional: bool = False
    hints: Mapping[str, str] = field(default_factory=dict)
    laws: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    hides: tuple[str, ...] = ()
    lends: tuple[str, ...] = ()

    @property
    def lab(self) -> str:
        """Two digits: "06"."""
        return self.id.split(".")[0].zfill(2)


_REGISTRY: dict[str, Exercise] = {}


def exercise(
    id: str,
    *,
    title: str,
    solution: str | Sequence[str],
    verifies: Sequence[str] | Mapping[str, str],
    points: int = 1,
    timeout_s: float = 60.0,
    optional: bool = False,
    laws: Mapping[str, str] = MappingProxyType({}),
    left_out: Mapping[str, str] | str = MappingProxyType({}),
    hides: Sequence[str] = (),
    lends: Sequence[str] = (),
) -> Callable[[Grader], Grader]:
    """Register the decorated function as the grader of exercise `id`.

    The function is called as `grade(sheet, *solutions)` and returns None. See
    `Exercise` for the arguments. `verifies` may be a mapping: sentence -> its hint.
    `left_out` may be one reason for all other laws: nothing of the learner's is run.

    Raises:
        ValueError: the id is taken, or nothing is promised; a law is unknown, carried
            by a sentence that is not promised, or carried and left out.
    """
    if not re.fullmatch(r"\d+\.\d+[a-z]?", id):
        raise ValueError(
            f"exercise id {id!r}; expected LAB.NUMBER, such as '6.3' or '6.5b'"
        )
    names = (solution,) if isinstance(solution, str) else tuple(solution)
    if not names or not verifies:
        raise ValueError(f"exercise {id} names no solution or verifies nothing")
    if len(set(verifies)) != len(verifies):
        raise ValueError(f"exercise {id} promises the same sentence twice")

    reasons = (
        {law: left_out for law in (*LAWS, *TWICE) if law not in laws}
        if isinstance(left_out, str)
        else left_out
    )
    for law in (*laws, *(set(reasons) - set(TWICE))):
        if law not in LAWS or laws.get(law, verifies) not in (verifies, *verifies):
            raise ValueError(f"exercise {id}: no sentence carries the law {law!r}")
        if law in laws and law in reasons:
            raise ValueError(f"exercise {id} leaves out the law {law!r} that it has")

    def register(grade: Grader) -> Grader:
        before = _REGISTRY.get(id)
        if before is not None and before.grade.__module__ != grade.__module__:
            raise ValueError(f"exercise {id} is registered by {before.grade}")
        hints = dict(verifies) if isinstance(verifies, Mapping) else {}
        _REGISTRY[id] = Exercise(
            id,
            title,
            names,
            tuple(verifies),
            points,
            grade,
            timeout_s,
            optional,
            hints,
            laws,
            reasons,
            tuple(hides),
            tuple(lends),
        )
        return grade

    return register


def exercises(lab: str | None = None) -> tuple[Exercise, ...]:
    """Every exercise, or those of `lab` ("06"), by number."""
    _load_labs(lab or "")
    chosen = [e for e in _REGISTRY.values() if lab is None or e.lab == lab]
    return tuple(sorted(chosen, key=lambda e: _number(e.id)))


def _number(id: str) -> tuple[int, int, str]:
    lab, number, part = re.fullmatch(r"(\d+)\.(\d+)([a-z]?)", id).groups()  # type: ignore[union-attr]
    return int(lab), int(number), part


def find_exercise(id: str) -> Exercise:
    """The exercise `id`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    _load_labs(id.split(".")[0].zfill(2))
    if id not in _REGISTRY:
        with contextlib.suppress(Exception):  # of a lab that nobody asked for
            _load_labs("")
        known = ", ".join(sorted(_REGISTRY, key=_number)) or "none"
        raise ValueError(f"no exercise {id!r}; known: {known}")
    return _REGISTRY[id]


def _load_labs(lab: str) -> None:
    """Import the graders of installed labs, which register their exercises.

    Args:
        lab: two digits, or "" for all. All, too, where no entry point has its number:
            an instructor's may have any name.
    """
    points = ours.lab_entry_points()
    for point in [p for p in points if p.name == f"lab{lab}"] or points:
        try:
            point.load()
        except Exception as error:
            error.add_note(f"in {point.value}, the graders of {point.name}")
            raise
