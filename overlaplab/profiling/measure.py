"""Run a function under torch.profiler and keep what this process did meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from overlaplab.profiling.events import RUN_RANGE
from overlaplab.profiling.kineto import spans_from_trace
from overlaplab.timeline import Span


class Recording:
    """What happened in the `with` block of `recording`, once that has ended."""

    def __init__(self) -> None:
        self._trace: dict[str, Any] | None = None

    def spans(self, rank: int) -> list[Span]:
        """The spans of this process as `rank`'s, on the clock of the machine.

        Raises:
            RuntimeError: the `with` block has not ended, or ended by an exception.
        """
        if self._trace is None:
            raise RuntimeError("nothing is recorded before the `with` block has ended")
        return spans_from_trace(self._trace, rank)


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
    result = Recording()
    # torch.profiler.profile is a shell around this one, and imports the compiler
    # (seconds) when it starts. Without use_kineto it would time with CUDA events.
    with torch.autograd.profiler.profile(
        use_device="cuda" if cuda else None, use_kineto=True
    ) as profiler:
        if align is not None:
            align()
        with torch.profiler.record_function(RUN_RANGE):
            yield result
            if cuda:
                torch.cuda.synchronize()
    result._trace = _export(profiler)


def _export(profiler: Any) -> dict[str, Any]:
    # The JSON is the profiler's documented output; its event objects are not.
    descriptor, path = tempfile.mkstemp(suffix=".json")
    try:
        os.close(descriptor)
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            trace: dict[str, Any] = json.load(file)
        return trace
    finally:
        os.unlink(path)
