"""A slot: the way of one batch to the device, and when that way is free again.

A copy from pageable memory holds up the CPU, so the CPU fills pinned memory first; the
copy from there runs on a stream of its own. Two things must not be overwritten while
they are read:

- The pinned memory, by the CPU. It fills it again when the copy has ended, and not
  before: it waits for an event that was recorded behind the copy.
- An old batch on the device, by a copy. Batches are allocated on *your* stream, like
  any tensor that you make: when you drop one, its memory may serve the next. So before
  a copy, the copy stream waits for all that your stream was given until the memory was
  allocated. With two slots that is everything up to step k - 1 for the copy of batch
  k + 1, which starts when step k does. No `record_stream` is needed for it, and no
  memory is held back longer than you hold it.

Before you get a batch, your stream waits for its copy. The CPU does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlaplab import streams
from overlaplab.techniques.double_buffer import leaves
from overlaplab.techniques.double_buffer.nesting import replace_leaves

_ALIGNMENT_BYTES = 64
_NOTHING = torch.empty(0, dtype=torch.uint8)


class Slot:
    """Pinned memory for one batch on its way, and when it may be filled again."""

    def __init__(self, device: torch.device, copying: Any) -> None:
        self._device = device
        self._copying = copying
        self._owner: Any = None  # the stream on which the batch was allocated
        # Recorded anew for each batch, for making one takes longer.
        self._allocated, self._copied = streams.Event(), streams.Event()
        self._in_flight = False
        self._pinned = _NOTHING
        self._forget()

    def _forget(self) -> None:
        # From where, to where, and at which byte of the slot or None: past it.
        self._copies: list[tuple[Tensor, Tensor, int | None]] = []
        self._num_bytes = 0
        self._arriving: list[Tensor] = []  # of the owner's memory
        self._beside: list[Any] = []  # of the copy stream's
        self._kept: list[tuple[Any, int]] = []  # what a copy reads, and its version

    def wait(self) -> None:
        """Hold the CPU until the slot may be filled: its copies have ended."""
        if self._in_flight:
            self._copied.synchronize()
            self._in_flight = False
        self._forget()

    def send(self, item: Any, name: str) -> Any:
        """Fill the slot with the tensors of `item` and launch their copies.

        Returns:
            The batch, whose values are there when the copy stream gets to `_copied`.
        """
        self._owner = streams.current_stream()
        batch = replace_leaves(item, self._place)
        sources = self._fill()
        self._come_after(self._owner)
        self._in_flight = True
        try:
            with streams.stream(self._copying):
                for (_, target, _), source in zip(self._copies, sources, strict=True):
                    streams.name_tensor(target, name)
                    target.copy_(source, non_blocking=True)
        finally:
            self._copied.record(self._copying)
            self._copies = []  # it holds the batch, which is yours to drop
        return batch

    def _come_after(self, owner: Any) -> None:
        """Copies may write where `owner`, your stream, still reads an old batch."""
        self._allocated.record(owner)
        self._copying.wait_event(self._allocated)

    def hand_out(self, current: Any) -> None:
        """The batch is `current`'s: what it does next comes after the copies."""
        current.wait_event(self._copied)
        others = self._arriving if current != self._owner else ()
        for moved in (*others, *self._beside):
            moved.record_stream(current)
        self._arriving.clear()
        self._beside.clear()

    def let_go(self) -> None:
        """Nobody may get the batch: its memory serves others, behind the copies."""
        if self._in_flight:
            self._owner.wait_event(self._copied)

    def overwritten(self) -> list[Tensor]:
        """What was written while a copy may read it, as far as torch knows."""
        return [kept for kept, number in self._kept if leaves.version(kept) != number]

    def _place(self, leaf: Any) -> Any:
        """What stands for a leaf on the device."""
        if isinstance(leaf, Tensor):
            if leaf.device == self._device:
                return leaf
            leaves.check_graph(leaf)
        if not leaves.is_plain(leaf):
            return self._moved_by_itself(leaf)
        core = leaves.core(leaf)
        target = torch.empty_like(core, device=self._device)
        self._arriving.append(target)
        if core.numel():
            self._copies.append((core, target, self._reserve(core, target)))
        return leaves.like(leaf, target)

    def _moved_by_itself(self, leaf: Any) -> Any:
        """It allocates and copies on one stream: the copies' only if it can be told
        afterwards who else uses its memory."""
        leaf = leaves.pin_itself(leaf)
        self._kept.append((leaf, leaves.version(leaf)))
        beside = leaves.can_be_recorded(leaf)
        with streams.stream(self._copying if beside else self._owner):
            moved = leaves.move_itself(leaf, self._device)
        if beside:
            self._beside.append(moved)
        elif isinstance(moved, Tensor):
            self._arriving.append(moved)
        return moved

    def _reserve(self, core: Tensor, target: Tensor) -> int | None:
        """Where in the slot it gets its bytes; None if it needs none."""
        if core.is_pinned() and core.stride() == target.stride():
            self._kept.append((core, leaves.version(core)))
            return None
        offset = -(-self._num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._num_bytes = offset + target.numel() * target.itemsize
        return offset

    def _fill(self) -> list[Tensor]:
        """What the copies read: the slot, filled now, or pinned memory of others."""
        if self._pinned.numel() < self._num_bytes:
            self._pinned = _NOTHING  # the old one goes first
            self._pinned = torch.empty(
                self._num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        sources = []
        for core, target, offset in self._copies:
            if offset is None:
                sources.append(core)
                continue
            end = offset + target.numel() * target.itemsize
            place = self._pinned[offset:end].view(target.dtype)
            place = place.as_strided(target.shape, target.stride())
            sources.append(place.copy_(core))
        return sources
