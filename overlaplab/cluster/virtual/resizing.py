"""`untyped_storage().resize_`: memory that is given back while its tensors live on.

It dispatches nothing, so it is patched while a run is open. As in torch's code for
CUDA: 0 bytes give the memory back to the stream that allocated it; any other size takes
new memory of the current stream, into which a kernel there copies what was in the old.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from overlaplab.cluster.virtual.placement import patched
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.program.record import Access


@contextlib.contextmanager
def resizing_storages(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, storages that are resized in the threads of ranks are seen.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    storage: Any = torch.UntypedStorage
    original = storage.resize_

    def resize_(self: Any, size: int) -> Any:
        rank = recorder()
        if rank is None:
            return original(self, size)
        rank.turns.check()
        lane = rank.current()
        rank.settle(lane)
        rank.storages.note(self, lane.name)
        result = original(self, size)
        rank.storages.renew(self, lane.name, partial(_copy, rank))
        return result

    with patched([(storage, "resize_", resize_)]):
        yield


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
