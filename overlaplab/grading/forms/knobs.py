"""A step with knobs, and exercises that ask for settings of them.

    turn = KnobProgram(KNOBS, _timed, what_if=WHAT_IF)  # turn(batch=64) -> Timeline
    TASKS = KnobTasks(turn, LAB.tables("0.6"), ran="your three settings, each timed")
    LAB.grader("0.6")(TASKS.grade)

Fails closed: a setting that is missing, is no dict, or names a knob or a value that
does not exist is refused with that reason; only the others are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlaplab.grading.exercise import Sheet
from overlaplab.timeline import Timeline
from overlaplab.view import Knob

Settings = Mapping[str, Any]
Numbers = Mapping[str, float]
STARTS = "the others stand where the sliders start"


class KnobProgram:
    """A step that is timed again at each turn of a knob: `turn(batch=64)`.

    Args:
        knobs: by the keyword of a call.
        timed: from a value of every knob to the timeline, in milliseconds. What-ifs
            give it values that no knob has.
        what_if: by name, the knobs that a change sets, from all settings.
    """

    def __init__(
        self,
        knobs: Mapping[str, Knob],
        timed: Callable[[Settings], Timeline],
        what_if: Mapping[str, Callable[[Settings], Settings]] | None = None,
    ) -> None:
        self.knobs, self.what_if = knobs, what_if or {}
        self._timed = timed

    def __call__(self, **settings: Any) -> Timeline:
        """The step with these knobs; those left out stand where the sliders start.

        Raises:
            TypeError: no such knob.
        """
        return self._timed(self.filled(settings))

    def filled(self, settings: Settings) -> dict[str, Any]:
        """With the sliders' starts for what is left out.

        Raises:
            TypeError: no such knob.
        """
        for name in settings:
            if name not in self.knobs:
                raise TypeError(f"there is no knob {name!r}; there are {[*self.knobs]}")
        return {**{name: k.default for name, k in self.knobs.items()}, **settings}

    def saved_percent(self, settings: Settings, change: str) -> float:
        """What the change of `what_if` saves of the step, in percent."""
        full = self.filled(settings)
        changed = {**full, **self.what_if[change](full)}
        return 100 * (1 - self(**changed).step_ns / self(**full).step_ns)

    def problem_with(self, name: str, found: object) -> str:
        """Why `found[name]` is no setting of the knobs, "" if it is one."""
        settings = found.get(name) if isinstance(found, Mapping) else None
        if settings is None or settings == {}:
            return f"you have not filled in {name!r}"
        if not isinstance(settings, Mapping):
            return f"{name!r} is {settings!r:.80}, not a dict"
        for knob, value in settings.items():
            if knob not in self.knobs:
                return f"{name!r}: there is no knob {knob!r}"
            values = self.knobs[knob].values
            if value not in values:
                return f"{name!r}: {knob} is {value!r:.80}, not one of {values}"
        return ""


@dataclass(frozen=True)
class KnobTasks:
    """Settings that are asked for, each judged alone.

    Args:
        turn: the step and its knobs.
        tables: of the sentences (`Declared.tables`). The first is of all entries:
            `seen` (how numbers are described, a format of their names), `expected`,
            `nothing` (what the verdict says of an empty dict) and `changes` (by name, a
            what-if: what each saves is measured). Each other is of one: `entry`,
            `limits` (of a number: [at least, under]), seen and expected of its own.
        measure: named numbers of one setting, which may leave knobs out; None: what
            the changes save.
        measures: the same, by entry.
        listed: the knobs that a wrong entry is reminded of; (): all.
        condition: what else is wrong with a setting, "" if nothing.
        draw: draw the last setting that does not do as asked.
        ran: what is done with the settings, for the verdict.
    """

    turn: KnobProgram
    tables: Sequence[Mapping[str, Any]]
    measure: Callable[[Settings], Numbers] | None = None
    measures: Mapping[str, Callable[[Settings], Numbers]] = field(default_factory=dict)
    listed: Sequence[str] = ()
    condition: Callable[[Settings], str] | None = None
    draw: bool = False
    ran: str = "your settings, each resolved again"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What an exercise with these tasks verifies."""
        return tuple(table["says"] for table in self.tables)

    def grade(self, sheet: Sheet, found: object) -> None:
        """Write every sentence; the tasks whose entry is unusable stay unjudged."""
        sheet.ran(self.ran)
        self.judge(sheet, found, but=self.check_usable(sheet, found))

    def check_usable(
        self, sheet: Sheet, found: object, *, more: Sequence[str] = ()
    ) -> Mapping[str, str]:
        """Write whether all entries are settings; returns the problems by entry.

        Args:
            more: problems with what is no setting of the knobs.
        """
        usable, *tasks = self.tables
        entries = [task["entry"] for task in tasks]
        problems = {e: p for e in entries if (p := self._problem(e, found))}
        nothing = usable.get("nothing", "")
        listed = f"some of {list(self.listed or self.turn.knobs)}; {STARTS}"
        sheet.expect(
            usable["says"],
            not problems and not more,
            seen=nothing
            if nothing and not found
            else "\n".join([*problems.values(), *more]),
            expected=usable.get("expected", listed),
        )
        return problems

    def judge(
        self, sheet: Sheet, found: Any, *, but: Mapping[str, str] | None = None
    ) -> None:
        """Measure each setting and write its sentence.

        Args:
            but: entries to leave out.
        """
        usable, *tasks = self.tables
        for task in tasks:
            entry, says = task["entry"], task["says"]
            if but and entry in but:
                continue
            settings = dict(found[entry])
            measure = self.measures.get(entry, self.measure or self._saved)
            numbers, limits = measure(settings), task["limits"]
            right = all(low <= numbers[n] < end for n, (low, end) in limits.items())
            if self.draw and not right:
                sheet.show(self.turn(**settings), title=f"your {entry!r}")
            text = task.get("seen", usable.get("seen", ""))
            seen = f"{settings}: {text.format(**numbers)}"
            expected = task.get("expected", says)
            sheet.expect(says, right, seen=seen, expected=expected)

    def _saved(self, settings: Settings) -> Numbers:
        changes = self.tables[0].get("changes", {})
        return {k: self.turn.saved_percent(settings, c) for k, c in changes.items()}

    def _problem(self, entry: str, found: object) -> str:
        problem = self.turn.problem_with(entry, found)
        if problem or self.condition is None:
            return problem
        assert isinstance(found, Mapping)
        wrong = self.condition(found[entry])
        return f"{entry!r}: {wrong}" if wrong else ""
