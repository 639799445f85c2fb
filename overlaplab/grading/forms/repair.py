"""Exercises that hand out a broken program: diagnose it, mend it, keep its overlap.

The learner's number draws what the program works on, so that the diagnosis differs from
desk to desk.

    FLAT = Repair(
        diagnosis=DIAGNOSIS, safe=SAFE, values=VALUES, kept=SHORT,
        truth=lambda number: {"kind": "race", "tensor": f"flat {first_of(number)}"},
        play=lambda number, program: Case("3.3a", number).run(program),
        reference=reference.send_gradients,
        wrong=lambda number, seen, right: wrong_results(seen, right),
        ran="your program on the objects of number {number}, 2 ranks",
    )

    @exercise("3.3a", solution=("my_number", "flat_diagnosis", "send_gradients"), ...)
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
from overlaplab.grading.forms.results import (
    Examined,
    judge_results,
    judge_step,
    need_dict,
)
from overlaplab.grading.violation import Violation

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

    Args:
        diagnosis, safe, values, kept: the sentences: the diagnosis; no finding; the
            results; the step.
        truth: from a number to the right diagnosis.
        play: (number, program) -> the run of a program on what the number draws.
        reference: the course's repair.
        wrong: (number, seen, the reference's run) -> results that are not right.
        ran: what runs, a format of {number} and the fields of `truth`.
        kinds: see `check_diagnosis`.
        also: more sentences, each with its violations of the repaired run.
        where: see `check_diagnosis`.
        what: the results are, for a message.
        title: of the figure.
        hint: where the step is too long.
        stop: judge the step only if all else is right.
    """

    diagnosis: str
    safe: str
    values: str
    kept: str
    truth: Callable[[int], Mapping[str, object]]
    play: Callable[[int, Program], Examined]
    reference: Program
    wrong: Callable[[int, Examined, Examined], list[Violation]]
    ran: str
    also: Mapping[str, Callable[[Examined], list[Violation]]] = field(
        default_factory=dict
    )
    where: Mapping[str, str] | None = None
    kinds: Sequence[str] = ()
    what: str = "the result"
    title: str = "your run"
    hint: str = ""
    stop: bool = False

    @property
    def sentences(self) -> tuple[str, ...]:
        """What an exercise with this repair verifies."""
        return (self.diagnosis, self.safe, self.values, *self.also, self.kept)

    def grade(self, sheet: Sheet, number: int, said: object, repaired: Program) -> None:
        """Judge the diagnosis against the broken run, the repair against the best."""
        need_dict(said, "the diagnosis")
        truth = self.truth(number)
        sheet.ran(self.ran.format(number=number, **truth))
        how: dict[str, Any] = {"where": self.where, "kinds": self.kinds}
        check_diagnosis(sheet, self.diagnosis, said, truth, **how)
        seen, right = self.play(number, repaired), self.reference_run(number)
        seen.draw_on(sheet, right.step_ns, self.title)
        wrong = self.wrong(number, seen, right)
        judge_results(
            sheet, seen, wrong, safe=self.safe, values=self.values, what=self.what
        )
        for sentence, violations in self.also.items():
            sheet.verify(sentence, violations(seen))
        if self.kept == sheet.laws.get("cpu"):
            sheet.verify(self.kept, program_laws.cpu_law(seen.program))
        if self.stop:
            sheet.stop_if_wrong()
        judge_step(sheet, self.kept, seen, right.step_ns, hint=self.hint)

    def reference_run(self, number: int) -> Examined:
        """The course's repair on what `number` draws; kept."""
        return _reference_run(self.play, self.reference, int(number))


@lru_cache(maxsize=32)
def _reference_run(
    play: Callable[[int, Program], Examined], reference: Program, number: int
) -> Examined:
    return play(number, reference)
