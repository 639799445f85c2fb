"""The event mode of a profile: marks at step ends, ranges, launches and waits.

Nothing here makes the CPU wait between the first launch and the end of the recording
(B09), and nothing makes a stream of the user wait. Where the work is done: `marks` has
the arithmetic, `event_clock` the device, `collectives` the hooks.

[Note: inputs that a wait lets go]
NCCL keeps a collective's inputs alive until somebody waits for its work. Our side
stream does so at once. So the recorder keeps them instead, until the user's own wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from overlaplab import streams
from overlaplab.profiling import collectives
from overlaplab.profiling.collectives import Call, Watcher, num_bytes, tensors_in
from overlaplab.profiling.event_clock import Clock, CudaClock, Mark
from overlaplab.profiling.marks import Hold, Message, Stretch, spans_of
from overlaplab.timeline import Span

_REMARKS = (
    "Measured by events: a stream counts as computing between its marks unless it "
    "waits for another one; where it idles because the CPU is late, is not seen.",
    "A collective starts at the earliest moment at which it can have started, so its "
    "time is an upper bound.",
)


@dataclass(slots=True)
class _Stretch:
    key: Hashable
    label: str
    start: Mark
    step: int | None
    end: Mark = None


@dataclass(slots=True)
class _Flight:
    """A message whose times are marks as yet."""

    message: Message
    key: Hashable
    ready: Mark
    end: Mark
    waited: Mark = None
    on_current_stream: bool = False


@dataclass(slots=True)
class _Coalescing:
    """What was launched since `_start_coalescing` of one group."""

    ready: Mark
    operations: list[str]
    arguments: list[Any]


class _Here(threading.local):
    """Of the calling thread: ranges that it is in, and those that are timed."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.open: list[_Stretch] = []


class EventRecorder(Watcher):
    """Records from `start` to `stop`, with the `clock` of the device; see the module.

    `hooks` are the classes to watch, as in `watching`.
    """

    def __init__(self, clock: Clock, **hooks: Any) -> None:
        self._clock = clock
        self._hooks = hooks
        self._here = _Here()
        self._stretches: list[_Stretch] = []
        self._holds: list[tuple[Hashable, Mark, Mark]] = []
        self._messages: list[_Flight] = []
        self._coalescing: dict[Any, _Coalescing] = {}
        # See [Note: inputs that a wait lets go]
        self._alive: dict[int, tuple[Any, _Flight, Any]] = {}
        self._step: _Stretch | None = None
        self._number: int | None = None
        self._seen: Counter[Any] = Counter()
        self._before: dict[Any, int] = {}
        self._unseen: list[tuple[str, int]] = []
        self._lanes: dict[Any, str] = {}  # to describe a group costs microseconds
        self._num_launches = 0
        self._num_late = 0
        self._stack = contextlib.ExitStack()
        self._main_key: Hashable = None

    def prepare(self) -> None: ...

    def start(self) -> None:
        self._main_key = self._clock.stream_key()
        self._before = collectives.sequence_numbers()
        self._stack.enter_context(collectives.watching(self, **self._hooks))
        self._stack.enter_context(streams.listening_to_ranges(self._annotate))
        if isinstance(self._clock, CudaClock):
            self._stack.enter_context(_hearing_stream_waits(self._wait_on_stream))

    def begin_step(self, number: int) -> None:
        mark = self._clock.mark()
        self._clock.open_step(mark)
        self._number = number
        self._step = _Stretch(self._clock.stream_key(), "", mark, number)

    def end_step(self) -> None:
        step, self._step = self._step, None
        self._number = None
        if step is not None:
            step.end = self._clock.mark(step.key)
            self._stretches.append(step)

    def stop(self) -> None:
        self._stack.close()
        for stretch in self._here.open:  # ranges that go on after the recording
            self._close(stretch)
        after = collectives.sequence_numbers()
        for group, number in after.items():
            launched = number - self._before.get(group, 0)
            if launched > self._seen[group]:
                name, _ = collectives.describe_group(group)
                self._unseen.append((name, launched - self._seen[group]))
        self._clock.finish()
        self._alive.clear()

    # What the hooks call, in whatever thread.

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        together = self._coalescing.get(group)
        if together is not None:
            together.operations.append(operation)
            together.arguments.append(arguments)
            return call()
        self._seen[group] += 1
        if operation == "barrier" or self._clock.is_silent():
            return call()  # a barrier sends nothing, and its wait would block the CPU
        self._num_launches += 1
        self._num_late += self._clock.is_drained()
        ready = self._clock.mark()
        work = call()
        self._launched(group, operation, (arguments,), ready, work)
        return work

    def start_coalescing(self, call: Call, group: Any) -> Any:
        if not self._clock.is_silent():
            self._coalescing[group] = _Coalescing(self._clock.mark(), [], [])
        return call()

    def end_coalescing(self, call: Call, group: Any) -> Any:
        together = self._coalescing.pop(group, None)
        work = call()
        if together is not None and together.operations:
            self._seen[group] += 1
            names = sorted(set(together.operations))
            operation = "send_recv" if names == ["recv", "send"] else names[0]
            self._launched(
                group, operation, tuple(together.arguments), together.ready, work
            )
        return work

    def wait(self, call: Call, work: Any) -> Any:
        _, flight, _ = self._alive.pop(id(work), (None, None, None))
        if self._clock.is_silent():
            return call()
        key = self._clock.stream_key()
        begin = self._clock.mark()
        answer = call()
        end = self._clock.mark()
        self._holds.append((key, begin, end))
        if flight is not None:
            flight.waited = end
        return answer

    def _wait_on_stream(self, call: Call, key: Hashable) -> Any:
        """One stream waits for another: a hold, if the first is known to compute."""
        if self._clock.is_silent() or not any(key == s.key for s in self._open()):
            return call()
        begin = self._clock.mark(key)
        answer = call()
        self._holds.append((key, begin, self._clock.mark(key)))
        return answer

    def _launched(
        self,
        group: Any,
        operation: str,
        arguments: tuple[tuple[Any, ...], ...],
        ready: Mark,
        work: Any,
    ) -> None:
        if work is None:
            return
        lane = self._lanes.get(group)
        if lane is None:
            name, _ = collectives.describe_group(group)
            lane = "comm" if name == "default" else f"comm:{name}"
            self._lanes[group] = lane
        size = sum(max(map(num_bytes, of_one), default=0) for of_one in arguments)
        label = self._here.labels[-1] if self._here.labels else ""
        flight = _Flight(
            Message(lane, operation, 0, 0, size, label, self._number),
            self._clock.stream_key(),
            ready,
            self._clock.mark_end(work, lane),
            on_current_stream=any(map(_is_synchronous, arguments)),
        )
        self._messages.append(flight)
        held = () if flight.on_current_stream else arguments
        inputs = [t for of_one in held for a in of_one for t in tensors_in(a)]
        self._alive[id(work)] = (work, flight, inputs)

    @contextlib.contextmanager
    def _annotate(self, name: str) -> Iterator[None]:
        """A range labels what is launched in it. Outside of a backward it is timed."""
        self._here.labels.append(name)
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or self._clock.is_silent():
            stretch = None
        else:
            key, start = self._clock.stream_key(), self._clock.mark()
            stretch = _Stretch(key, name, start, self._number)
            self._here.open = [*self._here.open, stretch]
        try:
            yield
        finally:
            self._here.labels.pop()
            if stretch is not None and stretch.end is None:
                self._close(stretch)

    def _close(self, stretch: _Stretch) -> None:
        self._here.open = [s for s in self._here.open if s is not stretch]
        stretch.end = self._clock.mark(stretch.key)
        self._stretches.append(stretch)

    def _open(self) -> list[_Stretch]:
        return [*self._here.open, *([self._step] if self._step else [])]

    # After the end.

    def spans(self, rank: int) -> list[Span]:
        """Nanoseconds of `time.time_ns`, exact to tens of microseconds between ranks,
        and to one within a rank."""
        at_ns, main = self._clock.at_ns, self._main_key

        def at(mark: Mark) -> int:
            found = at_ns(mark)
            assert found is not None
            return found

        def lane(key: Hashable) -> str:
            if key == main:
                return "default"
            return f"stream {key[0] if isinstance(key, tuple) else key}"

        stretches = [
            Stretch(
                lane(s.key), s.label, at(s.start), max(at(s.start), at(s.end)), s.step
            )
            for s in self._stretches
        ]
        last_ns = max((s.end_ns for s in stretches), default=0)
        holds = [Hold(lane(key), at(a), at(b)) for key, a, b in self._holds]
        messages = []
        for flight in self._messages:
            end_ns = at_ns(flight.end)
            if end_ns is None:
                end_ns = at(flight.waited) if flight.waited else last_ns
            ready_ns = at(flight.ready)
            messages.append(replace(flight.message, ready_ns=ready_ns, end_ns=end_ns))
            if flight.on_current_stream:
                holds.append(Hold(lane(flight.key), ready_ns, end_ns))
        return spans_of(rank, stretches, holds, messages)

    def remarks(self) -> tuple[str, ...]:
        found = [
            f"{number} collectives of process group {name!r} were launched by C++, as "
            "DistributedDataParallel and functional collectives do, and are not seen "
            "by events, so no number here is about them; ol.profile() without events "
            "sees them."
            for name, number in self._unseen
        ]
        if self._num_late:
            found.append(
                f"The CPU was late: {self._num_late} of {self._num_launches} "
                "collectives were launched when their stream had nothing left to do. "
                "That idle time counts as computing, so what is called hidden may be "
                "exposed; ol.profile() without events sees the gaps."
            )
        return (*found, *_REMARKS)


def recorder_of_this_device() -> EventRecorder:
    on_cuda = streams.device().type == "cuda"
    return EventRecorder(CudaClock() if on_cuda else Clock())


def _is_synchronous(arguments: tuple[Any, ...]) -> bool:
    """NCCL then runs it on the current stream, which it holds up."""
    return any(getattr(a, "asyncOp", True) is False for a in arguments)


@contextlib.contextmanager
def _hearing_stream_waits(listener: Any) -> Iterator[None]:
    """While open, `wait_stream`, `wait_event` and `Event.wait` go by `listener`."""
    event_class: Any = torch.cuda.Event
    original = event_class.wait

    def wait(self: Any, stream: Any = None) -> Any:
        waiting = torch.cuda.current_stream() if stream is None else stream
        key = (waiting.stream_id, waiting.device_index, waiting.device_type)
        return listener(lambda: original(self, stream), key)

    event_class.wait = wait
    try:
        yield
    finally:
        event_class.wait = original
