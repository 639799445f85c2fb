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
from overlaplab.profiling.trace.pieces import NO_EVENT
from overlaplab.profiling.trace.rows import NO_ARGS, Args, Row, nanoseconds

NEGATIVE = "negative duration"
NO_DURATION = "no duration"
NO_TIME = "no time stamp"
ZERO = "time 0 and duration 0"
NO_END = "begins and never ends"
NO_BEGIN = "ends and never began"

NO_ID = -1


@dataclass(slots=True)
class Ranges:
    """Rows of the CPU that have a thread: operators, calls, annotations."""

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    name: list[str] = field(default_factory=list)
    thread: list[Hashable] = field(default_factory=list)
    id: array[int] = field(default_factory=lambda: array("q"))  # or NO_ID
    args: dict[int, Args] = field(default_factory=dict)  # of few, by index

    def add(self, start: int, end: int, name: str, thread: Hashable, id: int) -> None:
        self.start.append(start)
        self.end.append(end)
        self.name.append(name)
        self.thread.append(thread)
        self.id.append(id)

    def __len__(self) -> int:
        return len(self.start)

    def in_order(self) -> list[int]:
        """Indices by start; the outer of two that start together comes first."""
        start, end = self.start, self.end
        return sorted(range(len(start)), key=lambda i: (start[i], -end[i]))

    def rows(
        self, order: Iterable[int]
    ) -> Iterator[tuple[int, int, int, str, Hashable]]:
        """(index, start, end, name, thread)."""
        for i in order:
            yield i, self.start[i], self.end[i], self.name[i], self.thread[i]


@dataclass(slots=True)
class DeviceRow:
    """One thing that a stream of a device did."""

    kind: str  # "kernel", "memcpy" or "memset"
    name: str
    start: int
    end: int
    process: Hashable
    device: int
    stream: Hashable
    correlation: int
    operator: int  # its id, or NO_ID
    args: Args


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
        self.num_events = 0
        self.dropped: Counter[str] = Counter()
        self._kinds: dict[str, str | None] = {}
        self._device_kinds: dict[str, str | None] = {}
        self._call_kinds: dict[str, str | None] = {}
        self._names: dict[str, str] = {}
        self._threads: dict[Hashable, Hashable] = {}
        self._begun: dict[Hashable, list[Row]] = {}

    def add(self, batch: Sequence[Row]) -> None:
        """Rows in the order of the file."""
        self.num_events += len(batch)
        kinds, keep = self._kinds, self._keep_complete
        for row in batch:
            phase = row.ph
            if phase == "X":
                try:
                    kind = kinds[row.cat]
                except (KeyError, TypeError):
                    kind = self._kind_of(row)
                if kind is not None:
                    keep(row, kind)
            elif phase == "B" or phase == "E":
                self._add_half(row)
            elif phase is None:
                self.num_events -= 1
                self.dropped[NO_EVENT] += 1

    def finish(self) -> None:
        """Count what began and never ended."""
        open_rows = [row for rows in self._begun.values() for row in rows]
        if num := sum(1 for row in open_rows if self._kind_of(row)):
            self.dropped[NO_END] += num

    def _kind_of(self, row: Row) -> str | None:
        category = row.cat
        if category is None:
            return names.category_of(None, row.pid)
        if not isinstance(category, str):
            return None
        if category not in self._kinds:
            self._kinds[category] = names.category_of(category, None)
        return self._kinds[category]

    def _keep_complete(self, row: Row, kind: str) -> None:
        name = self._name(row)
        if kind == names.RUNTIME and self._call_kind_of(name) is None:
            return
        start = nanoseconds(row.ts)
        length = nanoseconds(row.dur)
        if start is None:
            self.dropped[NO_TIME] += 1
        elif length is None:
            self.dropped[NO_DURATION] += 1
        elif length < 0:
            self.dropped[NEGATIVE] += 1
        else:
            self._keep(row, kind, name, start, start + length)

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
            if row.cat is None or self._kind_of(row):
                self.dropped[NO_BEGIN] += 1
            return
        if kind := self._kind_of(begin):
            start, end = nanoseconds(begin.ts), nanoseconds(row.ts)
            if start is None or end is None:
                self.dropped[NO_TIME] += 1
            elif end < start:
                self.dropped[NEGATIVE] += 1
            else:
                if begin.args is None:
                    begin.args = row.args
                self._keep(begin, kind, self._name(begin), start, end)

    def _keep(self, row: Row, kind: str, name: str, start: int, end: int) -> None:
        args = row.args or NO_ARGS
        if kind == names.OPERATOR or kind == names.RANGE:
            table = self.operators if kind == names.OPERATOR else self.annotations
            if args.collective is not None or (
                args.shapes is not None and name.startswith(("gloo:", "nccl:"))
            ):
                table.args[len(table)] = args
            table.add(start, end, name, self._thread(row), _id(args.external))
        elif kind == names.RUNTIME:
            if self._call_kind_of(name) is not None:
                thread = self._thread(row)
                self.calls.add(start, end, name, thread, _id(args.correlation))
        else:
            self._keep_on_device(row, name, start, end, args, kind)

    def _name(self, row: Row) -> str:
        name = row.name if type(row.name) is str else str(row.name)
        return self._names.setdefault(name, name)

    def _call_kind_of(self, name: str) -> str | None:
        try:
            return self._call_kinds[name]
        except KeyError:
            kind = self._call_kinds[name] = names.call_kind_of(name)
            return kind

    def _keep_on_device(
        self, row: Row, name: str, start: int, end: int, args: Args, kind: str
    ) -> None:
        if kind == names.KERNEL:
            try:
                found = self._device_kinds[name]
            except KeyError:
                found = self._device_kinds[name] = names.device_kind_of(name)
            if found is None:
                return
            kind = found
        if start == 0 and end == 0:
            self.dropped[ZERO] += 1
            return
        process = row.pid if isinstance(row.pid, Hashable) else str(row.pid)
        device = args.device if args.device is not None else row.pid
        stream = args.stream if args.stream is not None else row.tid
        self.on_device.append(
            DeviceRow(
                kind, name, start, end, process, max(0, _id(device)), _plain(stream),
                _id(args.correlation), _id(args.external), args,
            )
        )  # fmt: skip

    def _thread(self, row: Row) -> Hashable:
        # A thread id is unique in its process only where files were put together.
        key = (row.pid, row.tid)
        try:
            return self._threads.setdefault(key, key)
        except TypeError:
            return str(key)


def _id(value: object) -> int:
    if type(value) is int:
        return value if 0 <= value < 1 << 62 else NO_ID
    try:
        return int(str(value))
    except ValueError:
        return NO_ID


def _plain(value: Any) -> Hashable:
    return value if isinstance(value, int | str) else str(value)
