"""Rows of devices -> spans: kernels, collectives, copies, and the CPU's launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from overlaplab.profiling.trace import names
from overlaplab.profiling.trace.labels import Labels
from overlaplab.profiling.trace.names import NOT_OPERATORS, Communication
from overlaplab.profiling.trace.rows import NO_ARGS, Message
from overlaplab.profiling.trace.tables import NO_ID, DeviceRow, Place, Tables
from overlaplab.timeline import CPU_LANE, Kind, Span

OVERLAP_NS = 1_000  # clocks of a card are no finer


def places(tables: Tables) -> list[Place]:
    """Where kernels ran, ascending by device."""
    found = {row.place for row in tables.on_device}
    return sorted(found, key=lambda place: (place[1], str(place[0])))


def clip(rows: Sequence[DeviceRow]) -> Iterator[tuple[DeviceRow, int]]:
    """End each row where the next of its stream starts; those changed, and how long
    they were.

    Rows that start together, overlap by less than `OVERLAP_NS` or belong to one launch
    of a graph stay as they are: the card can do that.
    """
    streams: dict[tuple[Place, Hashable], list[DeviceRow]] = defaultdict(list)
    for row in rows:
        streams[row.place, row.stream].append(row)
    for of_stream in streams.values():
        of_stream.sort(key=lambda row: row.start)
        after: DeviceRow | None = None  # and the first start behind its launch
        limit_ns: int | None = None
        for row in reversed(of_stream):
            if after is not None and after.start > row.start:
                is_one_graph = after.correlation == row.correlation != NO_ID
                limit_ns = limit_ns if is_one_graph else after.start
            if limit_ns is not None and row.end > limit_ns + OVERLAP_NS:
                yield row, row.end - row.start
                row.end = limit_ns
            after = row


class DeviceReader:
    """Spans of one file.

    Attributes:
        num_without_launch: rows whose launch is not in the file.
        num_without_step: rows that were launched in no step, though there are steps.
    """

    def __init__(
        self,
        tables: Tables,
        labels: Labels,
        communication: Communication,
        rank_of: Mapping[Place, int],
        shift_ns: int,
    ) -> None:
        self.num_without_launch = 0
        self.num_without_step = 0
        self._tables = tables
        self._labels = labels
        self._communication = communication
        self._rank_of = rank_of
        self._shift_ns = shift_ns
        self._launches = _Launches(tables)
        wanted = {row.operator for row in tables.on_device} - {NO_ID}
        self._operators = {
            id: i for i, id in enumerate(tables.operators.id) if id in wanted
        }
        self._launched: dict[int, tuple[int, str]] = {}  # call -> rank, what
        self._kernel_names: dict[str, str] = {}

    def spans(self) -> Iterator[Span]:
        lanes = _Lanes(self._tables.on_device, self._communication)
        for row in self._tables.on_device:
            call = self._launches.of(row)
            yield self._span(row, call, lanes)
        yield from self._cpu_lane()

    def _span(self, row: DeviceRow, call: int, lanes: _Lanes) -> Span:
        if call >= 0:
            attributes = {**self._context_of(call)}
            attributes["launch_ns"] = self._tables.calls.start[call] + self._shift_ns
        else:
            attributes = {}
            self.num_without_launch += 1
        if self._labels.has_steps and "step" not in attributes:
            self.num_without_step += 1
        attributes["stream"] = row.stream
        rank, size = self._rank_of[row.place], 0
        kind: Kind
        if row.kind != names.KERNEL:
            kind = "memcpy" if row.kind == names.MEMCPY else "memset"
            lane, name = lanes.of(row), row.kind
            size = row.num_bytes
            attributes["what"] = row.name
        elif row.name in self._communication:
            message = self._message(row, call)
            kind, name, size = "communication", message.operation, message.num_bytes
            lane = lanes.of_communication(row, message)
            attributes |= message.attributes
            if call >= 0 and (ranges := self._labels.ranges(*self._at(call))):
                attributes["ranges"] = ranges
            attributes["kernel"] = self._short(row.name)
        else:
            kind, lane = "compute", lanes.of(row)
            operator = self._operator_name(row, call)
            name = operator.rpartition("::")[2] or names.short_name(row.name)
            attributes["kernel"] = self._short(row.name)
            if operator and not operator.startswith("aten::"):
                attributes["operator"] = operator
            if row.grid:
                attributes["grid"] = row.grid
        if call >= 0:
            self._launched.setdefault(call, (rank, name))
        start, end = row.start + self._shift_ns, row.end + self._shift_ns
        return Span(rank, lane, kind, name, start, end, size, 0, attributes)

    def _context_of(self, call: int) -> Mapping[str, Any]:
        calls = self._tables.calls
        return self._labels.attributes(calls.thread[call], calls.start[call])

    def _at(self, call: int) -> tuple[Hashable, int]:
        """The thread and the time of a call."""
        calls = self._tables.calls
        return calls.thread[call], calls.start[call]

    def _short(self, kernel: str) -> str:
        if len(kernel) <= 200:
            return kernel
        return self._kernel_names.setdefault(kernel, kernel[:200])

    def _operator(self, row: DeviceRow, call: int) -> int:
        """The operator that launched it, as its index."""
        # Older versions give a kernel its correlation for an operator.
        if row.operator != row.correlation:
            return self._operators.get(row.operator, -1)
        if call < 0:
            return -1
        return self._labels.operator(*self._at(call))

    def _operator_name(self, row: DeviceRow, call: int) -> str:
        operator = self._operator(row, call)
        name = self._tables.operators.name[operator] if operator >= 0 else ""
        return "" if name.startswith(NOT_OPERATORS) else name

    def _message(self, row: DeviceRow, call: int) -> Message:
        """What is sent stands with the kernel, or with the call that launched it."""
        own = row.message or NO_ARGS
        if own.collective is not None:
            return Message.of(own, row.name)
        operators, annotations = self._tables.operators, self._tables.annotations
        operator = self._operator(row, call)
        if (args := operators.args.get(operator)) and args.collective is not None:
            return Message.of(args, row.name)
        if call >= 0:
            around = self._labels.collective(*self._at(call))
            if around >= 0:
                said = annotations.name[around].removeprefix("nccl:")
                args = annotations.args.get(around, own)
                return Message.of(args, row.name, said)
        return Message.of(own, row.name)

    def _cpu_lane(self) -> Iterator[Span]:
        calls, shift = self._tables.calls, self._shift_ns
        unlaunched = min(self._rank_of.values()), ""
        for i, start, end, name, _ in calls.rows(range(len(calls))):
            rank, launched = self._launched.get(i, unlaunched)
            call = names.call_kind_of(name)
            kind: Kind
            about = self._context_of(i)
            if call == "wait":
                kind, what = "host", f"wait {name}"
                about = {key: of for key, of in about.items() if key != "phase"}
            elif call == "launch" or launched:
                kind, what = "launch", f"launch {launched or name}"
            else:
                continue
            start, end = start + shift, end + shift
            yield Span(rank, CPU_LANE, kind, what, start, end, 0, 0, about)
        for _, start, end, name, thread in self._labels.loading():
            about = self._labels.attributes(thread, start)
            times = start + shift, end + shift
            what = f"load {name}"
            yield Span(unlaunched[0], CPU_LANE, "host", what, *times, 0, 0, about)


class _Launches:
    """Which call of the runtime launched a row: the one of its correlation."""

    def __init__(self, tables: Tables) -> None:
        self._calls = tables.calls
        wanted = {row.correlation for row in tables.on_device} - {NO_ID}
        self._call_of: dict[int, int] = {}
        self._more: dict[int, list[int]] = {}  # several files put together
        for i, id in enumerate(self._calls.id):
            if id in wanted and self._call_of.setdefault(id, i) != i:
                self._more.setdefault(id, [self._call_of[id]]).append(i)

    def of(self, row: DeviceRow) -> int:
        """Index of the call, -1 if the file has none."""
        call = self._call_of.get(row.correlation, -1)
        if self._more and row.correlation in self._more:
            starts = self._calls.start
            before = [i for i in self._more[row.correlation] if starts[i] <= row.start]
            call = max(before, key=lambda i: starts[i], default=call)
        return call


class _Lanes:
    """Names of lanes: the stream that computes most is "default"."""

    def __init__(self, rows: list[DeviceRow], communication: Communication) -> None:
        computing: dict[Place, dict[Hashable, int]] = defaultdict(dict)
        sending: dict[Place, dict[Hashable, int]] = defaultdict(dict)
        for row in rows:
            if row.kind == names.KERNEL:
                busy = sending if row.name in communication else computing
                of_place = busy[row.place]
                length = row.end - row.start
                of_place[row.stream] = of_place.get(row.stream, 0) + length
        self._computes = {place: _busiest(of) for place, of in computing.items()}
        self._sends = {place: _busiest(of) for place, of in sending.items()}
        self._known: dict[tuple[Place, Hashable], str] = {}

    def of(self, row: DeviceRow) -> str:
        lane = self._known.get((row.place, row.stream))
        if lane is None:
            is_main = self._computes.get(row.place) == row.stream
            lane = "default" if is_main else f"stream {row.stream}"
            self._known[row.place, row.stream] = lane
        return lane

    def of_communication(self, row: DeviceRow, message: Message) -> str:
        is_main = self._sends.get(row.place) == row.stream
        return message.lane or ("comm" if is_main else f"comm:stream {row.stream}")


def _busiest(busy: Mapping[Hashable, int]) -> Hashable:
    return max(busy, key=lambda stream: busy[stream])
