"""Exercises declared in a file: what is promised, hinted, and refused."""

from __future__ import annotations

import pytest

from overlaplab.grading import declared, judge
from overlaplab.grading.exercise import _REGISTRY as registered
from overlaplab.grading.exercise import Sheet, find_exercise

FILE = """
["95.1"]
title = "made up"
solution = ["number"]
points = 2

[["95.1".verifies]]
says = "it is even"
hint = "two times something"
wrong = [1, 3]

[["95.1".verifies]]
says = "it is positive"
"""


@pytest.fixture
def beside(tmp_path):
    yield lambda text: (
        (tmp_path / "exercises.toml").write_text(text),
        declared.Declared(str(tmp_path / "checks.py")),
    )[1]
    registered.pop("95.1", None)


def test_a_file_says_what_the_decorator_says(beside):
    lab = beside(FILE)
    even, positive = lab.sentences("95.1")

    @lab.grader("95.1")
    def grade(sheet: Sheet, number: int) -> None:
        sheet.expect(even, number % 2 == 0, seen=f"{number}")
        sheet.expect(positive, number > 0, hint="from 1 on")

    made = find_exercise("95.1")
    assert (made.title, made.points, made.timeout_s) == ("made up", 2, 60.0)
    assert made.verifies == ("it is even", "it is positive")
    assert lab.cases("95.1", "wrong") == {even: [1, 3]}
    assert judge(made, 4).passed
    assert judge(made, 3).hint == "two times something"
    assert judge(made, -2).hint == "from 1 on"


def test_a_key_that_no_exercise_has_is_refused(beside):
    lab = beside(FILE.replace("points", "marks"))
    with pytest.raises(TypeError, match="marks"):
        lab.grader("95.1")


def test_a_sentence_is_written_in_its_own_words_with_the_facts_of_the_grader(beside):
    told = 'says = "it is even"\nseen = "{number} is {number:.1f}"\nexpected = "2"'
    lab = beside(FILE.replace('says = "it is even"', told))
    even, positive = lab.sentences("95.1")

    @lab.grader("95.1")
    def grade(sheet: Sheet, number: int) -> None:
        lab.expect(sheet, even, number % 2 == 0, number=number)
        lab.expect(sheet, positive, number > 0, hint="from 1 on")

    first, second = judge(find_exercise("95.1"), -3).checks
    assert (first.seen, first.expected, first.hint) == (
        "-3 is -3.0",
        "2",
        "two times something",
    )
    assert (second.seen, second.hint) == ("", "from 1 on")
    assert [c.hint for c in judge(find_exercise("95.1"), 2).checks] == ["", "from 1 on"]
    assert lab.tables("95.1")[0]["wrong"] == [1, 3]


def test_what_is_refused_is_described_only_where_it_is_wrong(beside):
    facts = 'says = "it is even"\nseen = "{number}"\nhints.large = "take a smaller one"'
    lab = beside(FILE.replace('says = "it is even"', facts))
    even, positive = lab.sentences("95.1")

    @lab.grader("95.1")
    def grade(sheet: Sheet, number: int) -> None:
        why = "large" if number > 100 else ""
        lab.refuse(sheet, even, number % 2 != 0, why=why, number=number)
        lab.refuse(sheet, positive, number <= 0)

    said = [judge(find_exercise("95.1"), number).checks[0] for number in (4, 3, 101)]
    assert [(c.seen, c.hint) for c in said] == [
        ("", ""),
        ("3", "two times something"),
        ("101", "take a smaller one"),
    ]
    assert lab.hint(even, "large") == "take a smaller one" and lab.hint(even, "") == ""


def test_what_a_law_finds_is_told_in_the_sentences_own_words(beside):
    facts = 'says = "it is even"\nseen = "{number}"\nexpected = "an even one"'
    facts += '\nhints.large = "take a smaller one"'
    lab = beside(FILE.replace('says = "it is even"', facts))
    even, positive = lab.sentences("95.1")

    @lab.grader("95.1")
    def grade(sheet: Sheet, number: int) -> None:
        found = [lab.violation(sheet, even, why="large", number=number, rank=1)]
        assert (found[0].hint, found[0].rank) == ("take a smaller one", 1)
        sheet.verify(even, found)
        sheet.expect(positive, True)

    (check,) = judge(find_exercise("95.1"), 101).failed
    assert (check.seen, check.expected) == ("101", "an even one")
    assert check.hint == "take a smaller one"


TWO = """
["95.1"]
title = "made up"
solution = ["number"]

[["95.1".verifies]]
says = "it is even"
seen = "{number} of the first"
hint = "halve it"
hints.large = "a smaller one"

["95.2"]
title = "made up, too"
solution = ["number"]

[["95.2".verifies]]
says = "it is even"
hint = "double it"
hints.large = "a much smaller one"
hints.odd = "add one"
"""


def test_two_exercises_may_say_the_same_and_hint_otherwise(beside):
    lab = beside(TWO)
    (even,) = lab.sentences("95.1")

    def grade(sheet: Sheet, number: int) -> None:
        why = "large" if number > 100 else ""
        lab.refuse(sheet, even, number % 2 != 0, why=why, number=number)

    said = {}
    for id in ("95.1", "95.2"):
        lab.grader(id)(grade)
        made = registered.pop(id)
        said[id] = [judge(made, number).checks[0] for number in (3, 101)]
    assert [c.hint for c in said["95.1"]] == ["halve it", "a smaller one"]
    assert [c.hint for c in said["95.2"]] == ["double it", "a much smaller one"]
    # What only one of them says is said for both: they share the grader.
    assert said["95.2"][0].seen == "3 of the first"
    assert lab.hint(even, "odd") == lab.hint(even, "odd", "95.1") == "add one"
    with pytest.raises(LookupError, match=r"no hint 'tiny' of 'it is even'"):
        lab.hint(even, "tiny")
