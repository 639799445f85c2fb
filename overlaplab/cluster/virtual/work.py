"""What a launch returns: torch's `Work`, as NCCL's behaves.

`wait` makes the stream that is current at the call wait; the CPU goes on.

[Note: works in C++] C++ drops the Python part of an object and keeps torch's bare one.
- A future ends when somebody waits for it, and waiting hands on the turn. A bare one's
  wait would stand still with the turn (`collect_all`; DDP's hooks on a rank that has
  left `join`). So a rank keeps its futures until they end, and the wait of a bare one
  ends them in order, until that one has.
- DDP's reducer waits for the work by which a rank says that it has not left `join`. So
  the rank keeps it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from overlaplab.cluster.virtual.lanes import Frontier
from overlaplab.cluster.virtual.meeting import Meeting
from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.program.record import WorkWait
from overlaplab.timeline.span import CPU_LANE
from overlaplab.torch_versions import BaseWork


class VirtualWork(BaseWork):  # type: ignore[misc]
    """A launched collective.

    `wait` makes the stream that is current at the call wait; waiting twice is waiting
    once. The tensors hold their results for whatever is launched on that stream next.
    """

    def __init__(
        self,
        recorder: Recorder,
        meeting: Meeting,
        op: int,
        outputs: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor] = (),
    ) -> None:
        """The `outputs` are kept for `result`, as long as the work; what is `held` is
        kept alive until the first `wait`, as NCCL's process group does: from then on,
        only the waiting stream is behind the collective."""
        super().__init__()
        self._held = held
        self._waited = False
        self._recorder = recorder
        self._meeting = meeting
        self._op = op
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        recorder = self._recorder
        recorder.turns.check()
        lane = recorder.current()
        self._note(lane.name)
        lane.wait(self._frontier())
        self._held = ()
        self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether it can have ended; lets others go on.

        Once the answer is yes the CPU knows it: what it launches next comes after.
        """
        recorder = self._recorder
        if not self._meeting.complete:
            recorder.turns.yield_turn(recorder.thread, self._meeting)
        if not self._meeting.complete:
            return False
        recorder.host_wait("is_completed", self._frontier())
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the results. To ask for it is no wait: `future.wait()` is one,
        which makes the current stream wait, as NCCL's does.

        DDP and its hooks ask for it in the middle of the backward pass and wait after
        it, in C++: there it ends with the backward, before DDP's copy-out. In a
        callback at that end (static graph) there is no later. After a wait it is there,
        as C++ that takes its value expects.
        """
        in_backward = torch._C._current_autograd_node() is not None
        pending = self._recorder.futures
        future = _Future(self._finish, self.is_completed, pending, lazy=not in_backward)
        if self._waited:
            future.finish()
        elif in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(future.finish)
        elif sys._getframe(1).f_code.co_name == "_engine_run_backward":
            future.finish()
        return future

    def _finish(self) -> list[torch.Tensor]:
        self.wait()
        self._recorder.meet(self._meeting)
        return self._outputs

    def _frontier(self) -> Frontier:
        return Frontier(frozenset((self._op,)), (self._meeting,))

    def _note(self, stream: str) -> None:
        recorder = self._recorder
        recorder.waits.append(
            WorkWait(recorder.rank, self._op, stream, len(recorder.ops))
        )


class _Future(torch.futures.Future[Any]):
    """Ends when asked to, or when somebody waits for it.

    Args:
        result: called once, at the end.
        completed: whether it could end now.
        pending: the rank's that have not ended; see [Note: works in C++].
        lazy: nothing but a wait ends it, so what comes `then` is lazy too.
    """

    def __init__(
        self,
        result: Callable[[], Any],
        completed: Callable[[], bool],
        pending: list[Any],
        *,
        lazy: bool,
    ) -> None:
        super().__init__()
        pending.append(self)
        self._pending = pending
        self._result = result
        self._completed = completed
        self._lazy = lazy

    def finish(self) -> None:
        if not super().done():
            self._pending.remove(self)
            self.set_result(self._result())

    def done(self) -> bool:
        return super().done() or self._completed()

    def wait(self) -> Any:
        self.finish()
        return super().wait()

    def value(self) -> Any:
        self.finish()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        if not self._lazy:
            return super().then(callback)

        def result() -> Any:
            self.finish()
            return callback(self)

        return _Future(result, self._completed, self._pending, lazy=True)


@contextlib.contextmanager
def serving_cpp() -> Iterator[None]:
    """While open, ranks outlive what C++ does with works; see [Note: works in C++]."""
    bare: Any = torch.futures.Future.__base__
    done = bare.done

    def wait_in_turn(recorder: Recorder, wait: Any, future: Any) -> Any:
        while recorder.futures and not done(future):
            recorder.futures[0].finish()
        return wait(future)

    def keep_notice(recorder: Recorder, take: Any, *args: Any) -> None:
        recorder.noticed = args[1]
        take(*args)

    reducer: Any = torch._C._distributed_c10d.Reducer
    notice = in_ranks(reducer, "_set_forward_pass_work_handle", keep_notice)
    with patched([in_ranks(bare, "wait", wait_in_turn), notice]):
        yield


class VirtualBarrier(VirtualWork):
    """A barrier blocks the CPU, as NCCL's does."""

    def wait(self, timeout: Any = None) -> bool:
        self._note(CPU_LANE)
        self._recorder.host_wait("barrier", self._frontier())
        return True
