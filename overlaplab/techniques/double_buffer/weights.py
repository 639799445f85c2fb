"""Weights to serve with: the next version is copied in while this one still serves.

One module, two sets of memory for its parameters and buffers. The module refers to the
*front*; `update_from` copies into the *back*, on a stream of its own; `swap` makes them
change places by reference. Copying at the swap would cost what this hides.

Who waits for whom, all of them on the device:
- The copy waits for what wrote the source (the stream that calls `update_from`), and
  for what still reads the back set, which was the front until the last swap (the
  stream that called `swap`).
- Who writes the source next waits for the copy: `wait`.
- Who reads the new front waits for the copy: `swap` makes its stream wait.

Every update writes every tensor of the back set. So neither set misses an update, and
they never become two models. Knows no optimizer and no process group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.techniques.buckets import size_text
from overlaplab.techniques.double_buffer.sources import (
    PLAIN,
    Source,
    matched,
    place_of,
    state_of,
    with_ties_of,
)
from overlaplab.techniques.model_facts import marks_of


class DoubleBufferedWeights:
    """A module that serves with one set of weights while the other one is updated.

    The module's parameters and buffers stay the objects that they are, with their
    names, ties, hooks and `requires_grad`; a swap changes the memory that they refer
    to. It costs the CPU some microseconds a tensor, and the device nothing.
    `state_dict()` and all else that reads the module sees the front. Buffers that are
    not in a state dict (`persistent=False`) are no state: they are left alone.

    Not for a forward that was captured in a CUDA graph, which keeps the addresses of
    one set. All calls come from one thread.

    Args:
        model: the module that serves, e.g. a copy of the one that trains in another
            dtype. It stays the caller's; what it has now is the front.

    Raises:
        TypeError: `model` is no module.
        ValueError: it has no state, or one that is no plain tensor (a DTensor), was
            made in inference mode, or is expanded.

    Example:
        served = copy.deepcopy(model).bfloat16().eval()
        weights = DoubleBufferedWeights(served)
        for batch in batches:
            model(batch).backward()
            weights.wait()                # the copy has read what is written next
            optimizer.step()
            optimizer.zero_grad()
            weights.update_from(model)    # runs beside the next forward and backward
        weights.swap()                    # `served` has the last update
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}; expected a torch.nn.Module"
            )
        self.model = model
        self._named = state_of(model)
        if not self._named:
            raise ValueError(f"{type(model).__name__} has no parameter and no buffer")
        for name, tensor in self._named.items():
            if type(tensor) not in PLAIN:
                raise ValueError(
                    f"{name} is a {type(tensor).__name__}; expected a plain tensor"
                )
            if tensor.is_inference() or torch._debug_has_internal_overlap(tensor) == 1:
                what = (
                    "was made in inference mode"
                    if tensor.is_inference()
                    else "is expanded"
                )
                raise ValueError(f"{name} {what}; its clone(), outside, can serve")
        # What is tied is here once.
        self._tensors = list({id(t): t for t in self._named.values()}.values())
        self._front = [tensor.detach() for tensor in self._tensors]
        with torch.inference_mode(False):  # who serves may be in it
            self._back = with_ties_of(self._front)
        self._copying = streams.Stream()
        for tensor in (*self._front, *self._back):
            _hold_for(self._copying, tensor)
        self._last_read: Any = None  # event: behind the readers of what is the back now
        self._copied: Any = None  # event: behind the last update
        self._source: list[Tensor] = []  # of an update, until it may be written
        self._marks: list[tuple[int, int]] = []
        self._is_complete = False

    @property
    def extra_bytes(self) -> int:
        """What the second set takes."""
        storages = {s._cdata: s for s in (t.untyped_storage() for t in self._back)}
        return sum(storage.nbytes() for storage in storages.values())

    @property
    def is_updated(self) -> bool:
        """Whether a complete update waits for a swap."""
        return self._is_complete

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}: {type(self.model).__name__}, "
            f"{size_text(self.extra_bytes)} for a second set, "
            f"{'updated' if self._is_complete else 'not updated'} since the last swap"
        )

    def update_from(self, source: Source) -> None:
        """Start to copy `source` into the back set, behind this stream's work.

        The CPU launches and goes on. The source's parameters must not be written until
        `wait()` or `swap()` has been called on the stream that writes; both refuse the
        update if they were, as far as autograd counts writes. Buffers on the device may
        be: a forward writes running means, so they are set aside first, on this stream.
        The source's memory is kept. A second update before a swap replaces the first.

        Args:
            source: a module with the same names, or a state dict. On the same device,
                or in pinned memory. Other dtypes are converted, as by `copy_`, where no
                more than precision is lost. One name is enough for what is tied.

        Raises:
            TypeError: `source` is neither.
            ValueError: a name that is missing or unknown, another shape, a dtype that
                cannot be converted, pageable memory or another device, two values for
                what is tied, a tensor of the serving module itself. Nothing has
                changed.
            RuntimeError: the module's tensors are not those of the construction.
        """
        self._refuse_changed_module("update_from()")
        own = {place_of(tensor)[0] for tensor in (*self._front, *self._back)}
        with torch.inference_mode(False):  # which counts no writes
            tensors = self._with_buffers_aside(matched(source, self._named, own))
        self._copying.wait_stream(streams.current_stream())  # which wrote the source
        if self._last_read is not None:
            self._copying.wait_event(self._last_read)
        for tensor in tensors:
            _hold_for(self._copying, tensor)
        self._source, self._marks = tensors, marks_of(tensors)
        self._is_complete = False
        try:
            with (
                streams.stream(self._copying),
                streams.annotate("update of weights"),
                torch.no_grad(),
            ):
                torch._foreach_copy_(self._back, tensors, non_blocking=True)
        finally:
            self._copied = self._copying.record_event()
        self._is_complete = True

    def wait(self) -> None:
        """Make the current stream wait until the source has been read.

        Call it before the source is written, e.g. before `optimizer.step()`. The CPU
        goes on. Nothing to wait for is no error.

        Raises:
            RuntimeError: the source was written since `update_from()`. That update is
                dropped.
        """
        if self._copied is not None:
            streams.current_stream().wait_event(self._copied)
        source, self._source = self._source, []
        if marks_of(source) != self._marks and source:
            self._is_complete = False
            raise RuntimeError(
                "the source of update_from() was written before wait(), maybe while it "
                "was being copied: that update is dropped. Call wait() before the "
                "source is written (before optimizer.step()), then update again."
            )

    def swap(self) -> None:
        """Serve with the updated set from here on; the other one becomes the back.

        Call it on the stream that serves: it waits for the copy, and the next update
        waits for what it has to do so far. A stream that reads the front besides must
        be waited for by it first. What `state_dict()` gave before is overwritten by the
        next update: copy it. A backward whose forward was before the swap is an error.

        Raises:
            RuntimeError: no complete update since the last swap; its source was written
                too early, see `wait`; the module's tensors are not those of the
                construction. The front stays.
        """
        if not self._is_complete:
            raise RuntimeError(
                "swap() without a complete update_from() since the last swap: the back "
                "set has old values, or a part of new ones. Call update_from() first."
            )
        self._refuse_changed_module("swap()")
        self.wait()
        self._last_read = streams.current_stream().record_event()
        for tensor, back in zip(self._tensors, self._back, strict=True):
            tensor.data = back
        torch.autograd.graph.increment_version(self._tensors)
        self._front, self._back = self._back, self._front
        self._is_complete = False

    def _refuse_changed_module(self, call: str) -> None:
        now = state_of(self.model)
        for name in {**self._named, **now}:
            tensor = self._named.get(name)
            if tensor is None or now.get(name) is not tensor:
                raise RuntimeError(
                    f"{call}: {name} was replaced, added or removed since "
                    "DoubleBufferedWeights was built. Build it anew."
                )
        for tensor, front in zip(self._tensors, self._front, strict=True):
            if place_of(tensor) != place_of(front) or tensor.dtype is not front.dtype:
                name = next(n for n, mine in self._named.items() if mine is tensor)
                raise RuntimeError(
                    f"{call}: {name} has left the memory of the front "
                    "(by .data = or model.to()). Build DoubleBufferedWeights anew."
                )

    def _with_buffers_aside(self, tensors: list[Tensor]) -> list[Tensor]:
        places = [
            i
            for i, (mine, its) in enumerate(zip(self._tensors, tensors, strict=True))
            if not isinstance(mine, nn.Parameter) and mine.device == its.device
        ]
        if places:
            buffers = [tensors[i] for i in places]
            aside = [torch.empty_like(buffer) for buffer in buffers]
            torch._foreach_copy_(aside, buffers)
            tensors = list(tensors)
            for i, copy in zip(places, aside, strict=True):
                tensors[i] = copy
        return tensors


def _hold_for(stream: Any, tensor: Tensor) -> None:
    """If `tensor` is freed, its memory waits for what `stream` has to do by then."""
    # Pinned memory does so by itself; a CPU process has no streams.
    if isinstance(stream, torch.Stream) and stream.device.type == tensor.device.type:
        tensor.record_stream(stream)
