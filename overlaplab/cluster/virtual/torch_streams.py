"""`torch.cpu`'s streams and events, which are dummies, become virtual in a rank.

Code that asks a tensor's device for its streams gets to `torch.cpu` on the virtual
cluster: FSDP2 does. Its streams then show up as lanes, under its own names for them.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from overlaplab.cluster.virtual.streams import VirtualProvider
from overlaplab.streams import thread_provider


@contextlib.contextmanager
def torch_cpu_streams() -> Iterator[None]:
    """While open, `torch.cpu` has the streams of the calling rank; other threads see
    torch's own."""
    cpu: Any = torch.cpu
    ours: dict[str, Callable[..., Any]] = {
        "Stream": _make_stream,
        "Event": _make_event,
        "current_stream": lambda provider, device=None: provider.current_stream(),
        "stream": VirtualProvider.stream,
        "StreamContext": VirtualProvider.stream,
        "synchronize": lambda provider, device=None: provider.synchronize(),
    }
    before = {name: getattr(cpu, name) for name in ours}
    for name, method in ours.items():
        setattr(cpu, name, _in_ranks(method, before[name]))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(cpu, name, value)


def _in_ranks(method: Callable[..., Any], otherwise: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        provider = thread_provider()
        if not isinstance(provider, VirtualProvider):
            return otherwise(*args, **kwargs)
        return method(provider, *args, **kwargs)

    return call


def _make_stream(provider: VirtualProvider, priority: int = 0) -> Any:
    # The caller of `torch.cpu.Stream`: above this function and `call`.
    return provider.make_stream(priority, _assigned_to(sys._getframe(2)))


def _make_event(provider: VirtualProvider, *_: Any, **__: Any) -> Any:
    return provider.make_event(False)


_ASSIGNMENT = re.compile(r"\s*self\.(\w+)_stream\b[^=]*=")


def _assigned_to(frame: FrameType) -> str:
    """ "all_gather" where the line is `self.all_gather_stream = ...Stream(`, or ""."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = _ASSIGNMENT.match(line)
    return found[1] if found else ""
