"""Batches from a loader to the device, the next one while you compute on this one.

Knows loaders, pinned memory and two streams; no model and no collective.

How a batch travels. The CPU takes it from the loader and fills a *slot* with it, which
is pinned memory: a copy from other memory holds up the CPU. The copy runs on a stream
of its own, beside the kernels of the step. Two things must not be overwritten while
they are read:

- A slot, by the next fill. The CPU fills, so the CPU must know that the copy has ended:
  it waits for an event that was recorded behind it. With two slots that is the copy
  before last.
- A batch on the device, by the next copy. Its memory is allocated on *your* stream, so
  it is yours like that of any tensor that you make: when you drop it, the allocator
  gives it to what you launch next. The next copy may get it, too; so the copy stream
  first waits for all that your stream had to do when the memory was allocated. The copy
  of batch k + 1 thus starts with step k, and no earlier step still reads what it
  overwrites.

Before a batch is yours, your stream waits for its copy; the CPU does not.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from overlaplab import streams
from overlaplab.techniques.double_buffer.nesting import has_method, replace_leaves

_PLAIN = frozenset({Tensor, nn.Parameter, FakeTensor})
_ALIGNMENT_BYTES = 64


class BatchPrefetcher:
    """The batches of a loader, on the device; the next is copied while you compute.

    Args:
        loader: an iterable of batches, for instance a DataLoader.
        device: where to; None is `ol.device()`.
        depth: how many batches there are at once, the one that you have among them.
            With 2, the copy of the next one runs beside your step; with 1, no copy
            runs beside anything.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int | None = None,
        depth: int = 2,
    ) -> None:
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f"depth: expected an integer of 1 or more, got {depth!r}")
        self.loader = loader
        self.depth = depth
        self._device = device
        self._stream: Any = None
        self._provider: Any = None
        self._unfinished: _Batches | None = None

    def __len__(self) -> int:
        """As many batches as the loader has."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.loader)
        device = self._find_device()
        if device == torch.device("cpu"):  # nothing to copy
            return source
        if self._provider is not streams.provider():
            self._provider, self._stream = streams.provider(), streams.Stream()
        return _Batches(source, device, self.depth, self._stream)

    def _find_device(self) -> torch.device:
        if self._device is None:
            return streams.device()
        return torch.empty(0, device=self._device).device


class _Coming(NamedTuple):
    """A batch that is on the device or on its way."""

    batch: Any
    tensors: list[Tensor]  # those of it that were copied
    slot: _Slot
    owner: Any  # the stream that owns their memory


class _Batches(Iterator[Any]):
    """One epoch."""

    def __init__(
        self, source: Iterator[Any], device: torch.device, depth: int, stream: Any
    ) -> None:
        self._source: Iterator[Any] | None = source
        self._device = device
        self._copying = stream
        self._slots = [_Slot() for _ in range(depth)]
        self._num_loaded = 0
        self._ahead: deque[_Coming] = deque()
        self._error: Exception | None = None  # of the loader, behind those
        self._has_ended = False
        self._provider = streams.provider()

    def __next__(self) -> Any:
        while len(self._ahead) < len(self._slots) and not self._has_ended:
            if self._error is not None:
                break
            self._load()
        if self._ahead:
            return self._hand_out(self._ahead.popleft())
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Let go of the loader's iterator and of all memory."""
        self._has_ended, self._source = True, None
        if streams.provider() is self._provider:
            for slot in self._slots:
                slot.wait()
        self._slots.clear()
        self._ahead.clear()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()

    def _hand_out(self, coming: _Coming) -> Any:
        with _on(self._device):
            current = streams.current_stream()
            current.wait_event(coming.slot.copied)
            if current != coming.owner:
                for tensor in coming.tensors:
                    tensor.record_stream(current)
        return coming.batch

    def _load(self) -> None:
        """Take one batch and launch its copy."""
        assert self._source is not None
        slot = self._slots[self._num_loaded % len(self._slots)]
        slot.wait()
        try:
            item = next(self._source)
            with _on(self._device), torch.inference_mode(False), torch.no_grad():
                sending = _Sending(slot, self._device)
                batch = replace_leaves(item, sending.place)
                owner = streams.current_stream()
                sending.launch(owner, self._copying)
        except StopIteration:
            self._has_ended = True
        except Exception as error:
            self._error = error
        else:
            self._ahead.append(_Coming(batch, sending.targets, slot, owner))
            self._num_loaded += 1


class _Slot:
    """Pinned memory for one batch, and when it may be filled again."""

    def __init__(self) -> None:
        self.copied = streams.Event()
        self.allocated = streams.Event()
        self.kept: list[Any] = []  # what else the copies read
        self.in_flight = False
        self._bytes: Tensor | None = None

    def wait(self) -> None:
        """Hold the CPU until the copy has ended."""
        if self.in_flight:
            self.copied.synchronize()
            self.in_flight = False
            self.kept.clear()

    def pinned(self, num_bytes: int) -> Tensor:
        if self._bytes is None or self._bytes.numel() < num_bytes:
            self._bytes = None  # before the next one is there
            self._bytes = torch.empty(
                num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        return self._bytes


class _Sending:
    """One batch: where its tensors go, and from where."""

    def __init__(self, slot: _Slot, device: torch.device) -> None:
        self._slot = slot
        self._device = device
        self.targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def place(self, leaf: Any) -> Any:
        """What stands for `leaf` on the device; its values come by `launch`."""
        if not isinstance(leaf, Tensor):
            return self._moved_by_itself(leaf)
        if leaf.device == self._device:
            return leaf
        if leaf.grad_fn is not None:
            raise ValueError(
                f"a tensor of shape {tuple(leaf.shape)} in a batch was computed from "
                "tensors that require a gradient: its graph cannot go to the device "
                "with it. Repair: detach() it in the loader"
            )
        if (
            type(leaf) not in _PLAIN
            or leaf.layout != torch.strided
            or leaf.is_quantized
        ):
            new = leaf.to(self._device, non_blocking=True)
            self._slot.kept.append(leaf)
        else:
            new = self._copied(leaf)
            if isinstance(leaf, nn.Parameter):
                return nn.Parameter(new, leaf.requires_grad)
        return new.requires_grad_(leaf.requires_grad)

    def _moved_by_itself(self, leaf: Any) -> Any:
        if has_method(leaf, "pin_memory"):
            leaf = leaf.pin_memory()
            self._slot.kept.append(leaf)
        if not has_method(leaf, "to"):
            return leaf
        try:
            return leaf.to(self._device, non_blocking=True)
        except TypeError:
            return leaf.to(self._device)

    def _copied(self, leaf: Tensor) -> Tensor:
        core = leaf.detach()
        for dim, stride in enumerate(leaf.stride()):
            if stride == 0:  # the same numbers again and again: one of them travels
                core = core.narrow(dim, 0, min(1, core.shape[dim]))
        target = torch.empty_like(core, device=self._device)
        if core.numel():
            self.targets.append(target)
            self._sources.append(core)
        return target if core.shape == leaf.shape else target.expand(leaf.shape)

    def launch(self, owner: Any, copying: Any) -> None:
        """Fill the slot and launch the copies, behind what `owner` has so far."""
        sources = self._fill()
        self._slot.allocated.record(owner)
        copying.wait_event(self._slot.allocated)
        with streams.stream(copying):
            for target, source in zip(self.targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        self._slot.copied.record(copying)
        self._slot.in_flight = True

    def _fill(self) -> list[Tensor]:
        """The pinned memory to copy from, for each target, full."""
        offsets, end = [], 0
        for target, source in zip(self.targets, self._sources, strict=True):
            if source.is_pinned() and source.stride() == target.stride():
                offsets.append(-1)
                continue
            offsets.append(-(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
            end = offsets[-1] + target.numel() * target.itemsize
        slot = self._slot.pinned(end) if end else None
        staged = []
        for target, source, offset in zip(
            self.targets, self._sources, offsets, strict=True
        ):
            if offset < 0:
                self._slot.kept.append(source)
                staged.append(source)
                continue
            assert slot is not None
            num_bytes = target.numel() * target.itemsize
            place = slot[offset : offset + num_bytes].view(target.dtype)
            place = place.as_strided(target.shape, target.stride())
            place.copy_(source)
            staged.append(place)
        return staged


def _is_plain(leaf: Tensor) -> bool:
    """Whether its values are its bytes, in the host's memory."""
    plain = type(leaf) in _PLAIN and leaf.layout == torch.strided
    return plain and leaf.device.type == "cpu" and not leaf.is_quantized


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Streams and events of a GPU that is not the current one are made there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
