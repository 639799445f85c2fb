"""One run on the virtual cluster, from the caller's thread and back."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.copying import copy_job
from overlaplab.cluster.membership import environment_of
from overlaplab.cluster.settings import (
    kept_settings,
    process_state,
    set_process_state,
)
from overlaplab.cluster.virtual import report, world
from overlaplab.cluster.virtual.compiling import compiling_ranks
from overlaplab.cluster.virtual.interrupts import Interrupts, deferred_interrupts
from overlaplab.cluster.virtual.loading import loading_batches
from overlaplab.cluster.virtual.meeting import Meetings
from overlaplab.cluster.virtual.modes import RecordMode, unseen_shapes
from overlaplab.cluster.virtual.naming import naming_parameters
from overlaplab.cluster.virtual.optimizers import stepping_lists
from overlaplab.cluster.virtual.patching import patched
from overlaplab.cluster.virtual.placement import host_syncs, placing_calls
from overlaplab.cluster.virtual.printing import printing_text
from overlaplab.cluster.virtual.rank_thread import RankThread
from overlaplab.cluster.virtual.ranks import Turns
from overlaplab.cluster.virtual.recorder import Recorder, current_recorder
from overlaplab.cluster.virtual.resizing import resizing_storages
from overlaplab.cluster.virtual.streams import VirtualProvider, backward_streams
from overlaplab.cluster.virtual.threads import end_threads, quiet_pools, rank_threads
from overlaplab.cluster.virtual.work import serving_cpp
from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.operators.fused import launching_as_cuda
from overlaplab.program.garbage import no_collections
from overlaplab.program.record import Program
from overlaplab.streams import install_thread_provider
from overlaplab.torch_versions import (
    fake_mode,
    mode_flags,
    set_mode_flags,
    swap_of_fakes,
)

_running = threading.Lock()


def run_virtual(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int = 2,
    timeout_s: float = 60,
    fake: int = False,
) -> tuple[tuple[Any, ...], Program]:
    """What each recorded rank returned, and the record; see `overlaplab.cluster.run`.

    Ranks are threads of this process and one runs at a time. What is copied for each
    rank and what is shared: copying.py. With `fake`, so many ranks stand for all
    (report.py).
    """
    if current_recorder() is not None:
        raise RuntimeError(
            "ol.run was called inside a rank of another run; call it from outside"
        )
    with deferred_interrupts() as interrupts:
        if not _running.acquire(blocking=False):
            raise RuntimeError(
                "another run on the virtual cluster is in progress in this process; "
                "wait until it has ended"
            )
        try:
            with _frozen_process(), kept_settings():
                _warm_up()
                run = _Run(fn, tuple(args), dict(kwargs or {}), world_size, fake)
                return run.run(timeout_s, interrupts)
        finally:
            _running.release()


class _Run:
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world_size: int,
        fake: int,
    ) -> None:
        self.world_size = world_size
        self.fake = bool(fake)
        num_recorded = int(fake) or world_size
        # A rank in C++ cannot be stopped; it goes on beside the caller.
        self.abandoned = False
        self.mode_flags = mode_flags()
        self.meetings = Meetings(int(fake) or None)
        self.store = torch._C._distributed_c10d.HashStore()
        self.fake_modes = [fake_mode() if fake else None for _ in range(num_recorded)]
        self.jobs = [
            copy_job(fn, args, kwargs, fake_mode=mode) for mode in self.fake_modes
        ]
        self.ranks = [
            RankThread(rank, self._main_of(rank)) for rank in range(num_recorded)
        ]
        self.turns = Turns(self.ranks, self._explain, is_fake=self.fake)
        self.recorders = [Recorder(r.rank, self.turns, r) for r in self.ranks]

    def run(
        self, timeout_s: float, interrupts: Interrupts
    ) -> tuple[tuple[Any, ...], Program]:
        in_time = True
        calls = (
            placing_calls(),
            host_syncs(),
            resizing_storages(),
            loading_batches(),
            unseen_shapes(),
            naming_parameters(),
            serving_cpp(),
            backward_streams(),
            launching_as_cuda(lambda: current_recorder() is not None),
            stepping_lists(),
            rank_threads(self._settings_of_thread),
            printing_text(),
        )
        with world.worlds_of_threads(), contextlib.ExitStack() as stack:
            for patching in calls:
                stack.enter_context(patching)
            self.set_limits = stack.enter_context(compiling_ranks(len(self.ranks)))
            if self.fake:
                swap = (torch.utils, "swap_tensors", swap_of_fakes())
                stack.enter_context(patched([swap]))
                stack.enter_context(world.objects_have_values())
            try:
                in_time = self.turns.run(timeout_s, interrupts)
                if not in_time:
                    raise report.timed_out(self.turns, timeout_s)
            finally:
                with quiet_pools():
                    self.abandoned = bool(self.turns.stop())
                self.jobs.clear()  # the copies; what returns is in the results
        if self.turns.first_error is not None:
            number, error = self.turns.first_error
            if self.fake:
                error = report.explained(error)
            if isinstance(error, (DeadlockError, MismatchError)):
                raise error
            raise report.failure(number, error) from error
        for recorder in self.recorders:
            for unseen in recorder.unseen:  # nobody waited, and they ended
                if unseen.meeting.error is None:
                    unseen.meeting.give(recorder.rank)
            recorder.storages.close()
        report.refuse_other_roles(self.meetings)
        return tuple(rank.result for rank in self.ranks), self._program()

    def _main_of(self, rank: int) -> Callable[[], Any]:
        def main() -> Any:
            recorder = self.recorders[rank]
            fn, args, kwargs = self.jobs[rank]
            previous = install_thread_provider(VirtualProvider(recorder))
            torch.set_num_threads(1)
            try:
                with torch.autograd.set_multithreading_enabled(False):
                    os.environ |= environment_of(rank, self.world_size)
                    world.join(recorder, self.meetings, self.world_size, self.store)
                    with (
                        self._settings_of_thread(),
                        RecordMode(recorder, fake=self.fake),
                    ):
                        result = fn(*args, **kwargs)
                        end_threads(recorder)
                    for lane in list(recorder.lanes.values()):
                        recorder.settle(lane)
                    return result
            finally:
                world.leave(late=self.abandoned)
                if self.abandoned:
                    set_mode_flags(self.mode_flags)
                install_thread_provider(previous)

        return main

    def _settings_of_thread(self) -> AbstractContextManager[Any]:
        """What holds in each thread of a rank and is not the process's."""
        self.set_limits()
        rank = current_recorder()
        assert rank is not None
        return self.fake_modes[rank.rank] or contextlib.nullcontext()

    def _explain(self) -> DeadlockError:
        return report.deadlock(self.turns.threads, self._program())

    def _program(self) -> Program:
        """What has been recorded until now."""
        return Program(
            ranks=tuple(tuple(r.ops) for r in self.recorders),
            world_size=self.world_size,
            represents=self.world_size // len(self.ranks),
            waits=tuple(w for r in self.recorders for w in r.waits),
            storages=tuple(s for r in self.recorders for s in r.storages.lives()),
            names=tuple(n for r in self.recorders for n in r.storages.names()),
        )


@functools.cache
def _warm_up() -> None:
    """torch imports half of itself at the first operator under a mode (seconds).

    Done before the first run, not in it: the deadline is the user's, and the imports
    keep frames alive, which would make the first record's frees differ.
    """

    def backward() -> None:
        weight = torch.ones(2, 2, requires_grad=True)
        weight.mm(weight).sum().backward()  # type: ignore[no-untyped-call]
        dist.all_reduce(weight.grad)
        str(weight)

    fake_mode()  # in this thread, see there: ranks may trace
    with deferred_interrupts() as interrupts:
        _Run(backward, (), {}, 1, False).run(60.0, interrupts)


@contextlib.contextmanager
def _frozen_process() -> Iterator[None]:
    """No garbage collection (frees are recorded), and the caller's process state.

    torch keeps "is any mode on" in globals that a mode saves and restores as if there
    were one thread.
    """
    state, flags = process_state(), mode_flags()
    try:
        with no_collections():
            yield
    finally:
        set_process_state(state)
        set_mode_flags(flags)
