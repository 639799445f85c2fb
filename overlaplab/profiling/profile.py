"""`ol.profile`: a timeline of any training step, on the devices that are there.

torch.profiler underneath, or CUDA events alone. Knows when to start and stop, ranks and
step numbers; the recorders know how.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.distributed as dist

from overlaplab import streams
from overlaplab.errors import ProfileError, check_count
from overlaplab.files import write_whole
from overlaplab.profiling.event_recorder import EventRecorder, recorder_of_this_device
from overlaplab.profiling.sessions import KinetoRecorder, Recording, profiler_is_running
from overlaplab.profiling.trace.ranks import timeline_of_ranks
from overlaplab.timeline import Source, Span, Timeline

_State = Literal["new", "warming up", "recording", "done", "left"]

_opening = threading.Lock()


class Profile:
    """Measure what the `with` block does on this rank: a timeline of real devices.

    In a plain script, in a rank of `ol.run` on gloo or nccl, and under torchrun.
    torch.profiler records each operator and kernel, which costs the CPU microseconds
    per operator: where a step is launch-bound the profiled one is longer.

    `events=True` records only CUDA events at step ends, `ol.annotate` ranges, launches
    of collectives and waits. It has no kernels, and a stream that idles because the CPU
    is late counts as computing; `timeline.source.remarks` says so where it was seen.
    It makes nothing wait, and is cheap where the GPU bounds the step: on two H200s
    (torch 2.11, batch 8, `python -m overlaplab.bench traces`) such steps took 0 to
    0.6 % longer, with torch.profiler 3 to 8 %. It costs the CPU some 0.1 ms per
    collective there, so where launches bind and collectives are many it disturbs as
    much. On a CPU process it reads the wall clock at the same places.

    After the block there are `timeline`, `gather()` and `save(path)`. Without `step()`
    the whole block is one step.

    Args:
        warmup: steps that are not recorded, ended by `step()`: the first steps set up
            communicators, allocate, and choose buckets.
        steps: record so many, then stop; None: until the block ends.
        events: CUDA events instead of torch.profiler.

    Attributes:
        step_number: the step that is going on, from 0.

    Raises:
        ProfileError: on entering: a rank of the virtual cluster, another profile or
            torch.profiler is running, NCCL's waits block the CPU (events).

    Example:
        with ol.profile(warmup=2) as profile:
            for batch in data:
                train_step(batch)
                profile.step()
        print(profile.timeline.report().exposed_ns)
    """

    _open: ClassVar[Profile | None] = None  # in this process

    def __init__(
        self, *, warmup: int = 0, steps: int | None = None, events: bool = False
    ) -> None:
        self._warmup = check_count("warmup", warmup, "steps", least=0)
        self._steps = None if steps is None else check_count("steps", steps, "steps")
        self._events = events
        self._state: _State = "new"
        self._recorder: EventRecorder | KinetoRecorder | None = None
        self._outer: Recording | None = None
        self._thread = 0
        self._rest: int | None = None  # what follows the last step() is no step
        self._timeline: Timeline | None = None
        self.step_number = 0

    def __enter__(self) -> Profile:
        if self._state != "new":
            raise ProfileError(
                "this profile has been used; call ol.profile() again for another one"
            )
        self._claim()
        try:
            self._outer = Recording.current
            if self._outer is not None and not self._events:
                self._outer.stop()
            self._recorder = self._make_recorder()
            self._recorder.prepare()
            self._state = "warming up"
            if not self._warmup:
                self._start()
        except BaseException:
            self._give_back()
            Profile._open = None
            raise
        return self

    def step(self) -> None:
        """Say that a step ends here and the next one begins. Waits for nothing.

        Raises:
            ProfileError: outside of the `with` block, or in another thread.
        """
        if self._state in ("new", "left"):
            where = "before" if self._state == "new" else "after"
            raise ProfileError(
                f"step() was called {where} the profile's `with` block; call it "
                "inside, at the end of each step"
            )
        if threading.get_ident() != self._thread:
            raise ProfileError(
                "step() was called in another thread than the one that opened the "
                "profile; call it there"
            )
        if self._state == "recording":
            self._recording().end_step()
        self.step_number += 1
        self._rest = self.step_number
        if self._state == "warming up" and self.step_number == self._warmup:
            self._start()
        elif self._state == "recording":
            if self._steps and self.step_number == self._warmup + self._steps:
                self._stop()
            else:
                self._recording().begin_step(self.step_number)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._state == "recording":
                # The block's own exception is the news, not what it broke here.
                with contextlib.suppress(*[Exception] if kind else []):
                    self._recording().end_step()
                    self._stop()
            elif self._state == "warming up" and not self._events:
                self._recording().start()  # what was prepared must be ended
                self._recording().stop()
        finally:
            if self._state != "done":
                self._give_back()
            self._state = "left"
            Profile._open = None

    @property
    def timeline(self) -> Timeline:
        """What this rank did in the recorded steps, from 0.

        `steps` has their numbers, warm-up counted; what was launched after the last
        `step()` belongs to none. `source.remarks` says what was left out.

        Raises:
            ProfileError: nothing is recorded yet, or nothing was; with the reason.
        """
        if self._timeline is None:
            spans, remarks = self._found()
            self._timeline = _timeline({_rank()[0]: spans}, remarks)
        return self._timeline

    def gather(self) -> Timeline | None:
        """All ranks' timelines as one, on rank 0; None on the others. Collective.

        Times are those of each machine's clock: exact on one machine to some
        microseconds (event mode: tens of them); between machines as far as their
        clocks agree.

        Raises:
            ProfileError: as `timeline`, on every rank if on one.
        """
        try:
            mine: Any = self._found()
        except ProfileError as error:
            mine = error
        rank, num_ranks = _rank()
        everyone: list[Any] = [mine]
        if num_ranks > 1:
            everyone = [None] * num_ranks
            dist.all_gather_object(everyone, mine)
        for other, found in enumerate(everyone):
            if isinstance(found, Exception):
                raise ProfileError(f"rank {other}: {found}")
        if rank:
            return None
        spans = {r: found for r, (found, _) in enumerate(everyone)}
        remarks = dict.fromkeys(text for _, texts in everyone for text in texts)
        return _timeline(spans, tuple(remarks))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write torch.profiler's own trace of this rank, for any tool that reads it.

        Args:
            path: a file; compressed if its name ends with ".gz". A name without
                ".json" is a folder, which gets "rank_R.json.gz": give all ranks the
                same.

        Returns:
            The file.

        Raises:
            ProfileError: nothing is recorded, or events were.
        """
        self._check_recorded()
        recorder = self._recording()
        if not isinstance(recorder, KinetoRecorder):
            raise ProfileError(
                "events=True leaves no trace of torch.profiler; write the timeline "
                "with profile.timeline.to_chrome(path)"
            )
        file = Path(path)
        if ".json" not in file.name:
            file = file / f"rank_{_rank()[0]}.json.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        trace, zipped = recorder.trace, file.name.endswith(".gz")
        write_whole(file, gzip.compress(trace, 6) if zipped else trace)
        return file

    # Opening and closing.

    def _claim(self) -> None:
        if streams.thread_provider() is not None:
            raise ProfileError(
                "this is a rank of the virtual cluster, which records everything: read "
                "run.timeline after the run. ol.profile measures real devices: use "
                "cluster='gloo' or 'nccl', or a plain script."
            )
        with _opening:
            if Profile._open is not None:
                raise ProfileError(
                    "another ol.profile() is open in this process; profiles do not "
                    "nest. Use ol.annotate('...') to mark a part of one."
                )
            Profile._open = self
        self._thread = threading.get_ident()

    def _make_recorder(self) -> EventRecorder | KinetoRecorder:
        if self._events:
            return recorder_of_this_device()
        if profiler_is_running():
            raise ProfileError(
                "torch.profiler is running already, and a process has one at a time. "
                "End it before ol.profile(); or keep yours, export its trace and read "
                "that with ol.read_trace(path)."
            )
        return KinetoRecorder(cuda=streams.device().type == "cuda")

    def _start(self) -> None:
        self._recording().start()
        self._state = "recording"
        self._recording().begin_step(self.step_number)

    def _stop(self) -> None:
        self._state = "done"
        try:
            self._recording().stop()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """Let the recording of the whole run go on, with what was recorded here."""
        outer, self._outer = self._outer, None
        if outer is None or self._events:
            return
        if isinstance(self._recorder, KinetoRecorder) and self._recorder.trace:
            outer.include(self._recorder.trace)
        outer.start()

    # What was found.

    def _recording(self) -> EventRecorder | KinetoRecorder:
        assert self._recorder is not None
        return self._recorder

    def _check_recorded(self) -> None:
        if self._state in ("new", "warming up", "recording"):
            raise ProfileError(
                "the profile is still open: read it after its `with` block has ended"
                if self._state != "new"
                else "nothing is recorded: use `with ol.profile() as profile:`"
            )
        if self.step_number < self._warmup:
            raise ProfileError(
                f"nothing was recorded: the block ended after {self.step_number} "
                f"step() calls, and the first {self._warmup} steps are warm-up. Run "
                "more steps, or lower warmup."
            )

    def _found(self) -> tuple[list[Span], tuple[str, ...]]:
        self._check_recorded()
        recorder = self._recording()
        spans = recorder.spans(_rank()[0])
        if self._rest is not None:
            spans = [_without_step(span, self._rest) for span in spans]
        return spans, recorder.remarks()


profile = Profile


def _rank() -> tuple[int, int]:
    """This rank and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _timeline(spans: Mapping[int, list[Span]], remarks: tuple[str, ...]) -> Timeline:
    origin = "trace"
    if dist.is_available() and dist.is_initialized():
        origin = str(dist.get_backend())
        origin = "nccl" if "nccl" in origin else origin
    timeline = timeline_of_ranks(spans, origin=origin, num_ranks=_rank()[1])
    first_ns = min((s.start_ns for of in spans.values() for s in of), default=0)
    return replace(timeline, source=Source(remarks=remarks, zero_ns=first_ns))


def _without_step(span: Span, step: int) -> Span:
    if span.attributes.get("step") != step:
        return span
    attributes = {k: v for k, v in span.attributes.items() if k != "step"}
    return replace(span, attributes=attributes)
