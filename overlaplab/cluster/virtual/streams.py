"""Streams and events of the virtual cluster, with torch.cuda's names and meaning.

A wait puts operators into the waiting lane's `pending`; its next operator takes them
into `Op.after` (recorder.py).
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from overlaplab.cluster.virtual.lanes import Frontier, Lane
from overlaplab.cluster.virtual.patching import Patch, in_ranks, patched
from overlaplab.cluster.virtual.placement import DEVICE
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.source import user_line
from overlaplab.errors import EventError
from overlaplab.streams import thread_provider
from overlaplab.torch_versions import BaseStream


class VirtualStream(BaseStream):  # type: ignore[misc]
    """One lane of one rank; as torch.cuda.Stream.

    A torch.Stream, since `Tensor.record_stream` takes nothing else. `number` is unlike
    any other stream's of the rank; the priority has no effect.
    """

    def __new__(
        cls, recorder: Recorder, lane: Lane, number: int, priority: int = 0
    ) -> VirtualStream:
        how = {"stream_id": number, "device_index": 0, "device_type": 0}
        new: VirtualStream = super().__new__(cls, **how)
        return new

    def __init__(
        self, recorder: Recorder, lane: Lane, number: int, priority: int = 0
    ) -> None:
        self._recorder = recorder
        self.lane = lane
        self._priority = priority
        self._leave: list[Callable[[], None]] = []

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def priority(self) -> int:
        return self._priority

    def __enter__(self) -> VirtualStream:
        self._leave.append(self._recorder.enter_stream(self.lane))
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.pop()()

    @property
    def name(self) -> str:
        """The lane's name in timelines."""
        return self.lane.name

    def wait_event(self, event: VirtualEvent) -> None:
        """The next operator here comes after what `event` recorded."""
        event.wait(self)

    def wait_stream(self, stream: VirtualStream) -> None:
        """The next operator here comes after all that `stream` has so far."""
        self.lane.wait(stream.lane.frontier())

    def record_event(self, event: VirtualEvent | None = None) -> VirtualEvent:
        """Record `event` (a new one if None) here and return it."""
        if event is None:
            event = VirtualEvent(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the CPU until all that was launched here has ended."""
        self._recorder.host_wait("stream.synchronize", self.lane.frontier())

    def query(self) -> bool:
        """Whether all that was launched here can have ended; lets others go on."""
        return _poll(self._recorder, "stream.query", self.lane.frontier())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualStream) and other.lane is self.lane

    def __hash__(self) -> int:
        return hash(self.lane.name)

    def __repr__(self) -> str:
        return f"<virtual stream {self.lane.name!r} of rank {self._recorder.rank}>"


class VirtualEvent:
    """A point of a stream; as torch.cuda.Event, but for one thing: to wait for it
    before it was recorded is an error. On a GPU that silently waits for nothing.

    It stands for its last record only, on whatever stream that was.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recorded: Frontier | None = None

    def record(self, stream: VirtualStream | None = None) -> None:
        """Stand for all that `stream` (the current one if None) has so far."""
        lane = self._recorder.current() if stream is None else stream.lane
        self._recorded = lane.frontier()

    def wait(self, stream: VirtualStream | None = None) -> None:
        """The next operator on `stream` comes after this event."""
        lane = self._recorder.current() if stream is None else stream.lane
        lane.wait(self._point(f"stream {lane.name!r}"))

    def synchronize(self) -> None:
        """Block the CPU until the event has happened."""
        self._recorder.host_wait("event.synchronize", self._point("the CPU"))

    def query(self) -> bool:
        """Whether the event can have happened; lets other ranks go on."""
        return _poll(self._recorder, "event.query", self._point("the CPU"))

    def elapsed_time(self, end_event: VirtualEvent) -> float:
        """Not on the virtual cluster, whose times are known after the run."""
        raise NotImplementedError(
            "Event.elapsed_time on the virtual cluster: times are resolved after the "
            "run; read them from run.timeline"
        )

    def _point(self, who: str) -> Frontier:
        """What was recorded last.

        Raises:
            EventError: nothing was.
        """
        if self._recorded is None:
            line = user_line(sys._getframe(2))
            raise EventError(
                f"on rank {self._recorder.rank}, {who} waits for an event that was "
                f"never recorded{f', at {line}' if line else ''}.\n"
                "  On a GPU such a wait waits for nothing, and says nothing.\n"
                "  Repair: call event.record() on the stream of the producer before "
                "this wait; where a first round has nothing to wait for, skip the wait."
            )
        return self._recorded


class VirtualProvider:
    """`overlaplab.streams` for one rank of the virtual cluster."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams: dict[str, VirtualStream] = {}

    def device(self) -> torch.device:
        """The GPU's memory: "cpu" would be the host's (placement.py)."""
        return DEVICE

    def make_stream(self, priority: int, name: str = "") -> VirtualStream:
        return self._stream_of(self._recorder.new_lane(name), priority)

    def make_event(self, enable_timing: bool) -> VirtualEvent:
        return VirtualEvent(self._recorder)

    def current_stream(self) -> VirtualStream:
        return self._stream_of(self._recorder.current())

    @contextlib.contextmanager
    def stream(self, stream: VirtualStream | None) -> Iterator[VirtualStream | None]:
        if stream is None:  # as torch.cuda.stream(None)
            yield None
            return
        with stream:
            yield stream

    def go_first(self, group: Any) -> None:
        """Its collectives are recorded with high priority from now on."""
        group.communicator.high_priority = True

    def synchronize(self) -> None:
        self._recorder.host_wait("synchronize", self._recorder.everything())

    @contextlib.contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        self._recorder.enter_label(name)
        try:
            yield
        finally:
            self._recorder.leave_label()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        end = self._recorder.begin_step(number)
        try:
            yield
        finally:
            end()

    def name_tensor(self, tensor: torch.Tensor, name: str) -> None:
        self._recorder.storages.name(tensor, name, self._recorder.current().name)

    def _stream_of(self, lane: Lane, priority: int = 0) -> VirtualStream:
        stream = self._streams.get(lane.name)
        if stream is None:
            stream = VirtualStream(self._recorder, lane, len(self._streams), priority)
            self._streams[lane.name] = stream
        return stream


def _poll(recorder: Recorder, name: str, frontier: Frontier) -> bool:
    """Whether `frontier` can have been reached. If so, the CPU knows it from then on:
    what it launches next comes after."""
    unmet = [meeting for meeting in frontier.unmet if not meeting.complete]
    if unmet:
        recorder.turns.yield_turn(recorder.thread, unmet[0])
    if not all(meeting.complete for meeting in unmet):
        return False
    recorder.host_wait(name, frontier)
    return True


@contextlib.contextmanager
def torch_cpu_streams() -> Iterator[None]:
    """While open, `torch.cpu`'s streams and events, which are dummies, are those of the
    calling rank; other threads see torch's own.

    Code that asks a tensor's device for its streams gets to `torch.cpu` on the virtual
    cluster: FSDP2 does. Its streams then show up as lanes, under its names for them.
    """
    ours: dict[str, Callable[..., Any]] = {
        "Stream": _make_stream,
        "Event": lambda provider, *_, **__: provider.make_event(False),
        "current_stream": lambda provider, device=None: provider.current_stream(),
        "stream": VirtualProvider.stream,
        "StreamContext": VirtualProvider.stream,
        "synchronize": lambda provider, device=None: provider.synchronize(),
    }

    def on_ranks(name: str, method: Callable[..., Any]) -> Patch:
        otherwise = getattr(torch.cpu, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            provider = thread_provider()
            if not isinstance(provider, VirtualProvider):
                return otherwise(*args, **kwargs)
            return method(provider, *args, **kwargs)

        return torch.cpu, name, call

    with patched(on_ranks(*pair) for pair in ours.items()):
        yield


def _make_stream(provider: VirtualProvider, priority: int = 0) -> Any:
    # The caller of `torch.cpu.Stream`: above this function and `call`.
    return provider.make_stream(priority, _assigned_to(sys._getframe(2)))


@contextlib.contextmanager
def backward_streams() -> Iterator[None]:
    """While open, recorders hear of the backward passes of their ranks."""

    def run(rank: Recorder, engine: Any, *args: Any, **kwargs: Any) -> Any:
        return rank.run_backward(functools.partial(engine, *args, **kwargs))

    with patched([in_ranks(torch.autograd, "_engine_run_backward", run)]):
        yield


_ASSIGNMENT = re.compile(r"\s*self\.(\w+)_stream\b[^=]*=")


def _assigned_to(frame: FrameType) -> str:
    """ "all_gather" where the line is `self.all_gather_stream = ...Stream(`, or ""."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = _ASSIGNMENT.match(line)
    return found[1] if found else ""
