"""Batches of `torch.utils.data.DataLoader`: what a loader yields is the host's.

While a rank fetches a batch, what nobody places is in the host's pageable memory (and
not in the GPU's, as elsewhere): what a dataset or `collate_fn` makes, what numpy or a
worker process gives, and what a dataset holds. Operators on it are the CPU's. What a
dataset or a collate function puts into the GPU's memory stays there. Which items a
batch has (the sampler, seeds) is not recorded.

`pin_memory=True` means what it does beside a GPU. Without workers the rank's CPU pins
each batch. With workers, torch does so on a thread of its own, beside the rank's CPU:
here the batch is pinned when it arrives, and no such thread is started.

[Note: where the model lies] Worker processes, and the thread that pins their batches,
take no time on the virtual clock: a batch is there when the rank asks for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import dataloader
from torch.utils.data._utils import pin_memory as pinned

from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder

# The name of a batch that came from a worker process, among the CPU's rows.
ARRIVAL = "next batch"


@contextlib.contextmanager
def loading_batches() -> Iterator[None]:
    """While open, the batches of loaders in the threads of ranks are the host's."""
    pinning: weakref.WeakSet[Any] = weakref.WeakSet()

    def get_iterator(rank: Recorder, make: Any, self: Any) -> Any:
        # torch finds no GPU here: it would warn, and not pin.
        pins, self.pin_memory = self.pin_memory, False
        try:
            with rank.looking_away():  # a seed for workers, and their start
                made = make(self)
        finally:
            self.pin_memory = pins
        if pins:
            pinning.add(made)
        return made

    def next_index(rank: Recorder, index: Any, self: Any) -> Any:
        with rank.looking_away():
            return index(self)

    def fetch_batch(rank: Recorder, fetch: Any, self: Any) -> Any:
        with rank.storages.loading():
            batch = fetch(self)
            rank.claim_for_host(ARRIVAL, _tensors(batch))
            return _pinned(batch) if self in pinning else batch

    def receive_batch(rank: Recorder, receive: Any, self: Any) -> Any:
        with rank.storages.loading():
            with rank.looking_away():  # batches come in any order
                batch = receive(self)
            if self in pinning:
                with rank.storages.arriving():
                    batch = _pinned(batch)
            tensors, lane = _tensors(batch), rank.current().name
            rank.claim_for_host(ARRIVAL, tensors)
            arrived, _ = rank.storages.accesses(tensors, lane)
            rank.host(ARRIVAL, (), arrived, is_free=True)
            return batch

    patches = (
        in_ranks(dataloader.DataLoader, "_get_iterator", get_iterator),
        in_ranks(dataloader._BaseDataLoaderIter, "_next_index", next_index),
        in_ranks(dataloader._SingleProcessDataLoaderIter, "_next_data", fetch_batch),
        in_ranks(
            dataloader._MultiProcessingDataLoaderIter, "_next_data", receive_batch
        ),
    )
    with patched(patches):
        yield


def _tensors(batch: Any) -> list[torch.Tensor]:
    leaves = _pytree.tree_leaves(batch)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _pinned(batch: Any) -> Any:
    """As torch's loaders have it: tensors, and what has a `pin_memory` of its own."""
    pin: Any = pinned.pin_memory
    return pin(batch)
