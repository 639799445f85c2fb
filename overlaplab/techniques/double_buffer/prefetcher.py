"""Batches go to the device beside the step: the next is copied while you use this one.

Knows loaders: their order, their ends and their errors. How a batch gets to the device
stands in `slot`, what is in a batch in `nesting` and `leaves`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch

from overlaplab import streams
from overlaplab.techniques.double_buffer.slot import Slot

_CPU = torch.device("cpu")


class BatchPrefetcher:
    """The batches of a loader, on the device: iterate over this instead.

        batches = ol.BatchPrefetcher(DataLoader(data, 64, sampler=sampler))
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for images, labels in batches:
                ...

    Tensors arrive in their nesting and with their types (`replace_leaves`), all else as
    it is. What is in pinned memory already is copied from there, what is on the device
    already stays; a tensor that is in a batch twice arrives as one. Strides are those
    that `Tensor.to` gives, but that an expanded tensor stays expanded. A leaf that
    requires a gradient arrives as one. Subclasses of Tensor, and objects with a `to`
    (and `pin_memory`) of their own, move themselves: beside the step, too, if they have
    a `record_stream`; if not, and for sparse and quantized tensors, on your stream.

    Errors of the loader are raised in their place, after the batches before them.
    Nothing of an epoch is taken before you begin it. A loop that you leave drops the
    batches ahead, but for a loader that is its own iterator and goes on where it was,
    as a generator does: the next loop begins with them. With the end of an epoch, or
    the loop that you leave, pinned memory goes back to torch.

    There is no thread. The loader's work and the filling are the caller's, before a
    step is launched: free while the CPU runs ahead of the GPU, and exposed in a loop
    that reads its loss each step. DataLoader's workers and `pin_memory=True` take both
    away; what stays, the copies, is what this hides. Torch fills with
    `torch.get_num_threads()` threads: more than there are cores take far longer, and in
    a container torch may count those of the host (`overlaplab doctor` says so).

    Args:
        loader: an iterable of batches. What it yields in pinned memory it must not
            overwrite before it has yielded `depth` further batches; nor free, if it was
            not torch that pinned it and you leave a loop while copies are on their way.
        device: where to; None is `ol.device()`. On a CPU batches pass as they are, and
            none is taken ahead.
        depth: how many batches are on the device or on their way when you get one,
            that one included; there is a slot for each. With 2, the next is copied
            beside your step; more help where the loader's times vary; with 1 no copy
            runs beside anything. While your variable holds the batch before, the memory
            of `depth` + 1 is in use on the device.

    Raises:
        ValueError: `depth` is not a number from 1 on, or there are no streams for
            `device`. While iterating, in its place: a tensor with a graph behind it.
        RuntimeError: while iterating: the loader has overwritten pinned memory that is
            being copied. Torch's own writes alone are seen: one through `numpy()`, or
            by C code, gives a wrong batch. Yield a copy, or pageable memory.

    Batches belong to the stream that is current when you get them. Use on others is
    ordered as for any tensor: they wait for yours, and yours for them before you drop
    the batch, or `record_stream`.

    The method is the double buffer; torch's DataLoader fills pinned memory in a thread,
    but leaves the copy to you.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int | None = None,
        depth: int = 2,
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"depth: expected an integer from 1 on, got {depth!r}")
        self.loader = loader
        self.depth = depth
        self._device = device
        self._provider: Any = None
        self._copying: Any = None
        self._last: _Batches | None = None  # of a loader that is its own iterator

    def __len__(self) -> int:
        """As many batches as the loader has."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        source = iter(self.loader)
        device = self._find_device()
        if device == _CPU:
            return source
        if self._provider is not streams.provider():
            self._provider, self._last = streams.provider(), None
            with _on(device):
                # Copies overlap the steps; on the steps' stream they would wait.
                self._copying = streams.Stream()
        goes_on = source is self.loader and _goes_on(source)
        if goes_on and self._last is not None and not self._last.has_ended:
            return self._last
        batches = _Batches(source, device, self._copying, self.depth)
        self._last = batches if goes_on else None
        return batches

    def _find_device(self) -> torch.device:
        ours = streams.device()
        if self._device is None:
            return ours
        device = torch.empty(0, device=self._device).device
        if device != _CPU and device.type != ours.type:
            raise ValueError(
                f"device {device}: expected {ours.type}, which this process computes "
                f"on, or cpu. Repair: BatchPrefetcher(loader) goes to {ours}"
            )
        return device


class _Batches(Iterator[Any]):
    """One epoch: the batches that are on the device or on their way, in order."""

    def __init__(
        self, source: Iterator[Any], device: torch.device, copying: Any, depth: int
    ) -> None:
        self.has_ended = False
        self._device = device
        self._slots = [Slot(device, copying) for _ in range(depth)]
        self._depth = depth
        self._ahead: deque[tuple[Any, Slot]] = deque()
        self._raised: BaseException | None = None  # behind those
        self._sends = _send_all(source, device, self._slots, self._ahead)
        self._provider = streams.provider()

    def __next__(self) -> Any:
        if self._sends.gi_running:  # type: ignore[attr-defined]
            raise RuntimeError(
                "a batch was asked for while the loader makes one, by another thread "
                "or by the loader: one at a time. Repair: hold a lock around next()"
            )
        while len(self._ahead) < self._depth and self._raised is None:
            self._raised = next(self._sends)
        if self._ahead and not _is_urgent(self._raised):
            batch, slot = self._ahead.popleft()
            with _on(self._device):
                slot.hand_out(streams.current_stream())
            return batch
        error, self._raised = self._raised, None
        if isinstance(error, StopIteration):
            self._end()
            raise StopIteration
        try:
            assert error is not None
            raise error
        finally:
            del error  # its traceback holds this frame

    def _end(self) -> None:
        """Let all memory go, when the copies from it have ended."""
        self.has_ended = True
        self._sends.close()
        for slot in self._slots:
            slot.wait()
        self._slots.clear()

    def __del__(self) -> None:
        # Not a word to the CPU: the loop may have failed because the GPU hangs. Torch
        # keeps pinned memory until its copy has ended, whoever drops it.
        if not sys.is_finalizing() and streams.provider() is self._provider:
            for slot in self._slots:
                slot.let_go()


def _send_all(
    source: Iterator[Any],
    device: torch.device,
    slots: list[Slot],
    ahead: deque[tuple[Any, Slot]],
) -> Generator[BaseException | None]:
    """Put the batches of `source` into `ahead`, one each time; yields what was raised.

    A generator, for an error keeps the frames that it went through, their callers and
    all that those hold. It may have to wait for its turn, and nobody may ask for it:
    the caller of a generator is not kept.
    """
    for number in count():
        raised: list[BaseException | None] = [None]
        try:
            _send_next(source, device, slots, ahead, number)
        except BaseException as error:
            raised.append(error)
        yield raised.pop()  # it is not kept here either


def _send_next(
    source: Iterator[Any],
    device: torch.device,
    slots: list[Slot],
    ahead: deque[tuple[Any, Slot]],
    number: int,
) -> None:
    """Take a batch from the loader, launch its copy and put it into `ahead`."""
    item = next(source)
    overwritten = [tensor for slot in slots for tensor in slot.overwritten()]
    if overwritten:
        for slot in slots:
            slot.wait()
        ahead.clear()
        raise RuntimeError(
            "the loader has yielded a tensor in pinned memory, of shape "
            f"{tuple(overwritten[0].shape)}, and has written into it since: its copy "
            "to the device reads it, and may not have ended. Repair: yield a new "
            "tensor each time, one that is not pinned (the prefetcher pins), or take "
            f"turns with {len(slots) + 1} of them"
        )
    slot, name = slots[number % len(slots)], f"batch {number}"
    slot.wait()
    with (
        _on(device),
        streams.annotate(name),
        torch.inference_mode(False),  # of the loop, which may train on it later
        torch.no_grad(),
    ):
        ahead.append((slot.send(item, name), slot))


def _is_urgent(error: BaseException | None) -> bool:
    """An interrupt does not wait for its turn."""
    return error is not None and not isinstance(error, Exception)


def _goes_on(loader: Any) -> bool:
    """Whether this iterator's `__iter__` does nothing but return it, as a generator's.

    A function that begins anew has to name what it sets.
    """
    code = getattr(type(loader).__iter__, "__code__", None)  # none where it is C
    return code is None or not code.co_names


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Streams, events and memory are of `device`, also where another is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
