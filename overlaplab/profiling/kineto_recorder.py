"""The recorder of a profile that stands on torch.profiler: one session, with steps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from overlaplab.errors import ProfileError
from overlaplab.profiling.gloo_ranges import marking_collectives
from overlaplab.profiling.kineto import spans_from_trace
from overlaplab.profiling.measure import Session
from overlaplab.timeline import Span

_DEVICE_KINDS = ("compute", "communication", "memcpy", "memset")
_NO_CUPTI = (
    "the GPU's activity was not recorded: CUPTI gave no events, so there is no "
    "timeline of the GPU. Another profiler (Nsight Systems, DCGM) may hold it, or the "
    "driver keeps it for administrators (NVreg_RestrictProfilingToAdminUsers; in a "
    "container CAP_SYS_ADMIN). `overlaplab doctor` says more; "
    "ol.profile(events=True) needs no CUPTI."
)


class KinetoRecorder:
    """Records from `start` to `stop`, steps as `ProfilerStep#N` ranges.

    Args:
        cuda: whether kernels are to be recorded.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        # Shapes give gloo's messages their bytes; on CUDA NCCL's own events have them.
        self._session = Session(cuda=cuda, shapes=not cuda)
        self._step: Any = None
        self._stack = contextlib.ExitStack()
        self.trace: bytes = b""
        self._remarks: list[str] = []

    def prepare(self) -> None:
        """Set the profiler up: the first time in a process takes long."""
        self._session.prepare()

    def start(self) -> None:
        self._session.start()
        if not self._cuda and torch.distributed.is_available():
            self._stack.enter_context(marking_collectives())

    def begin_step(self, number: int) -> None:
        self._step = torch.profiler.record_function(f"ProfilerStep#{number}")
        self._step.__enter__()

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def stop(self) -> None:
        self._stack.close()
        self.trace = self._session.stop()

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


_HIP = b'"hip_runtime"'


def without_earlier_launches(spans: Sequence[Span]) -> list[Span]:
    """Without what the device still had to do when the recording began.

    The profiler sees those kernels and not their launches. A stream works in order, so
    they come before the first whose launch was seen; a kernel without a launch record
    after that one is kept.
    """
    first_ns: dict[str, int] = {}
    for span in spans:
        if span.kind in _DEVICE_KINDS and "launch_ns" in span.attributes:
            known = first_ns.get(span.lane, span.start_ns)
            first_ns[span.lane] = min(known, span.start_ns)
    if not first_ns:
        return list(spans)
    return [
        span
        for span in spans
        if span.kind not in _DEVICE_KINDS
        or "launch_ns" in span.attributes
        or span.start_ns >= first_ns.get(span.lane, span.start_ns + 1)
    ]
