"""`untyped_storage().resize_`: memory that is given back while its tensors live on.

It dispatches nothing, so it is patched while a run is open. As in torch's code for
CUDA: 0 bytes give the memory back to the stream that allocated it; any other size takes
new memory of the current stream, into which a kernel there copies what was in the old.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.program.record import Access


@contextlib.contextmanager
def resizing_storages() -> Iterator[None]:
    """While open, storages that are resized in the threads of ranks are seen."""
    with patched([in_ranks(torch.UntypedStorage, "resize_", _resize)]):
        yield


def _resize(rank: Recorder, original: Any, storage: Any, size: int) -> Any:
    rank.turns.check()
    lane = rank.current()
    rank.settle(lane)
    rank.storages.note(storage, lane.name)
    result = original(storage, size)
    rank.storages.renew(storage, lane.name, partial(_copy, rank))
    return result


def _copy(rank: Recorder, old: Access, new: Access) -> None:
    """The kernel that moves what has room in the new memory."""
    rank.launch(
        "compute",
        "resize_",
        rank.current(),
        reads=(old,),
        writes=(new,),
        dtype="uint8",
        read_bytes=old.run_bytes,
        write_bytes=new.run_bytes,
    )
