"""`check` in the notebook: what it prints, when it raises, and that it fails closed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlaplab import ours
from overlaplab.errors import DeadlockError, RankError
from overlaplab.grading import (
    CheckFailed,
    CheckResult,
    Sheet,
    Verdict,
    check,
    exercise,
    find_exercise,
    judge,
    judging,
    solved,
)
from overlaplab.grading.exercise import _REGISTRY, Exercise
from overlaplab.grading.judging import describe_error
from overlaplab.grading.kept import Kept, note
from overlaplab.grading.laws import Violation
from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.timeline import Timeline
from tests.grading import lab98  # noqa: F401  (registers its exercises)


def made_up(
    grade: Any, *, verifies: Any = ("it is so",), timeout_s: float = 5.0
) -> Any:
    """An exercise that is in no registry."""
    return Exercise("98.9", "Made up", ("thing",), verifies, 1, grade, timeout_s)


def timeline_of_nothing() -> Timeline:
    return Timeline.of([], origin="virtual")


def test_a_right_solution_prints_what_was_verified_and_returns_the_verdict(capsys):
    verdict = check("98.1", lambda x: x + x)
    assert verdict.passed
    assert capsys.readouterr().out == "98.1 Double: passed\n  + it doubles\n"


def test_a_wrong_solution_prints_seen_and_expected_and_raises_without_our_frames(
    capsys,
):
    with pytest.raises(CheckFailed) as caught:
        check("98.1", lambda x: 3 * x)
    out = capsys.readouterr().out
    assert out.splitlines()[:3] == [
        "98.1 Double: not yet",
        "  ran: double on three numbers",
        "  - it doubles: NO",
    ]
    assert "seen:     gradient of x on rank 0: element 2 is 9" in out
    assert "expected: 6, as one process computes on the whole batch" in out
    assert caught.value._render_traceback_() == [
        "CheckFailed: 98.1 is not solved yet; see above"
    ]


@pytest.fixture
def cell_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Lets `check` be called in a kernel, for a request with that content."""

    def call(content: dict[str, Any]) -> None:
        kernel = SimpleNamespace(get_parent=lambda channel: {"content": content})
        shell = SimpleNamespace(kernel=kernel)
        monkeypatch.setattr("IPython.get_ipython", lambda: shell)

    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    return call


def test_a_persons_notebook_goes_on_behind_a_check_that_failed(capsys, cell_from):
    kept = Kept({"98.1": abs})
    cell_from({"allow_stdin": True})
    assert not check("98.1", lambda x: 3 * x).passed
    shown = capsys.readouterr()
    assert shown.err == "CheckFailed: 98.1 is not solved yet; see above\n"
    assert "seen:     gradient of x" in shown.out
    kept.keep("98.1", max)
    assert "98.1" not in kept and not solved("98.1")
    assert check("98.1", lambda x: 2 * x).passed
    kept.keep("98.1", max)
    assert "98.1" in kept and solved("98.1")
    for content in ({"allow_stdin": False}, {}):  # of a program
        cell_from(content)
        with pytest.raises(CheckFailed):
            check("98.1", lambda x: 3 * x)
        assert not solved("98.1")


def test_a_check_that_is_interrupted_has_not_passed(monkeypatch):
    note("98.1", True)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check("98.1", 7)
    assert not solved("98.1")


def test_the_hint_of_the_first_failure_is_the_one_that_is_shown(capsys):
    with pytest.raises(CheckFailed):
        check("98.3", 41, "because")
    assert "hint: read the book" in capsys.readouterr().out


def raise_key_error(x: Any) -> Any:
    raise KeyError("weight")


def test_an_exception_shows_the_learners_frames_and_none_of_ours(capsys):
    with pytest.raises(CheckFailed):
        check("98.1", raise_key_error)
    out = capsys.readouterr().out
    assert "your code raised KeyError: 'weight'" in out
    assert "in raise_key_error, line" in out and 'raise KeyError("weight")' in out
    assert "grade_double" not in out and "in judge" not in out


def test_a_rank_error_shows_its_cause():
    error = RankError("rank 1 raised", rank=1)
    try:
        raise_key_error(0)
    except KeyError as cause:
        error.__cause__ = cause
    assert describe_error(error).startswith(
        "your code raised KeyError: 'weight'\n  in "
    )


def test_a_diagnosis_of_the_cluster_is_shown_as_it_is():
    text = "no rank can move at 4.00 us.\n  rank 0 waits in all_reduce #5"
    assert describe_error(DeadlockError(text)) == (
        f"your code ran into a DeadlockError: {text}"
    )


def test_what_a_grader_does_not_verify_counts_as_wrong():
    assert not judge(made_up(lambda sheet, thing: None), 1).passed
    verdict = judge(made_up(lambda sheet, thing: None), 1)
    assert verdict.checks == (CheckResult("it is so", False, "was not verified"),)


def test_a_grader_that_raises_half_way_does_not_pass():
    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.expect("it is so", True)
        raise ZeroDivisionError

    assert not judge(made_up(grade), 1).passed


def test_where_a_run_raises_no_sentence_that_it_might_break_keeps_its_plus():
    sentences = ("the data is read right", "each result is right", "it ends")

    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.expect(sentences[0], True, settled=True)  # of no run
        sheet.expect(sentences[1], True)  # on the first net
        thing()

    described = str(judge(made_up(grade, verifies=sentences), lambda: 1 / 0))
    assert f"+ {sentences[0]}" in described
    assert f"? {sentences[1]}: not judged yet" in described
    assert "ZeroDivisionError" in described and sentences[2] not in described


@pytest.mark.parametrize("last", ["the first net", "the second net"])
def test_the_run_of_one_net_is_not_drawn_beside_the_error_of_another(last):
    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.ran("the first net")
        sheet.show(timeline_of_nothing(), step_ns=7)
        sheet.ran(last)
        thing()

    verdict = judge(made_up(grade), lambda: 1 / 0)
    drawn = (verdict.timeline is not None, verdict.step_ns)
    assert drawn == ((True, 7) if last == "the first net" else (False, None))


def test_where_ranks_do_not_meet_only_what_is_settled_keeps_its_plus():
    sentences = ("one", "two", "all meet", "four")

    def grade(sheet: Sheet, _: Any) -> None:
        sheet.expect("one", True, settled=True)
        sheet.expect("two", True)
        sheet.show(timeline_of_nothing())
        with sheet.meeting("all meet", hint="who launches?"):
            raise DeadlockError("rank 1 waits")

    verdict = judge(made_up(grade, verifies=sentences), object())
    assert [c.name for c in verdict.checks] == ["one", "all meet"]
    assert verdict.unjudged == ("two", "four") and verdict.timeline is None
    assert (verdict.checks[1].seen, verdict.hint) == ("rank 1 waits", "who launches?")


@pytest.mark.parametrize("wrong", [False, True])
def test_of_runs_that_are_all_right_the_first_is_drawn(wrong):
    def grade(sheet: Sheet, _: Any) -> None:
        for step_ns in (7, 9):
            sheet.ran(f"a run of {step_ns}")
            sheet.show(timeline_of_nothing(), step_ns=step_ns)
            sheet.expect("it is so", step_ns == 7 or not wrong)
            sheet.stop_if_wrong()
        sheet.show_first("two runs")

    verdict = judge(made_up(grade), object())
    told = (verdict.ran, verdict.step_ns)
    assert told == (("a run of 9", 9) if wrong else ("two runs", 7))


def test_a_grader_that_writes_an_unknown_sentence_does_not_pass():
    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.expect("it is so", True)
        sheet.expect("it is not promised", True)

    assert not judge(made_up(grade), 1).passed


@pytest.mark.parametrize("almost", [1, "yes", torch.tensor(True), lambda: True])
def test_only_true_is_true(almost):
    grade = made_up(lambda sheet, thing: sheet.expect("it is so", almost))
    assert not judge(grade, 1).passed


def test_a_sentence_written_twice_must_hold_twice():
    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.expect("it is so", True)
        sheet.expect("it is so", False, seen="the second time")
        sheet.expect("it is so", True)

    verdict = judge(made_up(grade), 1)
    assert not verdict.passed and verdict.checks[0].seen == "the second time"


def test_stopping_early_passes_nothing_and_hides_what_was_not_reached():
    def grade(sheet: Sheet, thing: Any) -> None:
        sheet.verify("first", [Violation("values", "seen", "expected", "think")])
        sheet.stop_if_wrong()
        raise AssertionError("not reached")

    verdict = judge(made_up(grade, verifies=("first", "second")), 1)
    assert not verdict.passed
    assert [c.name for c in verdict.checks] == ["first"]
    assert verdict.hint == "think"


def test_an_interrupt_is_the_learners_and_passes_through():
    def grade(sheet: Sheet, thing: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(made_up(grade), 1)


def test_the_packages_own_solution_is_refused():
    grade = made_up(lambda sheet, thing: sheet.expect("it is so", True))
    assert judge(grade, object).passed

    class Mine(BucketedReducer):
        """No work of one's own."""

    for borrowed in (BucketedReducer, Mine, find_exercise, None):
        verdict = judge(grade, borrowed)
        assert not verdict.passed and verdict.error


def test_the_wrong_number_of_objects_is_refused():
    assert "takes 1 object(s), got 2" in judge(find_exercise("98.1"), 1, 2).error


def test_torchs_default_dtype_is_float32_inside_and_restored_after():
    seen = []

    def grade(sheet: Sheet, thing: Any) -> None:
        seen.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float16)

    torch.set_default_dtype(torch.float64)
    try:
        judge(made_up(grade), 1)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32]


def test_an_unknown_exercise_lists_those_there_are():
    with pytest.raises(ValueError, match=r"no exercise '98.7'; known: .*98.1"):
        check("98.7", 1)


@pytest.fixture
def broken_lab(monkeypatch, tmp_path):
    """A lab 97, installed beside the others, whose checks cannot be imported."""
    (tmp_path / "lab97_broken.py").write_text("raise RuntimeError('no such part')\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("lab97", "lab97_broken", ours.LABS)
    found = (point, *ours.lab_entry_points())
    monkeypatch.setattr(ours, "lab_entry_points", lambda: found)


def test_a_broken_lab_costs_no_other(broken_lab):
    assert find_exercise("0.2").lab == "00"
    with pytest.raises(RuntimeError, match="no such part"):
        find_exercise("97.1")
    with pytest.raises(ValueError, match=r"known: .*0\.2.*6\.3"):
        find_exercise("0.99")


def test_without_a_lab_none_is_known(monkeypatch):
    monkeypatch.setattr(ours, "lab_entry_points", tuple)
    monkeypatch.setattr(sys.modules[Exercise.__module__], "_REGISTRY", {})
    with pytest.raises(ValueError, match=r"no exercise '0\.2'; known: none"):
        find_exercise("0.2")


def test_an_exercise_that_promises_nothing_or_twice_is_refused():
    for promised in ((), ("a", "a")):
        with pytest.raises(ValueError, match=r"98.8 "):
            exercise("98.8", title="", solution="x", verifies=promised)(len)
    with pytest.raises(ValueError, match=r"LAB\.NUMBER"):
        exercise("first", title="", solution="x", verifies=("a",))
    assert "98.8" not in _REGISTRY


def test_a_verdict_escapes_html_and_shows_the_step_against_its_target():
    verdict = Verdict("6.3", "Finish <x>", True, step_ns=8_400_000, target_ns=8_200_000)
    assert "Finish &lt;x&gt;: passed" in verdict._repr_html_()
    assert str(verdict).splitlines()[-1] == "  step: 8.40 ms, target: 8.20 ms"


def test_a_step_below_a_millisecond_is_told_in_us():
    verdict = Verdict("4.2", "Waits", True, step_ns=241_400, target_ns=240_600)
    assert str(verdict).splitlines()[-1] == "  step: 241 us, target: 241 us"
    slow = Verdict("4.2", "Waits", False, step_ns=1_200_000, target_ns=900_000)
    assert str(slow).splitlines()[-1] == "  step: 1.20 ms, target: 0.90 ms"
