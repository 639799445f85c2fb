"""13.8: the line that holds an edge between two streams, put in its place."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import stream_checks as checks

EVENT_0, EVENT_1, WAIT = 1, 3, 2  # numbers of which these lines are gone
LETTERS = {EVENT_0: "a", EVENT_1: "b", WAIT: "e"}


def grade(number, **missing):
    case = lab.cut(number)
    right = {"kind": case.kind, "put": case.taken, "line": case.at}
    return judge(find_exercise("13.8"), number, right | missing)


@pytest.mark.parametrize("number", LETTERS)
def test_the_compilers_line_in_its_place_passes(number):
    assert lab.cut(number).taken == LETTERS[number]
    verdict = grade(number)
    assert verdict.passed, str(verdict)


def line_of(number, text):
    """The number of the first line that has `text`."""
    return next(i for i, line in enumerate(lab.cut(number).lines, 1) if text in line)


def test_side_may_be_told_to_wait_before_it_is_current():
    verdict = grade(EVENT_0, line=line_of(EVENT_0, "ready_0 ="))
    assert verdict.passed, str(verdict)


def test_the_last_wait_holds_what_was_sent_before_it_too():
    # Behind the last product, before bucket 0 is waited for.
    verdict = grade(WAIT, line=line_of(WAIT, "dx1 ="))
    assert verdict.passed, str(verdict)


WRONG = {
    "another kind": (EVENT_0, {"kind": "unwaited"}, checks.KIND),
    "no kind": (WAIT, {"kind": None}, checks.KIND),
    "behind the copy": (EVENT_0, {"line": ("pack(",)}, checks.SAFE),
    "the other event": (EVENT_1, {"put": "a"}, checks.SAFE),
    "main waits for itself": (EVENT_0, {"put": "c"}, checks.SAFE),
    "an event that is not recorded yet": (EVENT_0, {"put": "b"}, checks.SAFE),
    "the other message": (WAIT, {"put": "d"}, checks.SAFE),
    "side waits and not main": (WAIT, {"line": ("average([dw1]",)}, checks.SAFE),
    "behind the return": (WAIT, {"line": ("return",)}, checks.SAFE),
    "the CPU waits before": (EVENT_0, {"line": ("ready_0 =",), "put": "f"}, checks.ON),
    "the CPU waits behind": (WAIT, {"line": ("dx1 =",), "put": "f"}, checks.ON),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_line_is_refused_for_its_own_reason(wrong, faults):
    number, missing, sentence = WRONG[wrong]
    if "line" in missing:
        missing = missing | {"line": line_of(number, missing["line"][0])}
    assert set(faults(grade(number, **missing))) == {sentence}


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"line": 0}, r"missing['line'] is 0; expected the number of a line, 1 to"),
        ({"line": None}, r"missing['line'] is None"),
        ({"put": "g"}, "missing['put'] is 'g'; expected one of a to f"),
    ],
)
def test_what_is_no_line_is_called_so(missing, words):
    assert words in grade(EVENT_0, **missing).error


def test_it_is_said_what_was_found_and_what_waits(faults):
    race = faults(grade(EVENT_0, put="c"))[checks.SAFE]
    cpu = faults(grade(EVENT_0, line=line_of(EVENT_0, "ready_0 ="), put="f"))[checks.ON]
    assert "4 findings, the first a hazard" in race
    assert "`streams.synchronize()` behind line 11 the CPU waits for" in cpu


@pytest.mark.parametrize("number", LETTERS)
def test_without_the_line_the_cluster_finds_what_the_diagnosis_asks_for(number):
    case = lab.cut(number)
    kinds = {finding.kind for finding in case.play().warnings}
    assert ("hazard" if case.kind == "race" else "unwaited") in kinds
