"""Calls that make the CPU wait for a GPU and dispatch nothing on this machine.

While a run is open they are patched: in a rank's thread they are recorded, elsewhere
they are torch's own. `item`, `bool(tensor)` and the like reach the rank's mode; `cpu`
and `to` are copies (placement.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.virtual.placement import PLAIN, patched
from overlaplab.cluster.virtual.recorder import Recorder

_NAMES = {
    "tolist": "tolist",
    "numpy": "numpy",
    "__repr__": "print",
    "__format__": "print",
}


@contextlib.contextmanager
def host_syncs(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, host syncs and `record_stream` are seen in the threads of ranks.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    tensor: Any = torch.Tensor
    patches = [
        (tensor, method, _sync(recorder, name, getattr(tensor, method)))
        for method, name in _NAMES.items()
    ]
    record_stream = _record_stream(recorder, tensor.record_stream)
    with patched([*patches, (tensor, "record_stream", record_stream)]):
        yield


def _sync(find: Callable[[], Recorder | None], name: str, original: Any) -> Any:
    def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = find()
        if recorder is None or recorder.printing:
            return original(self, *args, **kwargs)
        if type(self) in PLAIN:
            recorder.read_on_host(name, self)
        if name == "numpy" and not recorder.storages.is_host(self):
            # The array is the host's memory: what is written there stays there.
            return original(self, *args, **kwargs).copy()
        if name != "print":
            return original(self, *args, **kwargs)
        recorder.printing = True  # how it is made is not the program's
        try:
            with _disable_current_modes():
                return original(self, *args, **kwargs)
        finally:
            recorder.printing = False

    return sync


def _record_stream(find: Callable[[], Recorder | None], original: Any) -> Any:
    def record_stream(self: Any, s: Any) -> None:
        recorder = find()
        if recorder is None or type(self) not in PLAIN:
            original(self, s)
            return
        lane = recorder.current()
        recorder.storages.record_stream(self, s.lane.name, lane.name)

    return record_stream
