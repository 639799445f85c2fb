"""A large trace out of a small real one: its events again and again, later each time.

Every copy has ids of its own and lies behind the one before it, so that unions,
launches and steps stay apart: the share of hidden communication is the same, and
everything else is as many times as large. The same input gives the same bytes.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson

_IDS = ("correlation", "External id", "external id", "Ev Idx")
_STEP = "ProfilerStep#"
_GAP_US = 1000


def grow(source: Path, target: Path, at_least_bytes: int) -> int:
    """Write `target`, an unpacked trace of at least so many bytes.

    Args:
        source: a Kineto trace, .json or .json.gz.
        target: is overwritten.
        at_least_bytes: the last copy that is begun is written to its end.

    Returns:
        How many times the events of `source` are in `target`.
    """
    trace = json.loads(read_unpacked(source), parse_float=Decimal)
    events = trace.pop("traceEvents")
    copies = repeat(events)
    times = 0
    with target.open("wb") as file:
        file.write(orjson.dumps(trace)[:-1] + b', "traceEvents": [\n')
        while file.tell() < at_least_bytes or not times:
            lines = (orjson.dumps(event) for event in next(copies))
            file.write((b",\n" if times else b"") + b",\n".join(lines))
            times += 1
        file.write(b"\n]}\n")
    return times


def read_unpacked(file: Path) -> bytes:
    """The whole of a trace's text."""
    data = file.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def repeat(events: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """One copy of all events after another, without end.

    Times begin near 0 in the first copy: a float then holds every nanosecond.

    Args:
        events: of a Kineto trace, with times as int or `Decimal` microseconds.
    """
    events = list(events)
    complete = [event for event in events if event.get("ph") == "X"]
    begin = int(min((event["ts"] for event in complete), default=0))
    end = max((event["ts"] + event.get("dur", 0) for event in complete), default=0)
    period = int(end) - begin + _GAP_US
    ids = max((i for event in events for i in _ids(event)), default=0) + 1
    steps = {int(e["name"].split("#")[1]) for e in complete if _is_step(e)}
    step = max(steps, default=0) - min(steps, default=0) + 1
    for number in itertools.count():
        shift, offset = number * period - begin, number * ids
        yield [_later(event, shift, offset, number * step) for event in events]


def _later(
    event: Mapping[str, Any], shift_us: int, ids: int, steps: int
) -> dict[str, Any]:
    copy = dict(event)
    for key, by in (("ts", shift_us), ("dur", 0)):
        if isinstance(copy.get(key), Decimal):
            copy[key] = float(copy[key] + by)
        elif isinstance(copy.get(key), int):
            copy[key] += by
    if isinstance(copy.get("id"), int):
        copy["id"] += ids
    if isinstance(copy.get("args"), dict):
        copy["args"] = {
            key: value + ids
            if key in _IDS and isinstance(value, int)
            else _plain(value)
            for key, value in copy["args"].items()
        }
    if _is_step(copy):
        copy["name"] = _STEP + str(int(copy["name"].split("#")[1]) + steps)
    return copy


def _ids(event: Mapping[str, Any]) -> Iterator[int]:
    args = event.get("args")
    found = [args.get(key) for key in _IDS] if isinstance(args, dict) else []
    yield from (i for i in (event.get("id"), *found) if isinstance(i, int))


def _is_step(event: Mapping[str, Any]) -> bool:
    return str(event.get("name", "")).startswith(_STEP)


def _plain(value: Any) -> Any:
    """orjson writes no `Decimal`."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
