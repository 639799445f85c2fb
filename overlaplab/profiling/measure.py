"""torch.profiler sessions: start, stop, keep the trace.

A process has one torch.profiler at a time. Where a whole run is recorded (`recording`)
and a part of it is profiled (`ol.profile`), the recording makes way: it ends and begins
again after the part, whose spans are its own too. Knows no ranks and no steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.errors import ProfileError
from overlaplab.profiling.events import RUN_RANGE
from overlaplab.profiling.kineto import spans_from_trace
from overlaplab.timeline import Span

_autograd: Any = torch.autograd
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class Session:
    """One start and stop of torch.profiler in this process.

    Its range `RUN_RANGE` covers the user's part, so that a reader leaves out the rest.

    Args:
        cuda: record kernels too.
        shapes: record the operators' shapes: gloo's messages get their bytes.
    """

    def __init__(self, *, cuda: bool, shapes: bool = False) -> None:
        self._cuda = cuda
        # torch.profiler.profile is a shell around this one, and imports the compiler
        # (seconds) when it starts. Without use_kineto it would time with CUDA events.
        self._profiler: Any = torch.autograd.profiler.profile(
            use_device="cuda" if cuda else None, use_kineto=True, record_shapes=shapes
        )
        self._range: Any = None
        self._prepared = False

    def prepare(self) -> None:
        """Set CUPTI up (a second, once a process); nothing is recorded yet."""
        with _quiet():
            self._profiler._prepare_trace()
        self._prepared = True

    def start(self, align: Callable[[], None] | None = None) -> None:
        """Record from here on; `align` is called first, while the profiler runs."""
        if not self._prepared:
            self.prepare()
        with _quiet():
            self._profiler._start_trace()
        _autograd._add_metadata_json("distributedInfo", json.dumps(_world()))
        if align is not None:
            align()
        self._range = torch.profiler.record_function(RUN_RANGE)
        self._range.__enter__()

    def stop(self) -> bytes:
        """Wait for the device and end.

        Returns:
            The trace, as torch.profiler exports it.

        Raises:
            ProfileError: another profiler ran meanwhile, which ended this session.
        """
        alive = profiler_is_running()
        try:
            if self._cuda:
                torch.cuda.synchronize()
        finally:
            self._range.__exit__(None, None, None)
            if alive:
                self._profiler.__exit__(None, None, None)
        if not alive:
            raise ProfileError(
                "another torch.profiler was started inside the profiled block, and "
                "ended it: torch has one at a time. Profile one thing at a time."
            )
        return self._export()

    def _export(self) -> bytes:
        # The JSON is the profiler's documented output; its event objects are not.
        descriptor, path = tempfile.mkstemp(suffix=".json")
        try:
            os.close(descriptor)
            self._profiler.export_chrome_trace(path)
            with open(path, "rb") as file:
                return file.read()
        finally:
            os.unlink(path)


class Recording:
    """What happened in the `with` block of `recording`, once that has ended."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._session: Session | None = None
        self._traces: list[bytes] = []
        self._ended = False

    def spans(self, rank: int) -> list[Span]:
        """The spans of this process as `rank`'s, on the clock of the machine.

        Raises:
            RuntimeError: the `with` block has not ended, or ended by an exception.
        """
        if not self._ended:
            raise RuntimeError("nothing is recorded before the `with` block has ended")
        parts = (spans_from_trace(trace, rank) for trace in self._traces)
        return [span for part in parts for span in part]

    def start(self, align: Callable[[], None] | None = None) -> None:
        """Begin, or go on."""
        self._session = Session(cuda=self._cuda)
        self._session.start(align)

    def stop(self) -> None:
        """End, or make way for another session."""
        session, self._session = self._session, None
        if session is not None:
            self._traces.append(session.stop())

    def include(self, trace: bytes) -> None:
        """What another session recorded while this one made way is its own too."""
        self._traces.append(trace)


_current: Recording | None = None


def current_recording() -> Recording | None:
    """The one that is open in this process."""
    return _current


@contextlib.contextmanager
def recording(
    *, cuda: bool, align: Callable[[], None] | None = None
) -> Iterator[Recording]:
    """Profile what the `with` block launches, in every thread and on its GPU.

    Args:
        cuda: record kernels too; the block then ends with a device synchronisation.
            It costs microseconds an operator, so a run that is timed for a benchmark
            should do without.
        align: called when the profiler runs, before the recording begins: the ranks
            meet here, so that they start together.
    """
    global _current
    result = Recording(cuda)
    result.start(align)
    _current = result
    try:
        yield result
    except BaseException:
        with contextlib.suppress(Exception):  # the block's own error is the news
            result.stop()
        raise
    finally:
        _current = None
    result.stop()
    result._ended = True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Kineto takes its log level when a process first uses it.

    From torch 2.13 on it writes two lines at every start, whatever the level, but for
    this one. Where the process has used it before, nothing can be done from here.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def profiler_is_running() -> bool:
    """Whether a torch.profiler records this thread."""
    return bool(_autograd._profiler_enabled())


def _world() -> dict[str, Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return {"rank": 0, "world_size": 1}
    return {
        "backend": str(dist.get_backend()),
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
    }
