"""What a learner's function returned, as numbers; and the figure of what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from math import nan
from types import MappingProxyType
from typing import Any

from overlaplab.grading.answered import as_number
from overlaplab.grading.exercise import Sheet
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.span import Kind


def is_close(said: float | None, right: float) -> bool:
    """Equal to a part in ten thousand: rounding is free, a forgotten term is not."""
    return said is not None and math.isclose(said, right, rel_tol=1e-4, abs_tol=1e-6)


def write_number(said: float | None, spec: str = "g") -> str:
    """As `format` writes it; "None" for None."""
    return "None" if said is None else format(said, spec)


def find_slip(
    said: float | None,
    slips: Mapping[str, str],
    numbers: Mapping[str, float],
    near: Callable[[float, float], object] = is_close,
) -> str:
    """Which slip gives the number that was said, in words; "" if none is known to.

    Args:
        slips: by name, in words; the first that fits.
        numbers: by name; those of slips that cannot be made here may be left out.
        near: whether two numbers are the same.
    """
    if said is None:
        return ""
    known = (text for name, text in slips.items() if near(said, numbers.get(name, nan)))
    return next(known, "")


def not_filled_in(said: Mapping[str, Any], key: str) -> str:
    """What stands in the place of an answer."""
    if key not in said:
        return f"there is no {key!r}"
    if said[key] is None:
        return f"{key!r} is not filled in"
    return f"{key!r} is {said[key]!r:.80}"


def judge_numbers(
    sheet: Sheet,
    tables: Iterable[Mapping[str, Any]],
    said: Mapping[str, Any],
    right: Mapping[str, float],
    others: Mapping[str, float],
    *,
    common: Mapping[str, str] = MappingProxyType({}),
    form: str = "g",
) -> None:
    """Each number that a learner read off something, alone; a wrong one is explained.

    Args:
        tables: of the sentences (`Declared.tables`): "says"; "entry", the key in `said`
            and `right`; "how" to find it; "within"; "slips", as in `find_slip`.
        others: what is easily taken for one of `right`, by the names in "slips".
        common: slips of every number: "us" and "ns" instead of ms, "minus". Here what
            is 1000 times as large may be off by 1000 times as much.
        form: of the number, where it is shown.
    """
    for one in tables:
        key, off, expected = one["entry"], one["within"], one["how"]
        value, wanted, good = as_number(said.get(key)), right[key], False
        if value is None:
            seen = not_filled_in(said, key)
            expected = f"a number: {expected}"
        else:
            good = bool(abs(value - wanted) <= off)
            units = {"ns": 1e6 * wanted, "us": 1e3 * wanted, "minus": -wanted}
            every = {**others, **(units if common else {})}
            wrong = {n: x for n, x in every.items() if abs(x - wanted) > off}
            size = abs(wanted or 1) if common else math.inf

            def is_near(
                a: float, b: float, off: float = off, size: float = size
            ) -> bool:
                return bool(abs(a - b) <= off * max(1, abs(b / size)))

            slips = {} if good else {**common, **one.get("slips", {})}
            slip = find_slip(value, slips, wrong, is_near)
            seen = f"{key}: {value:{form}}" + (f"\n{slip}" if slip else "")
        sheet.expect(one["says"], good, seen=seen, expected=expected)


def read_numbers(
    answer: object, count: int, function: str, wanted: str
) -> list[float | None]:
    """`count` finite numbers, or None among them.

    Raises:
        ValueError: it is something else.
    """
    try:
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise ValueError("no tuple")
        values = [None if value is None else float(value) for value in answer]
        if len(values) != count or not all(
            value is None or math.isfinite(value) for value in values
        ):
            raise ValueError("other numbers")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{function} returned {answer!r:.200}; expected {wanted}: {count} numbers"
        ) from error
    return values


def read_pairs(answer: object, what: str, wanted: str) -> list[tuple[float, float]]:
    """Pairs of finite numbers: a start and an end, at most 1e9 apart.

    Args:
        what: the error begins with it: "schedule(1, 2) returned".
        wanted: what a pair is, and how many are expected.

    Raises:
        ValueError: it is something else.
    """
    try:
        pairs = [(float(start), float(end)) for start, end in answer]  # type: ignore[attr-defined]
        if not all(math.isfinite(a + b) and b - a <= 1e9 for a, b in pairs):
            raise ValueError("not finite")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} {answer!r:.200}; expected a list of {wanted}"
        ) from error
    return pairs


def said_timeline(
    spans: Iterable[tuple[str, Kind, str, float, float]], unit_ns: int
) -> Timeline:
    """What the learner says, to be drawn; an end before its start becomes a mark.

    What would run beside another of its lane has a lane of its own, so that neither
    hides the other.

    Args:
        spans: lane, kind, name, start and end of each, of rank 0.
        unit_ns: of the times.
    """
    drawn, lane_ends = [], dict[str, float]()
    for lane, kind, name, start, end in spans:
        end = max(start, end)
        if start < lane_ends.get(lane, start) - 1e-9:
            lane = f"{lane}, at once"
        lane_ends[lane] = max(end, lane_ends.get(lane, end))
        times_ns = round(unit_ns * start), round(unit_ns * end)
        drawn.append(Span(0, lane, kind, name, *times_ns))
    return Timeline.of(drawn)
