"""What a learner's function returned, as numbers; and the figure of what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from math import nan

from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.span import Kind


def is_close(said: float | None, right: float) -> bool:
    """Equal to a part in ten thousand: rounding is free, a forgotten term is not."""
    return said is not None and math.isclose(said, right, rel_tol=1e-4, abs_tol=1e-6)


def write_number(said: float | None, spec: str = "g") -> str:
    """As `format` writes it; "None" for None."""
    return "None" if said is None else format(said, spec)


def as_number(answer: object) -> float | None:
    """A finite number of any type, None for anything else (a bool, a text)."""
    if isinstance(answer, bool | str | bytes):
        return None
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def find_slip(
    said: float | None,
    slips: Mapping[str, str],
    numbers: Mapping[str, float],
    near: Callable[[float, float], object] = is_close,
) -> str:
    """What the number is that was said in the place of the right one, "" if unknown.

    Args:
        slips: by name, in words; the first that fits.
        numbers: by name; those of slips that cannot be made here may be left out.
        near: whether two numbers are the same.
    """
    if said is None:
        return ""
    known = (text for name, text in slips.items() if near(said, numbers.get(name, nan)))
    return next(known, "")


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
