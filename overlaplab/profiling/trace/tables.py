"""What one trace file says, by kind of row, in columns: nothing that is not used.

Times are integer nanoseconds of the file's own clock. Knows the format of the file,
not what its events mean for a timeline.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from overlaplab.profiling.trace import names
from overlaplab.profiling.trace.chunks import NO_EVENT
from overlaplab.profiling.trace.rows import (
    NO_ARGS,
    Args,
    Row,
    integer,
    list_of,
    nanoseconds,
)

NEGATIVE = "negative duration"
NO_DURATION = "no duration"
NO_TIME = "no time stamp"
ZERO = "time 0 and duration 0"
ZERO_START = "time 0, long before all else"
NO_END = "begins and never ends"
NO_BEGIN = "ends and never began"

NO_ID = -1
_TOO_LARGE = 1 << 62
_EXACT_US = 1 << 52
_DAY_NS = 86_400 * 10**9


@dataclass(slots=True)
class Ranges:
    """Rows of the CPU that have a thread: operators, calls, annotations."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: list[str] = field(default_factory=list)
    thread: list[Hashable] = field(default_factory=list)
    id: array[int] = field(default_factory=lambda: array("q"))  # or NO_ID
    args: dict[int, Args] = field(default_factory=dict)  # of few, by index

    def __len__(self) -> int:
        return len(self.start)

    def in_order(self) -> list[int]:
        """Indices by start; the outer of two that start together comes first."""
        order = sorted(range(len(self)), key=self.end.__getitem__, reverse=True)
        order.sort(key=self.start.__getitem__)
        return order

    def rows(
        self, order: Iterable[int]
    ) -> Iterator[tuple[int, int, int, str, Hashable]]:
        """(index, start, end, name, thread)."""
        for i in order:
            yield i, self.start[i], self.end[i], self.name[i], self.thread[i]


# What kind of row, its name, and where it is kept; None: among those of devices.
_Meaning = tuple[str, str, Ranges | None]

# (process of the rows, device): where in a file a rank is
Place = tuple[Hashable, int]


@dataclass(slots=True)
class DeviceRow:
    """One thing that a stream of a device did."""

    kind: str  # "kernel", "memcpy" or "memset"
    name: str
    start: int
    end: int
    place: Place
    stream: Hashable
    correlation: int
    operator: int  # its id, or NO_ID
    num_bytes: int  # of a copy
    grid: list[Any]
    message: Args | None  # of a collective


class Tables:
    """The rows of one file, added batch by batch.

    Attributes:
        operators: of the CPU; `id` is the "External id".
        calls: of the runtime that launch or wait, or may; `id` correlates.
        annotations: ranges of the user and of the profiler.
        on_device: what ran on the devices, copies included.
        num_events: whole events, of whatever kind.
        dropped: reason -> number, of rows that would have been used.
    """

    def __init__(self) -> None:
        self.operators = Ranges()
        self.calls = Ranges()
        self.annotations = Ranges()
        self.on_device: list[DeviceRow] = []
        self._tables = {
            names.OPERATOR: self.operators,
            names.RUNTIME: self.calls,
            names.RANGE: self.annotations,
        }
        self.num_events = 0
        self.dropped: Counter[str] = Counter()
        self._meanings: dict[tuple[object, object], _Meaning | None] = {}
        self._threads: dict[tuple[Any, Any], tuple[Any, Any]] = {}
        self._last_thread: tuple[Any, Any] = (None, None)
        self._places: dict[tuple[Any, Any], Place] = {}
        self._grids: dict[bytes, list[Any]] = {}
        self._begun: dict[Hashable, list[Row]] = {}

    def add(self, batch: Sequence[Row]) -> None:
        """Rows in the order of the file."""
        self.num_events += len(batch)
        meanings, keep = self._meanings, self._keep
        for row in batch:
            phase = row.ph
            if phase == "X":
                try:
                    meaning = meanings[row.cat, row.name]
                except (KeyError, TypeError):
                    meaning = self._meaning_of(row)
                if meaning is None:
                    continue
                start, length = row.ts, row.dur
                # Whole microseconds, as many versions write them, without a call.
                if type(start) is int and 0 <= start < _EXACT_US:
                    start *= 1000
                else:
                    start = nanoseconds(start)
                if type(length) is int and 0 <= length < _EXACT_US:
                    length *= 1000
                else:
                    length = nanoseconds(length)
                if start is None:
                    self.dropped[NO_TIME] += 1
                elif length is None:
                    self.dropped[NO_DURATION] += 1
                elif length < 0:
                    self.dropped[NEGATIVE] += 1
                else:
                    keep(row, meaning, start, start + length)
            elif phase == "B" or phase == "E":
                self._add_half(row)
            elif phase is None:
                self.num_events -= 1
                self.dropped[NO_EVENT] += 1

    def finish(self) -> None:
        """Count what began and never ended; drop what has no time but 0."""
        open_rows = [row for rows in self._begun.values() for row in rows]
        if num := sum(1 for row in open_rows if self._meaning_of(row)):
            self.dropped[NO_END] += num
        zeros = sum(1 for row in self.on_device if row.start == 0)
        others = [row.start for row in self.on_device if row.start] if zeros else []
        if others and min(others) > _DAY_NS:
            self.on_device = [row for row in self.on_device if row.start]
            self.dropped[ZERO_START] += zeros

    def _meaning_of(self, row: Row) -> _Meaning | None:
        """None for what a timeline does not use."""
        name = row.name if isinstance(row.name, str) else str(row.name)
        category = names.category_of(row.cat, row.pid)
        kind = names.kind_of(category, name) if category else None
        meaning = (kind, name, self._tables.get(kind)) if kind else None
        if isinstance(row.cat, str) and isinstance(row.name, str):
            self._meanings[row.cat, row.name] = meaning
        return meaning

    def _add_half(self, row: Row) -> None:
        """A "B" opens a range of its thread, an "E" closes the last of its name."""
        begun = self._begun.setdefault((str(row.pid), str(row.tid)), [])
        if row.ph == "B":
            begun.append(row)
            return
        for i in reversed(range(len(begun))):
            if row.name is None or begun[i].name == row.name:
                begin = begun.pop(i)
                break
        else:
            if row.cat is None or self._meaning_of(row):
                self.dropped[NO_BEGIN] += 1
            return
        if meaning := self._meaning_of(begin):
            start, end = nanoseconds(begin.ts), nanoseconds(row.ts)
            if start is None or end is None:
                self.dropped[NO_TIME] += 1
            elif end < start:
                self.dropped[NEGATIVE] += 1
            else:
                if begin.args is None:
                    begin.args = row.args
                self._keep(begin, meaning, start, end)

    def _keep(self, row: Row, meaning: _Meaning, start: int, end: int) -> None:
        kind, name, table = meaning
        args = row.args or NO_ARGS
        if table is None:
            self._keep_on_device(row, name, start, end, args, kind)
            return
        id = args.correlation if kind == names.RUNTIME else args.external
        if args.collective is not None or (
            args.shapes and name.startswith(("gloo:", "nccl:"))
        ):
            table.args[len(table.start)] = args.whole()
        # Rows of a thread come together.
        thread = self._last_thread
        if row.tid != thread[1] or row.pid != thread[0]:
            thread = self._thread(row)
        table.start.append(start)
        table.end.append(end)
        table.name.append(name)
        table.thread.append(thread)
        table.id.append(id if type(id) is int and 0 <= id < _TOO_LARGE else _id(id))

    def _keep_on_device(
        self, row: Row, name: str, start: int, end: int, args: Args, kind: str
    ) -> None:
        if start == 0 and end == 0:
            self.dropped[ZERO] += 1
            return
        stream = args.stream if args.stream is not None else row.tid
        correlation, operator, size = args.correlation, args.external, args.bytes
        self.on_device.append(
            DeviceRow(
                kind,
                name,
                start,
                end,
                self._place(row, args),
                stream if integer(stream) is not None else str(stream),
                correlation if type(correlation) is int else _id(correlation),
                operator if type(operator) is int else _id(operator),
                size if type(size) is int and 0 < size < _TOO_LARGE else 0,
                self._grid(args),
                args.whole() if args.is_message else None,
            )
        )

    def _place(self, row: Row, args: Args) -> Place:
        device = args.device if args.device is not None else row.pid
        try:
            return self._places[row.pid, device]
        except (KeyError, TypeError):
            pass
        # Some that put files together spell a process "0", others 0.
        process = str(row.pid)
        place = process, max(0, _id(device))
        if isinstance(device, Hashable) and isinstance(row.pid, Hashable):
            self._places[row.pid, device] = place
        return place

    def _grid(self, args: Args) -> list[Any]:
        text = bytes(args.grid)
        grid = self._grids.get(text)
        if grid is None:
            grid = [n for n in list_of(args.grid) if integer(n) is not None]
            self._grids[text] = grid
        return grid

    def _thread(self, row: Row) -> tuple[Any, Any]:
        # A thread id is unique in its process only where files were put together.
        key = (row.pid, row.tid)
        try:
            self._last_thread = self._threads.setdefault(key, key)
        except TypeError:
            return str(row.pid), str(row.tid)
        return self._last_thread


def _id(value: object) -> int:
    if type(value) is int:
        return value if 0 <= value < _TOO_LARGE else NO_ID
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 19 else NO_ID
