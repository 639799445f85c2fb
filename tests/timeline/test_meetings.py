"""Which spans are the same collective."""

from overlaplab.timeline import Span
from overlaplab.timeline.meetings import find_meetings


def meetings(*spans: tuple[int, int, str]) -> list[tuple[int, ...]]:
    """Of (rank, start, name), all on one lane."""
    made = [Span(r, "comm", "communication", n, at, at + 9) for r, at, n in spans]
    return list(find_meetings(made, range(len(made)), lambda i: made[i].lane))


def test_the_first_ones_of_all_ranks_meet_whatever_their_order_in_the_list():
    assert meetings((0, 10, "a"), (1, 20, "b"), (0, 30, "b"), (1, 0, "a")) == [
        (3, 0),
        (1, 2),
    ]


def test_ranks_that_have_not_equally_many_do_not_meet():
    assert meetings((0, 0, "a"), (0, 10, "a"), (1, 0, "a")) == []


def test_two_names_do_not_meet():
    assert meetings((0, 0, "a"), (1, 0, "b")) == []
