"""A step with knobs, and exercises that ask for settings of them.

    turn = KnobProgram(KNOBS, _timed, what_if=WHAT_IF)  # turn(batch=64) -> Timeline
    TASKS = KnobTasks(
        turn,
        usable="each entry has values that the sliders have",
        measure=lambda s: {"saves": turn.saved_percent(s, "a faster GPU")},
        seen="a faster GPU saves {saves:.1f} %",
        tasks=(KnobTask("GPU-bound", IS_GPU, lambda n: n["saves"] >= 40),),
    )

    @exercise("0.6", solution="found", verifies=TASKS.sentences, ...)
    def grade_knobs(sheet: Sheet, found: Settings) -> None:
        sheet.ran("your settings, each resolved again")
        TASKS.grade(sheet, found)

Fails closed: a setting that is missing, is no dict, or names a knob or a value that
does not exist is refused with that reason; only the others are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
class KnobTask:
    """One setting that is asked for.

    Args:
        name: the learner's entry.
        sentence: what the exercise promises about it.
        holds: whether it does as asked, from the numbers that were measured of it.
        seen: how the numbers are described, a format of their names; "": as all.
        expected: "": the sentence.
        hint: "": as all.
        measure: what is measured of this setting; None: as of all.
    """

    name: str
    sentence: str
    holds: Callable[[Numbers], bool]
    seen: str = ""
    expected: str = ""
    hint: str = ""
    measure: Callable[[Settings], Numbers] | None = None


@dataclass(frozen=True)
class KnobTasks:
    """Settings that are asked for, each judged alone.

    Args:
        turn: the step and its knobs.
        usable: the sentence that all entries are settings of the knobs.
        tasks: in the order of their sentences.
        measure: named numbers of one setting, which may leave knobs out.
        seen, hint: of every task that has none of its own.
        listed: the knobs that a wrong entry is reminded of; (): all.
        expected: of `usable`, instead of that list.
        nothing: what the verdict says of an empty dict.
        condition: what else is wrong with a setting, "" if nothing.
        draw: draw the last setting that does not do as asked.
    """

    turn: KnobProgram
    usable: str
    tasks: Sequence[KnobTask]
    measure: Callable[[Settings], Numbers]
    seen: str = ""
    hint: str = ""
    listed: Sequence[str] = ()
    expected: str = ""
    nothing: str = ""
    condition: Callable[[Settings], str] | None = None
    draw: bool = False

    @classmethod
    def declared(
        cls, turn: KnobProgram, tables: Sequence[Mapping[str, Any]], **options: Any
    ) -> Self:
        """Tasks from `Declared.tables`.

        Args:
            tables: the first is of all entries, with seen, expected, nothing as above
                and `changes` (by name, a what-if: what each saves is measured). Each
                other is a task, with `entry`, `limits` (of a number: [at least, under])
                and seen, expected as above.
            options: of the class: measure (without `changes`), condition, draw, listed.
        """

        def texts(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
            return {name: table[name] for name in names if name in table}

        def within(limits: Mapping[str, Sequence[float]]) -> Callable[[Numbers], bool]:
            return lambda n: all(low <= n[k] < end for k, (low, end) in limits.items())

        usable, *rest = tables
        changes: Mapping[str, str] = usable.get("changes", {})

        def saved(settings: Settings) -> Numbers:
            return {k: turn.saved_percent(settings, c) for k, c in changes.items()}

        return cls(
            turn,
            usable["says"],
            tuple(
                KnobTask(
                    task["entry"],
                    task["says"],
                    within(task["limits"]),
                    **texts(task, "seen", "expected"),
                )
                for task in rest
            ),
            **{"measure": saved} | options,
            **texts(usable, "seen", "expected", "nothing"),
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """What an exercise with these tasks verifies."""
        return (self.usable, *(task.sentence for task in self.tasks))

    def grade(self, sheet: Sheet, found: object) -> None:
        """Write every sentence; the tasks whose entry is unusable stay unjudged."""
        self.judge(sheet, found, but=self.check_usable(sheet, found))

    def check_usable(
        self, sheet: Sheet, found: object, *, more: Sequence[str] = ()
    ) -> Mapping[str, str]:
        """Write whether all entries are settings; returns the problems by task name.

        Args:
            more: problems with what is no setting of the knobs.
        """
        problems = {t.name: p for t in self.tasks if (p := self._problem(t, found))}
        sheet.expect(
            self.usable,
            not problems and not more,
            seen=self.nothing
            if self.nothing and not found
            else "\n".join([*problems.values(), *more]),
            expected=self.expected
            or f"some of {list(self.listed or self.turn.knobs)}; {STARTS}",
        )
        return problems

    def judge(
        self, sheet: Sheet, found: Any, *, but: Mapping[str, str] | None = None
    ) -> None:
        """Measure each setting and write its sentence.

        Args:
            but: tasks to leave out, by name.
        """
        for task in self.tasks:
            if but and task.name in but:
                continue
            settings = dict(found[task.name])
            numbers = (task.measure or self.measure)(settings)
            right = task.holds(numbers)
            if self.draw and not right:
                sheet.show(self.turn(**settings), title=f"your {task.name!r}")
            sheet.expect(
                task.sentence,
                right,
                seen=f"{settings}: " + (task.seen or self.seen).format(**numbers),
                expected=task.expected or task.sentence,
                hint=task.hint or self.hint,
            )

    def _problem(self, task: KnobTask, found: object) -> str:
        problem = self.turn.problem_with(task.name, found)
        if problem or self.condition is None:
            return problem
        assert isinstance(found, Mapping)
        wrong = self.condition(found[task.name])
        return f"{task.name!r}: {wrong}" if wrong else ""
