"""A device of plain CPU memory whose copies run as late as they may.

A copy on a stream other than the main one runs when somebody waits for an event behind
it, and not before. So who fills a slot, drops a batch or reads one without the wait
sees other values; the virtual cluster, whose copies run at once, sees it as a hazard.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from overlaplab import streams

_copy = Tensor.copy_
DEVICE = torch.device("cpu", 0)  # unlike that of any tensor: everything is copied


class LateStream:
    """Copies in order; `num_run` of them have run."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.num_run = 0

    @property
    def num_launched(self) -> int:
        return self.num_run + len(self._copies)

    def launch(self, target: Tensor, source: Tensor) -> None:
        self._copies.append((target, source))

    def run_until(self, number: int) -> None:
        while self.num_run < number:
            target, source = self._copies.pop(0)
            with torch.no_grad():
                _copy(target, source)
            self.num_run += 1

    def wait_event(self, event: LateEvent) -> None:
        event.synchronize()


class LateEvent:
    def __init__(self) -> None:
        self._stream: LateStream | None = None
        self._number = 0

    def record(self, stream: LateStream) -> None:
        self._stream, self._number = stream, stream.num_launched

    def synchronize(self) -> None:
        assert self._stream is not None, "a wait for an event that was never recorded"
        self._stream.run_until(self._number)


class LateDevice:
    """A provider of `overlaplab.streams`.

    Attributes:
        pinned: addresses of pinned memory that is alive.
    """

    def __init__(self) -> None:
        self.current = LateStream()
        self.pinned: set[int] = set()

    def device(self) -> torch.device:
        return DEVICE

    def make_stream(self, priority: int) -> LateStream:
        return LateStream()

    def make_event(self, enable_timing: bool) -> LateEvent:
        return LateEvent()

    def current_stream(self) -> LateStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: LateStream) -> Iterator[LateStream]:
        before, self.current = self.current, stream
        try:
            yield stream
        finally:
            self.current = before

    def synchronize(self) -> None: ...

    def annotate(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def name_tensor(self, tensor: Tensor, name: str) -> None: ...

    def pin(self, tensor: Tensor) -> Tensor:
        """`tensor`, whose memory counts as pinned while it is alive."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self.pinned.add(address)
        weakref.finalize(storage, self.pinned.discard, address)
        return tensor


@contextlib.contextmanager
def late_copies() -> Iterator[LateDevice]:
    """This thread computes on a `LateDevice`."""
    device = LateDevice()
    empty, copy_ = torch.empty, Tensor.copy_

    def empty_pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return device.pin(made) if pin_memory else made

    def copy_late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return cast(Tensor, copy_(target, source))
        assert source.is_pinned(), "a copy from pageable memory holds up the CPU"
        assert source.stride() == target.stride(), "so does one that moves elements"
        device.current.launch(target, source)
        return target

    def is_pinned(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in device.pinned

    before = streams.install_thread_provider(device)
    try:
        with (
            mock.patch.object(torch, "empty", empty_pinned),
            mock.patch.object(Tensor, "copy_", copy_late),
            mock.patch.object(Tensor, "is_pinned", is_pinned),
        ):
            yield device
    finally:
        streams.install_thread_provider(before)
