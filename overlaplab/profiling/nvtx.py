"""`ol.nvtx`: our words as NVTX ranges, so that Nsight Systems shows them.

A range for every step, every `ol.annotate`, every bucket that our reducers launch, and
every collective that Python launches. Nothing is measured here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from overlaplab import streams
from overlaplab.errors import ProfileError
from overlaplab.profiling.collectives import Call, Watcher, watching
from overlaplab.timeline.span import STEP

_cuda: Any = torch.cuda


class NvtxRanges:
    """Show our words in Nsight Systems: steps, annotations, buckets, collectives.

    Run the script under `nsys profile -t cuda,nvtx`; see course/nsight.md. Two calls a
    range, and nothing once the block has ended.

    Args:
        warmup: begin the capture after so many steps (cudaProfilerStart, and its stop
            at the end): for `nsys profile --capture-range=cudaProfilerApi`. None:
            leave the capture alone.

    Raises:
        ProfileError: on entering: torch was built without CUDA.

    Example:
        with ol.nvtx(warmup=3) as ranges:
            for batch in data:
                train_step(batch)
                ranges.step()
    """

    def __init__(self, *, warmup: int | None = None) -> None:
        if warmup is not None and (
            isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 0
        ):
            raise ValueError(
                f"warmup is a number of steps, 0 or more, or None; got {warmup!r}"
            )
        self._warmup = warmup
        self._stack = contextlib.ExitStack()
        self._step = 0
        self._capturing = False

    def __enter__(self) -> NvtxRanges:
        try:
            _cuda.nvtx.mark("overlaplab")
        except RuntimeError as error:
            raise ProfileError(
                f"this torch has no NVTX ({error}). ol.nvtx() needs a build with CUDA; "
                "on any other, ol.profile() shows the same ranges."
            ) from error
        self._stack.enter_context(streams.listening_to_ranges(_range))
        self._stack.enter_context(watching(_Ranges()))
        self._begin_step()
        return self

    def step(self) -> None:
        """Say that a step ends here and the next one begins."""
        _cuda.nvtx.range_pop()
        self._step += 1
        self._begin_step()

    def __exit__(self, *_: object) -> None:
        _cuda.nvtx.range_pop()
        if self._capturing:
            self._capturing = False
            _cuda.profiler.stop()
        self._stack.close()

    def _begin_step(self) -> None:
        if self._step == self._warmup:
            _cuda.profiler.start()
            self._capturing = True
        _cuda.nvtx.range_push(f"{STEP}{self._step}")


nvtx = NvtxRanges


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    _cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        _cuda.nvtx.range_pop()


class _Ranges(Watcher):
    """A range around the launch of each collective, and around each wait."""

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        with _range(operation):
            return call()

    def wait(self, call: Call, work: Any) -> Any:
        with _range("wait"):
            return call()
