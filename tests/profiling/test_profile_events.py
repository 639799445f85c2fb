"""The event mode holds up nothing (B09), keeps what it must, and leaves no hook."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup, Work

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual.group import VirtualGroup
from overlaplab.cluster.virtual.work import VirtualWork
from overlaplab.profiling.event_clock import Clock
from overlaplab.profiling.event_recorder import EventRecorder


class VirtualClock:
    """Events and side streams of the virtual cluster, as `CudaClock` uses CUDA's."""

    def __init__(self, aside: bool) -> None:
        self._side = streams.Stream() if aside else streams.current_stream()

    def stream_key(self) -> Any:
        return streams.current_stream()

    def is_silent(self) -> bool:
        return False

    def mark(self, key: Any = None) -> Any:
        event = streams.Event(enable_timing=True)
        event.record(key)
        return event

    def is_drained(self) -> bool:
        return False

    def mark_end(self, work: Any, communicator: str) -> Any:
        with streams.stream(self._side):
            type(work).wait.__wrapped__(work)
            return self.mark()

    def open_step(self, mark: Any) -> None: ...
    def finish(self) -> None:
        streams.synchronize()


def step(events: bool, aside: bool = True) -> None:
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    reducer = ol.BucketedReducer(model, bucket_mib=64)
    recorder = EventRecorder(
        VirtualClock(aside), group_class=VirtualGroup, work_class=VirtualWork
    )
    if events:
        recorder.start()
        recorder.begin_step(0)
    model(torch.rand(4096, 4096)).square().mean().backward()
    reducer.wait()
    if events:
        recorder.end_step()
        recorder.stop()
        assert len(recorder._messages) == len(reducer.plan)
    else:
        streams.synchronize()


def test_with_events_on_no_launch_waits_and_every_kernel_starts_when_it_did():
    without, with_events = (
        ol.run(step, events, fake=True, check=False).timeline
        for events in (False, True)
    )

    assert with_events.order() == without.order()
    # The only wait of the CPU is the one at the end; there is one to be seen.
    waits = [s for s in with_events.spans if s.kind == "host"]
    launches = [s for s in with_events.spans if s.kind == "launch"]
    assert len(waits) == 1
    assert waits[0].start_ns >= max(s.end_ns for s in launches)


def test_without_a_side_stream_events_would_hold_up_the_backward():
    aside, on_the_stream = (
        ol.run(step, True, aside, fake=True, check=False).timeline
        for aside in (True, False)
    )

    assert on_the_stream.step_ns > aside.step_ns


class FakeClock(Clock):
    """Writes down what it is asked, in the order of a real clock."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self, key: Any = None) -> Any:
        self.log.append("mark")
        return [len(self.log)]

    def mark_end(self, work: Any, communicator: str) -> Any:
        self.log.append(f"end of {communicator}")
        return [len(self.log)]

    def finish(self) -> None:
        self.log.append("finish")


class FakeWork:
    def wait(self) -> None: ...


class FakeGroup:
    """A group that launches nothing; hashable, as a ProcessGroup is."""

    group_desc = "tp"
    group_name = "1"

    def allreduce(self, tensors: Any, options: Any = None) -> FakeWork:
        return FakeWork()

    def barrier(self) -> FakeWork:
        return FakeWork()

    def _start_coalescing(self, device: Any) -> None: ...

    def _end_coalescing(self, device: Any) -> FakeWork:
        return FakeWork()


def recorded(monkeypatch: Any, use: Any) -> tuple[EventRecorder, FakeClock]:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    clock = FakeClock()
    recorder = EventRecorder(clock, group_class=FakeGroup, work_class=FakeWork)
    recorder.start()
    recorder.begin_step(0)
    use(FakeGroup())
    recorder.end_step()
    recorder.stop()
    return recorder, clock


def test_the_marks_of_a_launch_and_a_wait_and_one_finish(monkeypatch):
    def use(group: FakeGroup) -> None:
        work = group.allreduce([torch.ones(3)])
        work.wait()

    recorder, clock = recorded(monkeypatch, use)

    assert clock.log == [
        "mark",  # the step begins
        "mark",  # the inputs are ready
        "end of comm:tp",
        "mark",  # the stream comes to the wait
        "mark",  # and goes on
        "mark",  # the step ends
        "finish",
    ]
    assert [(s.lane, s.name, s.start_ns, s.end_ns) for s in recorder.spans(0)] == [
        ("default", "step", 1, 4),
        ("default", "step", 5, 6),
        ("comm:tp", "all_reduce", 2, 3),
    ]


def test_a_launch_that_finds_its_stream_empty_is_said(monkeypatch):
    monkeypatch.setattr(FakeClock, "is_drained", lambda clock: len(clock.log) < 3)

    def use(group: FakeGroup) -> None:
        group.allreduce([torch.ones(3)])
        group.allreduce([torch.ones(3)])

    recorder, _ = recorded(monkeypatch, use)

    assert recorder.remarks()[0].startswith("The CPU was late: 1 of 2 collectives")


def test_a_barrier_is_no_message(monkeypatch):
    recorder, clock = recorded(monkeypatch, lambda group: group.barrier())

    assert clock.log == ["mark", "mark", "finish"]
    assert [s.kind for s in recorder.spans(0)] == ["compute"]


def test_coalesced_launches_are_one_message_of_all_their_bytes(monkeypatch):
    def use(group: FakeGroup) -> None:
        group._start_coalescing(None)
        group.allreduce([torch.ones(3)])
        group.allreduce([torch.ones(5), torch.ones(1)])
        group._end_coalescing(None)

    recorder, _ = recorded(monkeypatch, use)

    (sent,) = [s for s in recorder.spans(0) if s.kind == "communication"]
    assert (sent.name, sent.bytes) == ("all_reduce", 4 * (3 + 5 + 1))


def test_inputs_are_kept_until_the_user_waits_and_no_longer(monkeypatch):
    found = []

    def use(group: FakeGroup) -> None:
        tensor = torch.ones(3)
        alive = weakref.ref(tensor)
        work = group.allreduce([tensor])
        del tensor
        found.append(alive() is not None)
        work.wait()
        found.append(alive() is not None)

    recorded(monkeypatch, use)

    assert found == [True, False]


def test_a_synchronous_collective_holds_up_its_stream(monkeypatch):
    options = dist.AllreduceOptions()
    options.asyncOp = False

    recorder, _ = recorded(
        monkeypatch, lambda group: group.allreduce([torch.ones(3)], options)
    )

    assert [(s.kind, s.start_ns, s.end_ns) for s in recorder.spans(0)] == [
        ("compute", 1, 2),
        ("compute", 3, 4),
        ("communication", 2, 3),
    ]


def test_a_range_in_a_backward_pass_labels_and_marks_nothing(monkeypatch):
    x = torch.ones(2, requires_grad=True)

    def in_backward(gradient: torch.Tensor) -> None:
        with ol.annotate("bucket 7"):
            group[0].allreduce([gradient])

    group: list[FakeGroup] = []

    def use(fake: FakeGroup) -> None:
        group.append(fake)
        x.register_hook(in_backward)
        x.sum().backward()

    recorder, clock = recorded(monkeypatch, use)

    assert clock.log == ["mark", "mark", "end of comm:tp", "mark", "finish"]
    (sent,) = [s for s in recorder.spans(0) if s.kind == "communication"]
    assert sent.attributes["label"] == "bucket 7"


def test_no_hook_is_left_behind():
    before = [dict(vars(owner)) for owner in (ProcessGroup, Work)]

    with ol.profile(events=True):
        assert vars(ProcessGroup)["allreduce"] is not before[0]["allreduce"]
    with ol.profile():
        pass

    assert [dict(vars(owner)) for owner in (ProcessGroup, Work)] == before
    assert not streams.ranges_are_wanted()
