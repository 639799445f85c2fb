"""`check("6.3", BucketedReducer)`: the check of one exercise, inside the notebook.

Guards what it calls: a deadline, torch's global state, and exceptions, of which the
learner sees their own frames only.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

import torch

from overlaplab import ours
from overlaplab.deadline import Deadline, OutOfTimeError, machine_is_busy
from overlaplab.errors import RunTimeoutError
from overlaplab.grading import stage
from overlaplab.grading.answered import as_answer, as_number
from overlaplab.grading.exercise import (
    Exercise,
    Sheet,
    StopGradingError,
    find_exercise,
)
from overlaplab.grading.explained import explain, own_words
from overlaplab.grading.kept import note
from overlaplab.grading.raised import CALLED, describe_error
from overlaplab.grading.verdict import Verdict

NUMBER = "my_number"  # draws the sizes of an exercise
BUSY = "not judged: this machine is busy, time was over before the code had its share"


class CheckFailed(AssertionError):
    """The check did not pass; the verdict has been printed above."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of our frames."""
        return [f"CheckFailed: {self}"]


def check(exercise_id: str, *solutions: object) -> Verdict:
    """Run the check of `exercise_id` on the learner's object(s), print and draw it.

    A check that does not pass raises, so that whatever runs the notebook sees it. Where
    a person runs it, as in JupyterLab and VS Code, the check is red and "Run All" comes
    to the end.

    Args:
        exercise_id: "6.3".
        solutions: what the exercise asks for, in the order that its text gives.

    Returns:
        The verdict: one that passed, unless the notebook goes on.

    Raises:
        CheckFailed: it did not pass; what was seen has been printed.
        ValueError: there is no such exercise.
    """
    exercise = find_exercise(exercise_id)
    note(exercise_id, False)  # it may be interrupted
    verdict = judge(exercise, *solutions)
    if not verdict.judged:
        verdict = judge(exercise, *solutions)
    print(verdict)
    _draw(verdict)
    note(exercise_id, verdict.passed)
    if not verdict.passed:
        what = "is not solved yet" if verdict.judged else "could not be judged"
        failed = CheckFailed(f"{exercise_id} {what}; see above")
        if not _somebody_sits_there():
            raise failed
        print(f"CheckFailed: {failed}", file=sys.stderr)  # red in a notebook
    return verdict


def _somebody_sits_there() -> bool:
    """Whether the cell comes from a front end that can ask a person (`input()` works).

    Programs that run notebooks (nbclient, nbval, nbgrader) tell the kernel that theirs
    cannot, and see what fails.
    """
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    request = {} if kernel is None else kernel.get_parent("shell")
    return request.get("content", {}).get("allow_stdin") is True


def judge(exercise: Exercise, *solutions: object) -> Verdict:
    """Grade without printing. Raises only KeyboardInterrupt and `stage.GoneError`.

    Every other exception is a fail: of the learner's code, or of the grader's.

    Args:
        exercise: which.
        solutions: the learner's objects, or handles of them (see stage.py).
    """
    sheet = Sheet(exercise)
    try:
        with _clean_torch(), Deadline(exercise.timeout_s):
            if refusal := _refusal(exercise, solutions):
                return sheet.verdict(error=refusal)
            exercise.grade(sheet, *map(as_answer, solutions))
    except StopGradingError:
        return sheet.verdict()
    except OutOfTimeError as error:
        if not error.judged:
            return _not_judged(sheet)
        return sheet.verdict(
            error=f"your code was stopped {error}",
            hint=sheet.if_late or "which loop, or which wait, does not end?",
        )
    except (KeyboardInterrupt, stage.GoneError):
        raise
    except BaseException as error:  # SystemExit and GeneratorExit fail as well
        slow = isinstance(error, RunTimeoutError) and error.on_the_wall
        if slow and machine_is_busy():
            return _not_judged(sheet)
        grader = getattr(exercise.grade, "__code__", None)
        where = "" if grader is None else grader.co_filename
        text = own_words(error) or describe_error(error, grader_file=where)
        if meaning := explain(text):
            return sheet.verdict(error=f"{meaning}\n{text}")
        return sheet.verdict(error=_unusable(text, exercise, solutions) or text)
    return sheet.verdict()


def _unusable(text: str, exercise: Exercise, solutions: tuple[object, ...]) -> str:
    """Of an error that none of the learner's lines raised; "" for others."""
    if not text.startswith(CALLED):
        return ""
    what = text.removeprefix(CALLED).strip()
    named = zip(exercise.solution, solutions, strict=True)
    plain = [f"{n} is {s!r:.60}" for n, s in named if n != NUMBER and not callable(s)]
    if plain:
        given = "; ".join(plain)
        return f"the check cannot use what it was given: {given} ({what})"
    return f"the check cannot use what your code returned ({what})"


def _not_judged(sheet: Sheet) -> Verdict:
    hint = "run this again when fewer programs run beside it"
    return sheet.verdict(error=BUSY, hint=hint, judged=False)


def _refusal(exercise: Exercise, solutions: tuple[object, ...]) -> str:
    """Why these objects are not graded at all, "" if they are."""
    if len(solutions) != len(exercise.solution):
        wanted = ", ".join(exercise.solution)
        return (
            f"check({exercise.id!r}, {wanted}) takes "
            f"{len(exercise.solution)} object(s), got {len(solutions)}"
        )
    for name, solution in zip(exercise.solution, solutions, strict=True):
        if solution is None:
            return f"{name} is None"
        number = as_number(solution) if name == NUMBER else 0.0
        if number is None or not number.is_integer():
            return f"{name} is {solution!r:.60}; expected a whole number"
        if stage.job(_is_packages_own, solution) is True:
            return f"{name} is overlaplab's own; the exercise asks for yours"
    return ""


def _is_packages_own(solution: object) -> bool:
    """Whether it is (or derives from) a function or class of the package's."""
    candidates: list[object] = [solution] if callable(solution) else []
    candidates += inspect.getmro(solution) if inspect.isclass(solution) else ()
    inner = getattr(solution, "func", None) or getattr(solution, "__wrapped__", None)
    candidates += [inner, type(getattr(solution, "__self__", None))]
    modules = (str(getattr(c, "__module__", "")) for c in candidates)
    return any(ours.is_our_module(module) for module in modules)


@contextlib.contextmanager
def _clean_torch() -> Iterator[None]:
    """Default dtype, gradient mode and random state as a fresh process has them."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)


def _draw(verdict: Verdict) -> None:
    """The learner's own timeline: a figure in a notebook, text elsewhere."""
    if verdict.timeline is None:
        return
    from overlaplab import view

    if "ipykernel" not in sys.modules:
        print(view.text(verdict.timeline))
        return
    from IPython.display import display

    figure = view.draw(
        verdict.timeline, title=f"{verdict.exercise}: {verdict.timeline_title}"
    )
    display(figure)  # type: ignore[no-untyped-call]
    # Without this the inline backend shows the figure a second time.
    from matplotlib import pyplot

    pyplot.close(figure)
