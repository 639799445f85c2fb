"""torch.profiler's sessions: one (`Session`), the recording of a whole run
(`recording`), and the recorder of `ol.profile` (`KinetoRecorder`).

A process has one torch.profiler at a time. Where a whole run is recorded (`recording`)
and a part of it is profiled (`ol.profile`), the recording makes way: it ends and begins
again after the part, whose spans are its own too.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from overlaplab.errors import ProfileError
from overlaplab.profiling.collectives import marking_collectives
from overlaplab.profiling.trace.file import spans_from_trace
from overlaplab.profiling.trace.names import RUN_RANGE
from overlaplab.timeline import Span
from overlaplab.timeline.span import PROFILER_STEP

_autograd: Any = torch.autograd
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
_DEVICE_KINDS = ("compute", "communication", "memcpy", "memset")
_NO_CUPTI = (
    "the GPU's activity was not recorded: CUPTI gave no events, so there is no "
    "timeline of the GPU. Another profiler (Nsight Systems, DCGM) may hold it, or the "
    "driver keeps it for administrators (NVreg_RestrictProfilingToAdminUsers; in a "
    "container CAP_SYS_ADMIN). `overlaplab doctor` says more; "
    "ol.profile(events=True) needs no CUPTI."
)
_HIP = b'"hip_runtime"'


class Session:
    """One start and stop of torch.profiler in this process, with kernels (`cuda`) and
    the operators' shapes (`shapes`), of which gloo's messages get their bytes.

    Its range `RUN_RANGE` covers the user's part, so that a reader leaves out the rest.
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
        """Wait for the device and end; returns the trace as torch.profiler exports it.

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
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profiler.export_chrome_trace(str(path))
            return path.read_bytes()


class Recording:
    """What happened in the `with` block of `recording`, once that has ended."""

    current: ClassVar[Recording | None] = None  # the one that is open in this process

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


@contextlib.contextmanager
def recording(
    *, cuda: bool, align: Callable[[], None] | None = None
) -> Iterator[Recording]:
    """Profile what the `with` block launches, in every thread and, if `cuda`, on its
    GPU: the block then ends with a device synchronisation. `align` is called before the
    recording begins: the ranks meet, to start together.

    It costs microseconds per operator, so a run that is timed for a benchmark should do
    without.
    """
    result = Recording(cuda)
    result.start(align)
    Recording.current = result
    try:
        yield result
    except BaseException:
        with contextlib.suppress(Exception):  # the block's own error is the news
            result.stop()
        raise
    finally:
        Recording.current = None
    result.stop()
    result._ended = True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Kineto takes its log level when a process first uses it: later it is too late.

    From torch 2.13 on it writes two lines at every start, at any level but this one.
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
    here = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return {"backend": str(dist.get_backend()), **here}


class KinetoRecorder(Session):
    """Records from `start` to `stop`, steps as `ProfilerStep#N` ranges."""

    def __init__(self, *, cuda: bool) -> None:
        # Shapes give gloo's messages their bytes; on CUDA NCCL's own events have them.
        super().__init__(cuda=cuda, shapes=not cuda)
        self._step: Any = None
        self._stack = contextlib.ExitStack()
        self.trace: bytes = b""
        self._remarks: list[str] = []

    def start(self, align: Callable[[], None] | None = None) -> None:
        super().start(align)
        if not self._cuda and torch.distributed.is_available():
            self._stack.enter_context(marking_collectives())

    def begin_step(self, number: int) -> None:
        self._step = torch.profiler.record_function(f"{PROFILER_STEP}{number}")
        self._step.__enter__()

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def stop(self) -> bytes:
        self._stack.close()
        self.trace = super().stop()
        return self.trace

    def spans(self, rank: int) -> list[Span]:
        """On the clock of the machine.

        Raises:
            ProfileError: the recording broke off, or has nothing of the GPU.
        """
        if not self.trace:
            raise ProfileError("the recording broke off with an error; see that one")
        # The session ends with a call of CUDA's runtime, so there is at least that.
        if self._cuda and not (b'"cuda_runtime"' in self.trace or _HIP in self.trace):
            raise ProfileError(_NO_CUPTI)
        spans = spans_from_trace(self.trace, rank)
        kept = without_earlier_launches(spans) if self._cuda else spans
        if len(kept) < len(spans):
            self._remarks = [
                f"{len(spans) - len(kept)} kernels and copies on rank {rank} were "
                "launched before the recording began and are left out."
            ]
        return kept

    def remarks(self) -> tuple[str, ...]:
        return tuple(self._remarks)


def without_earlier_launches(spans: Sequence[Span]) -> list[Span]:
    """Without what the device still had to do when the recording began.

    The profiler sees those kernels and not their launches. A stream works in order, so
    they come before the first whose launch was seen; a kernel without a launch record
    after that one is kept.
    """
    first_ns: dict[str, int] = {}
    for span in spans:
        if span.kind in _DEVICE_KINDS and "launch_ns" in span.attributes:
            first_ns.setdefault(span.lane, span.start_ns)
            first_ns[span.lane] = min(first_ns[span.lane], span.start_ns)
    if not first_ns:
        return list(spans)
    return [
        span
        for span in spans
        if span.kind not in _DEVICE_KINDS
        or "launch_ns" in span.attributes
        or span.start_ns >= first_ns.get(span.lane, span.start_ns + 1)
    ]
