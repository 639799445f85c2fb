"""Graders of lab 02: stopwatch, profiler, repairs. `checks_traces` has 2.5 to 2.7."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import eq
from typing import Any

from overlaplab.grading import stage
from overlaplab.grading.answered import as_answer, as_number
from overlaplab.grading.exercise import Sheet
from overlaplab.timeline.intervals import Interval
from overlaplab.timeline.intervals import merge as true_merge
from overlaplab_course.lab02 import given, reference
from overlaplab_course.lab02.checks_traces import LAB  # it registers 2.5 to 2.7
from overlaplab_course.lab02.given import WARM_UP_CALLS, Row
from overlaplab_course.lab02.show import true_ms

# A start from an idle GPU, spread over twenty steps, costs 2 % here.
TOLERANCE = 0.03

# -- 2.1

GPU_TIME, WARM_UP, AHEAD, TYPICAL = LAB.sentences("2.1")
LEAST_STEPS = 10


@LAB.grader("2.1")
def grade_timing(sheet: Sheet, time_step: Callable[[given.Step], Any]) -> None:
    """Each trap alone: what the stopwatch says, against the step as it was."""
    whys = LAB.cases("2.1", "why")
    for sentence, kind in LAB.cases("2.1", "step").items():
        sheet.ran(f"your stopwatch, on a step called {kind!r}, on 2 ranks")
        timed = given.time_with(time_step, kind)
        answer, calls = timed.value
        said, hint = as_number(answer), ""
        if said is None:
            raise TypeError(
                f"time_step returned {answer!r:.80}; expected a number, in ms"
            )
        if calls:
            sheet.show(timed.timeline.of_rank(0), title=f"your stopwatch on {kind!r}")
        right_ms = true_ms(kind)
        good = abs(said / right_ms - 1) <= TOLERANCE
        seen = f"{said:.4g} ms" + _time_slip(said, right_ms, kind)
        expected = f"{right_ms:.4g} ms, within {100 * TOLERANCE:.0f} %"
        expected += f"\n{kind}: {whys[sentence]}"
        if calls < WARM_UP_CALLS + LEAST_STEPS:
            times = "once" if calls == 1 else f"{calls} times"
            good, seen = False, f"step was called {times}"
            hint = "let it warm up first, then time enough steps for a median"
            expected = (
                f"{WARM_UP_CALLS} calls that warm up, {LEAST_STEPS} or more timed"
            )
        sheet.expect(sentence, good, seen=seen, expected=expected, hint=hint)
        sheet.stop_if_wrong()


def _time_slip(said: float, right_ms: float, kind: str) -> str:
    """What a wrong number probably is."""
    if abs(said * 1e3 / right_ms - 1) < TOLERANCE:
        return "\nthat is in seconds"
    if abs(said / (1e3 * right_ms) - 1) < TOLERANCE:
        return "\nthat is in microseconds"
    if kind == "odd" and said < 0.5 * right_ms:
        return "\nthat is the shortest of the steps: one of them does nothing"
    if kind == "odd" and said > 1.2 * right_ms:
        return "\nlonger than most steps: those that take five times as long count too"
    if said <= 0:
        return "\nno time at all: are both events on the stream that computes?"
    if kind == "steady" and said < right_ms:
        return "\nshorter than the GPU's work: whose clock is that?"
    return ""


# -- 2.2

UNION, APART, EMPTY, EXACT, PURE = LAB.sentences("2.2")
NUM_RANDOM = 300


def _cases() -> Iterator[list[Interval]]:
    """Small ones that a person would think of, then many at random, then large."""
    for case in LAB.cases("2.2", "by_hand")[UNION]:
        yield [(start, end) for start, end in case]
    draw = random.Random(2)
    for _ in range(NUM_RANDOM):
        starts = [draw.randrange(30) for _ in range(draw.randrange(9))]
        yield [(s, s + draw.choice((0, 1, 2, 3, 5, 12))) for s in starts]
    base = 1_700_000_000_000_000_000
    yield [(base + 1, base + 3), (base + 4, base + 5), (base + 700, base + 900)]


@LAB.grader("2.2")
def grade_merge(sheet: Sheet, merge: Callable[[list[Interval]], Any]) -> None:
    """Every case; the first that is wrong stands under the law that it breaks."""
    sheet.ran(f"{NUM_RANDOM} lists of intervals at random, and the odd ones")
    for case in _cases():
        answer, (left,) = stage.job(stage.call_and_return, merge, list(case))
        said, right = _pairs(answer, case), true_merge(case)
        if left != case:
            seen = f"of {case}\nthe list became {left}"
            sheet.expect(PURE, False, seen=seen, expected=f"{case}")
        if said != right:
            seen = f"of {case}\nmerge gives {said}"
            sheet.expect(_law(case, said, right), False, seen=seen, expected=f"{right}")
    for sentence in LAB.sentences("2.2"):
        sheet.expect(sentence, True)


def _law(case: list[Interval], said: list[Interval], right: list[Interval]) -> str:
    """Which law a wrong answer breaks."""
    if any(start > 2**53 for start, _ in case):
        return EXACT
    if any(start >= end for start, end in said):
        return EMPTY
    return APART if true_merge(said) == right else UNION


def _pairs(said: Any, case: list[Interval]) -> list[Interval]:
    """The answer as pairs of numbers.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [(int(start), int(end)) for start, end in said]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"merge({case}) is {said!r:.200}; expected a list of pairs (start, end)"
        ) from error


# -- answers that are dicts


def _dict(said: Any, function: str, keys: Sequence[str]) -> Mapping[str, Any]:
    """What `function` returned.

    Raises:
        TypeError: it is no dict with these keys.
    """
    if not isinstance(said, Mapping) or not set(keys) <= set(said):
        got = f"{function} returned {said!r:.80}"
        raise TypeError(f"{got}; expected a dict, keys {keys}")
    return said


def _expect_same(
    sheet: Sheet,
    sentence: str,
    said: Mapping[str, Any],
    right: Mapping[str, Any],
    where: str,
    keys: Sequence[str],
    same: Callable[[Any, Any], bool] = eq,
) -> None:
    wrong = [key for key in keys if not same(said[key], right[key])]
    sheet.expect(
        sentence,
        not wrong,
        seen=where + "\n".join(f"{key}: {said[key]!r}" for key in wrong),
        expected="\n".join(f"{key}: {right[key]!r}" for key in wrong),
    )


def _rows(id: str) -> dict[str, list[Row]]:
    """By sentence; in the file a row is [category, stream, name, us, us, args]."""
    return {
        sentence: [
            Row(name, category, stream, 1000 * start, 1000 * end, *args)
            for category, stream, name, start, end, *args in rows
        ]
        for sentence, rows in LAB.cases(id, "rows").items()
    }


def _on(rows: Sequence[Row]) -> str:
    """Rows as lines, times in us, for what was seen."""
    width = max(len(row.name) for row in rows)
    lines = (
        f"{row.name:{width}}  {row.category:<19} stream {row.stream:<3}"
        f"{row.start_ns / 1e3:>7g} to {row.end_ns / 1e3:g} us\n"
        for row in rows
    )
    return "on\n" + "".join(lines)


# -- 2.3

PARTS, ANY_STREAM, ONCE, KERNELS, NONE, UNSEEN = LAB.sentences("2.3")


def unseen_rows(seed: int) -> list[Row]:
    """A step of a GPU with several streams, drawn anew: everything at once."""
    draw, drawn, rows = random.Random(seed), LAB.cases("2.3", "drawn")[UNSEEN], []
    computes, talks = drawn["compute"], drawn["communication"]
    # Large clocks: a float cannot hold them to the nanosecond.
    base_ns = 1_700_000_000_000_000_000 + draw.randrange(10**9)
    third = draw.choice((7, 24))
    for stream, names in ((7, computes), (20, talks), (third, computes + talks)):
        at_ns = base_ns
        for _ in range(draw.randrange(5, 20)):
            at_ns += draw.choice((0, draw.randrange(1, 30_000)))
            end_ns = at_ns + draw.choice((0, draw.randrange(200, 40_000)))
            rows.append(Row(draw.choice(names), "kernel", stream, at_ns, end_ns))
            at_ns = end_ns
    for category, name in drawn["others"]:
        at_ns = base_ns + draw.randrange(200_000)
        length_ns = draw.randrange(1000, 100_000)
        rows.append(Row(name, category, 7, at_ns, at_ns + length_ns))
    draw.shuffle(rows)
    return rows


OVERLAP_KEYS = ("compute_ns", "communication_ns", "hidden_ns", "exposed_ns", "fraction")
NUM_UNSEEN = 60


@LAB.grader("2.3")
def grade_overlap(sheet: Sheet, overlap: Callable[[list[Row]], Any]) -> None:
    """One trap at a time; then everything at once."""
    small, unseen = _rows("2.3"), map(unseen_rows, range(NUM_UNSEEN))
    sheet.ran(f"{len(small)} small timelines, then {NUM_UNSEEN} large ones")
    for sentence, rows, where in (
        *((sentence, rows, _on(rows)) for sentence, rows in small.items()),
        *((UNSEEN, rows, f"on {len(rows)} rows\n") for rows in unseen),
    ):
        said = overlap(list(rows))
        if isinstance(said, Mapping) and not set(OVERLAP_KEYS) <= set(said):
            missing = [key for key in OVERLAP_KEYS if key not in said]
            raise KeyError(
                f"overlap's dict has no {missing}; expected keys {OVERLAP_KEYS}"
            )
        said = _dict(as_answer(said), "overlap", OVERLAP_KEYS)
        right = reference.overlap(rows)
        _expect_same(sheet, sentence, said, right, where, OVERLAP_KEYS, _close)
        sheet.stop_if_wrong()  # the others most often have the same cause


def _close(value: Any, wanted: Any) -> bool:
    """Integers exactly; None is no number."""
    if wanted is None or value is None:
        return value is wanted
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return bool(abs(value - wanted) <= (1e-9 if isinstance(wanted, float) else 0))


# -- 2.4

NCCL, RCCL, OTHERS, ARGS, COMPUTE, NO_KERNELS = LAB.sentences("2.4")


@LAB.grader("2.4")
def grade_names(sheet: Sheet, is_communication: Callable[[Row], Any]) -> None:
    """Every row; those that are wrong are counted under their family."""
    families = _rows("2.4")
    number = sum(map(len, families.values()))
    sheet.ran(f"{number} rows, most of them not in the lesson")
    for sentence, rows in families.items():
        right = sentence not in (COMPUTE, NO_KERNELS)
        wrong = [row for row in rows if bool(is_communication(row)) is not right]
        seen = ""
        for first in wrong[:1]:
            seen = f"{not right} for a {first.category}: {first.name}"
            seen += f"\n  with args {first.args}" if first.args else ""
            seen += f"\n(and {len(wrong) - 1} more like it)" if wrong[1:] else ""
        sheet.expect(sentence, not wrong, seen=seen, expected=f"{right}")


# -- 2.8b

STEP, BUSY, NAMES, TOP, UNSEEN_SUMMARIES = LAB.sentences("2.8b")
NUM_SUMMARIES = 40


@LAB.grader("2.8b")
def grade_summary(sheet: Sheet, summary: Callable[[list[Row]], Any]) -> None:
    """One fault at a time; then all four numbers on timelines drawn at random."""
    small, entries = _rows("2.8b"), LAB.cases("2.8b", "entry")
    sheet.ran(f"{len(small)} small timelines, then {NUM_SUMMARIES} large ones")
    every = tuple(entries.values())
    unseen = map(unseen_rows, range(1000, 1000 + NUM_SUMMARIES))
    for sentence, rows, where, keys in (
        *((s, rows, _on(rows), (entries[s],)) for s, rows in small.items()),
        *((UNSEEN_SUMMARIES, r, f"on {len(r)} rows: ", every) for r in unseen),
    ):
        if sentence == UNSEEN_SUMMARIES:
            sheet.stop_if_wrong()
        said, right = _summaries(summary, rows)
        hint = ""
        if sentence == UNSEEN_SUMMARIES and said != right:
            hint = next(
                (w for w, r in _TIDIED.items() if eq(*_summaries(summary, r(rows)))), ""
            )
        _expect_same(sheet, sentence, said, right, f"{hint}{where}", keys)


# What a summary may rely on, and such rows; on others it is wrong.
_TIDIED: Mapping[str, Callable[[list[Row]], list[Row]]] = {
    "right if the rows are sorted by their start, as these are not\n": lambda rows: (
        sorted(rows, key=lambda row: row.start_ns)
    ),
    "right without the rows that are no kernels\n": lambda rows: [
        row for row in rows if row.category == "kernel"
    ],
}


def _summaries(
    summary: Callable[[list[Row]], Any], rows: list[Row]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The learner's, and the right one; of equal sums, any is the top."""
    every = tuple(LAB.cases("2.8b", "entry").values())
    said = _dict(as_answer(summary(list(rows))), "summary", every)
    right = reference.summary(rows)
    sums: Mapping[str, int] = right["by_name"]
    if sums.get(said["top"]) == max(sums.values()):
        right["top"] = said["top"]
    return {key: said[key] for key in every}, right


# -- 2.8a

COMPUTE_MS, MESSAGE_MS, HIDDEN_MS, ONE_MESSAGE, UNDISTURBED = LAB.sentences("2.8a")


@lru_cache(maxsize=4)
def plain_ms(case: int) -> float:
    """How long the run of 2.8a takes without a profiler."""
    return given.profile_with(_plain_step, case).timeline.end_ns / 1e6


def _plain_step(
    compute: Callable[[], Any], send: Callable[[], Any]
) -> Mapping[str, float]:
    work = send()
    compute()
    work.wait()
    return {}


@LAB.grader("2.8a")
def grade_profile_step(sheet: Sheet, profile_step: given.ProfileStep) -> None:
    """What it says against what happened; what happened against the plain step."""
    entries = LAB.cases("2.8a", "entry")
    for case, (num_products, num_elements) in enumerate(given.PROFILED):
        size = num_elements * 4 // 2**10
        sheet.ran(f"{num_products} products beside a message of {size} KiB, on 2 ranks")
        timed = given.profile_with(profile_step, case)
        said, calls = timed.value
        sheet.show(timed.timeline.of_rank(0), title="your profiler's step")
        said = _dict(said, "profile_step", tuple(entries.values()))
        once = calls == {"compute": 1, "send": 1}
        LAB.expect(sheet, ONE_MESSAGE, once, **calls)
        ms, plain = timed.timeline.end_ns / 1e6, plain_ms(case)
        LAB.expect(sheet, UNDISTURBED, ms <= 1.02 * plain, ms=ms, plain=plain)
        right = given.truth(timed.timeline)
        for sentence, key in entries.items():
            value, wanted = float(said[key]), right[key]
            good = abs(value - wanted) <= TOLERANCE * wanted
            LAB.expect(sheet, sentence, good, value=value, wanted=wanted)
        sheet.stop_if_wrong()
