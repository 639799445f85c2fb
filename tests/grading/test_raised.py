"""What the learner's code raised, told in one process and raised again in another."""

from __future__ import annotations

import builtins
import re
from typing import Any

import pytest

from overlaplab import errors
from overlaplab.errors import DeadlockError, OverlaplabError, RankError, RunTimeoutError
from overlaplab.grading.plain import pack, unpack
from overlaplab.grading.raised import describe_error, rebuild, tell


def told(error: BaseException) -> BaseException:
    return rebuild(unpack(pack(tell(error, ""), lambda thing: 0), lambda *_: None))


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


ALL = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type)
    and issubclass(kind, BaseException)
    and not issubclass(kind, BaseExceptionGroup)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_exception_of_pythons_is_caught_by_its_own_class(kind: type) -> None:
    args: dict[str, tuple[Any, ...]] = {
        "UnicodeDecodeError": ("utf-8", b"a", 0, 1, "why"),
        "UnicodeEncodeError": ("utf-8", "a", 0, 1, "why"),
        "UnicodeTranslateError": ("a", 0, 1, "why"),
    }
    error = raised(kind(*args.get(kind.__name__, ("a",))))
    back = told(error)
    assert describe_error(back) == describe_error(error)
    nearest = kind if issubclass(kind, Exception) else BaseException
    assert type(back).__mro__[2] is nearest


def test_none_of_pythons_that_ends_a_process_ends_the_judge() -> None:
    for error in (KeyboardInterrupt(), SystemExit(0), GeneratorExit()):
        back = told(error)
        assert type(back).__mro__[2] is BaseException
        assert type(back).__name__ == type(error).__name__


class Odd(KeyError):
    def __str__(self) -> str:
        return "half \ud800 a pair"


def test_a_class_of_the_learners_goes_by_the_nearest_known_one() -> None:
    back = told(raised(Odd()))
    assert isinstance(back, KeyError) and str(back) == "half \\ud800 a pair"
    assert describe_error(back).startswith("your code raised Odd: half")
    assert f"line {raised.__code__.co_firstlineno + 2}: raise error" in describe_error(
        back
    )


def test_what_a_grader_asks_of_an_error_of_ours_is_told() -> None:
    cause = raised(ZeroDivisionError("division by zero"))
    error = RankError("rank 1 raised", rank=1, remote_traceback="in f")
    error.__cause__ = cause
    back = told(error)
    assert isinstance(back, RankError)
    assert (back.rank, back.remote_traceback) == (1, "in f")
    assert isinstance(back.__cause__, ZeroDivisionError)
    assert describe_error(back) == describe_error(error)
    slow = RunTimeoutError("over")
    slow.on_the_wall = True
    assert getattr(told(slow), "on_the_wall", None) is True
    text = describe_error(told(DeadlockError("no rank can move")))
    assert text == "your code ran into a DeadlockError: no rank can move"


def test_every_error_of_ours_is_known() -> None:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, OverlaplabError):
            error = kind("x", rank=0) if kind is RankError else kind("x")
            assert isinstance(told(error), kind)


def test_a_recursion_without_end_is_one_line() -> None:
    def forever(n: int) -> int:
        return forever(n + 1)

    try:
        forever(0)
    except RecursionError as error:
        lines = describe_error(error).splitlines()
    *_, last = lines
    assert len(lines) < 10 and re.search(
        r"in forever, line \d+: .* \(9\d\d times\)", last
    )


def test_a_text_without_end_is_cut_and_causes_without_end_are_left_out() -> None:
    first = error = ValueError("x" * 10**6)
    for _ in range(50):
        error.__cause__ = error = ValueError("and before")
    back = told(first)
    assert len(str(back)) == 10_000
    depth = 0
    while back.__cause__ is not None:
        back, depth = back.__cause__, depth + 1
    assert depth == 4


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [[], "text", [], {}, None],
        [["E"], 1, [], {}, None],
        [["E"], "text", [1], {}, None],
        [["E"], "text", [], [], None],
        [["E"], "text", [], {}, "cause"],
        [["E\ud800"], "text", [], {}, 3],
    ],
)
def test_what_is_no_exception_is_refused(said: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, IndexError)):
        rebuild(said)
