"""Exercises that hand out a broken program: diagnose it, mend it, keep its overlap.

The learner's number draws what the program works on, so that the diagnosis differs from
desk to desk; the repair is tried on more than that.

    FLAT = Repair(
        diagnosis=DIAGNOSIS, kept=SHORT, clock=SLOWER,
        truth=lambda number: {"kind": "race", "tensor": f"flat {first_of(number)}"},
        cases=lambda number: (Case(number), Case(number, num_ranks=3, rows=128)),
        play=Case.run,
        reference=reference.send_gradients,
        wrong=lambda case, seen, right: wrong_results(seen, right),
        ran="your program on the objects of number {number}, 2 ranks",
    )

    @exercise("3.3a", solution=("my_number", "flat_diagnosis", "send_gradients"),
              laws={"hazard": SAFE, "unwaited": SAFE, "recorded": VALUES}, ...)
    def grade_flat(sheet, my_number, said, repaired):
        FLAT.grade(sheet, my_number, said, repaired)

Fails closed: a diagnosis that is no dict, an answer that is missing or wrong, and a
result that the recorded program did not compute are each refused in words of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from overlaplab.grading import laws, program_laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms.results import Examined, judge_step, need_dict
from overlaplab.grading.violation import Violation
from overlaplab.hardware import Hardware

Program = Callable[..., Any]


def check_diagnosis(
    sheet: Sheet,
    sentence: str,
    said: object,
    truth: Mapping[str, object],
    *,
    where: Mapping[str, str] | None = None,
    kinds: Sequence[str] = (),
) -> None:
    """Each field of `truth` was said right (`laws.diagnosis_law`); all are listed.

    Args:
        where: by field, where the run shows it: a hint. What is not filled in is then
            listed in one line.
        kinds: what "kind" may be, for who says something else.

    Raises:
        TypeError: `said` is no dict.
    """
    answers = need_dict(said, "the diagnosis")
    if where is None:
        wrong = laws.diagnosis_law(answers, truth, kinds=kinds)
    else:
        wrong = _with_places(answers, truth, where, kinds)
    sheet.verify(sentence, wrong, list_all=True, settled=True)


def _with_places(
    said: Mapping[str, Any],
    truth: Mapping[str, object],
    where: Mapping[str, str],
    kinds: Sequence[str],
) -> list[Violation]:
    found = []
    empty = [key for key in truth if said.get(key) is None]
    if empty:
        message = f"not filled in: {', '.join(empty)}"
        expected = "what the run of the program as given shows"
        found.append(Violation("diagnosis", message, expected))
    for key, right in truth.items():
        if key not in empty and laws.diagnosis_law(said, {key: right}):
            message = f"{key}: {said[key]!r} is not what the run shows"
            expected = f"the {key} that the program as given shows"
            if key == "kind" and kinds:
                expected = f"one of: {', '.join(kinds)}"
            found.append(Violation("diagnosis", message, expected, where.get(key, "")))
    return found


@dataclass(frozen=True)
class Repair:
    """A broken program, what is wrong with it, and what its repair must keep.

    The laws of programs stand in the sentences that the exercise says.

    Args:
        diagnosis, kept: the sentences of the diagnosis and of the step.
        truth: from a number to the right diagnosis.
        cases: from a number to what the repair is played on: what the number draws,
            then others, of another shape in another world. Hashable; they print.
        play: (case, program) -> the run of a program on it.
        reference: the course's repair.
        wrong: (case, seen, the reference's run) -> results that are not right.
        ran: what runs first, a format of {number} and the fields of `truth`.
        clock: a second one, see `program_laws.slower`.
        once: what the law "once" finds in a run, if the exercise has it.
        also: more sentences, each with its violations of the repaired run.
        but, hints: of `program_laws.hold`.
        where: see `check_diagnosis`.
        kinds: see `check_diagnosis`.
        what: the results are, for a message.
        title: of the figure.
        hint: where the step is too long.
        stop: judge the step only if all else is right.
    """

    diagnosis: str
    kept: str
    truth: Callable[[int], Mapping[str, object]]
    cases: Callable[[int], Sequence[Any]]
    play: Callable[[Any, Program], Examined]
    reference: Program
    wrong: Callable[[Any, Examined, Examined], list[Violation]]
    ran: str
    clock: Hardware
    once: Callable[[Examined], list[Violation]] | None = None
    also: Mapping[str, Callable[[Examined], list[Violation]]] = field(
        default_factory=dict
    )
    but: Sequence[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] | None = None
    kinds: Sequence[str] = ()
    what: str = "the result"
    title: str = "your run"
    hint: str = ""
    stop: bool = False

    def grade(self, sheet: Sheet, number: int, said: object, repaired: Program) -> None:
        """Judge the diagnosis against the broken run, the repair against the best."""
        need_dict(said, "the diagnosis")
        truth = self.truth(number)
        ran = self.ran.format(number=number, **truth)
        sheet.ran(ran)
        how: dict[str, Any] = {"where": self.where, "kinds": self.kinds}
        check_diagnosis(sheet, self.diagnosis, said, truth, **how)
        own, *others = self.cases(number)
        self._judge(sheet, own, repaired)
        for case in others:
            sheet.stop_if_wrong()
            sheet.ran(f"your program on {case}")
            self._judge(sheet, case, repaired)
        sheet.stop_if_wrong()
        sheet.show_first(ran)

    def _judge(self, sheet: Sheet, case: Any, repaired: Program) -> None:
        seen, right = self.play(case, repaired), self.reference_run(case)
        seen.draw_on(sheet, right.step_ns, self.title)
        program_laws.hold(
            sheet,
            seen.run,
            wrong=self.wrong(case, seen, right),
            once=self.once(seen) if self.once else None,
            what=self.what,
            but=self.but,
            hints=self.hints,
        )
        for sentence, violations in self.also.items():
            sheet.verify(sentence, violations(seen))
        if self.stop:
            sheet.stop_if_wrong()
        judge_step(sheet, self.kept, seen, right.step_ns, hint=self.hint)
        late = program_laws.slow_law(self.clock, seen.program, right.program)
        sheet.verify(self.kept, late, hint=self.hint)

    def reference_run(self, case: Any) -> Examined:
        """The course's repair on a case; kept."""
        return _reference_run(self.play, self.reference, case)


@lru_cache(maxsize=32)
def _reference_run(
    play: Callable[[Any, Program], Examined], reference: Program, case: Any
) -> Examined:
    return play(case, reference)
