"""What a lab keeps of its learner, and what stands in for it."""

from overlaplab.grading.kept import Kept, side_by_side


def test_the_courses_own_runs_until_the_learner_has_solved_it_and_says_so(capsys):
    kept = Kept({"1.4": min, "1.5": abs})

    assert kept.mine_or_ours("1.4") is min and "1.4" not in kept
    assert capsys.readouterr().out.startswith("(1.4 is not solved yet")

    kept.keep("1.4", max)
    assert kept.mine_or_ours("1.4") is max and "1.4" in kept
    assert capsys.readouterr().out == ""
    assert "1.4" not in Kept({"1.4": min})


def test_the_courses_own_is_imported_only_where_it_runs():
    kept = Kept({"1.4": "math:prod", "1.5": "overlaplab_course.no_such:solution"})
    assert kept.mine_or_ours("1.4")([2, 3]) == 6 and kept.whose("1.4") == "the course's"

    kept.keep("1.5", max)
    assert kept.mine_or_ours("1.5") is max and kept.whose("1.5") == "yours"


def test_a_prediction_stands_beside_the_outcome_even_if_none_was_made(capsys):
    side_by_side("step in ms", None, 105)
    side_by_side("step in ms", 100, 105)

    assert capsys.readouterr().out == (
        "step in ms:  no guess; actual: 105\n"
        "step in ms:  your guess: 100; actual: 105\n"
    )


def test_a_pair_of_which_nothing_was_filled_in_is_no_guess(capsys):
    side_by_side("from, to", (None, None), (1, 2))
    side_by_side("from, to", (1, None), (1, 2))

    assert capsys.readouterr().out == (
        "from, to:  no guess; actual: (1, 2)\n"
        "from, to:  your guess: (1, None); actual: (1, 2)\n"
    )
