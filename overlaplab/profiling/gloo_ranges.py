"""Ranges by which a CPU process marks its collectives in a trace of torch.profiler.

Gloo's own ranges are those of its threads: when bytes travel, and nothing of who sent
them. These say who launched what, under which label, and who waited. A reader pairs the
two by their order. In a rank of the process pool its collective log writes the
same ranges.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from overlaplab import streams
from overlaplab.profiling import collectives
from overlaplab.profiling.collectives import Call, Watcher, num_bytes
from overlaplab.profiling.trace.names import LAUNCH_RANGE, WAIT_RANGE


def launch_range(
    operation: str, group: str, sequence: int, num_bytes: int, label: str
) -> str:
    """The name of the range around a launch."""
    fields = (operation, group, str(sequence), str(num_bytes), label)
    return LAUNCH_RANGE + "|".join(map(printable, fields))


def wait_range(operation: str) -> str:
    """The name of the range around a wait."""
    return WAIT_RANGE + operation


def printable(name: str) -> str:
    """A range's name without what the profiler would write unescaped."""
    return name.replace('"', "'").replace("\\", "/").replace("\n", " ")


@contextlib.contextmanager
def marking_collectives() -> Iterator[None]:
    """While open, launches and waits of this process are ranges, unless they are."""
    if hasattr(ProcessGroup.allreduce, "__wrapped__"):  # by the pool's collective_log
        yield
        return
    ranges = _Ranges()
    with streams.listening_to_ranges(ranges.label), collectives.watching(ranges):
        yield


class _Ranges(Watcher):
    def __init__(self) -> None:
        self._here = threading.local()
        self._sequences: Counter[str] = Counter()
        # Until somebody waits: an id is a work's own only while that is alive.
        self._works: dict[int, tuple[Any, str]] = {}

    @contextlib.contextmanager
    def label(self, name: str) -> Iterator[None]:
        outer = getattr(self._here, "label", "")
        self._here.label = name
        try:
            yield
        finally:
            self._here.label = outer

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        name, _ = collectives.describe_group(group)
        sequence = self._sequences[name]
        self._sequences[name] += 1
        size = max(map(num_bytes, arguments), default=0)
        label = getattr(self._here, "label", "")
        what = launch_range(operation, name, sequence, size, label)
        with torch.profiler.record_function(what):
            work = call()
        if work is not None:
            self._works[id(work)] = (work, operation)
        return work

    def wait(self, call: Call, work: Any) -> Any:
        _, operation = self._works.pop(id(work), (None, ""))
        if not operation:
            return call()
        with torch.profiler.record_function(wait_range(operation)):
            return call()
