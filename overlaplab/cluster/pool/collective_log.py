"""What a rank's process launched and waits for, readable while the rank hangs.

A gloo or NCCL process cannot say why it hangs. So each rank notes its collectives in a
file that the parent holds too: the methods of c10d's `ProcessGroup` and `Work` are
wrapped once a process, which covers torch.distributed's functions, the coalescing
manager and object collectives. Collectives that C++ launches on its own (DDP's reducer,
functional collectives) are not seen. Does not know the pool, and reads no clock.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from overlaplab.profiling.collectives import (
    Call,
    Label,
    Watcher,
    describe_group,
    launch_range,
    num_bytes,
    tensors_in,
    wait_range,
    watching,
)

POINT_TO_POINT = ("send", "recv")
# Besides `wait` and `synchronize`, any of these means that the caller takes care of the
# work's end.
_TAKEN_BY = ("get_future", "result", "block_current_stream", "is_completed")
_is_completed = Work.is_completed
_MAX_ENTRIES = 20_000


@dataclass(frozen=True, slots=True)
class Launch:
    """One collective that this rank launched."""

    number: int  # zero-based index in the call, over all groups
    group: str  # "default", or the communicator's name
    ranks: tuple[int, ...]  # its global ranks
    sequence: int  # zero-based index in its group
    operation: str  # "all_reduce", ...
    # "float32[4, 2]", the first tensor and how many more; "" without tensors. For
    # point-to-point with the peer: "float32[4] with rank 1"
    payload: str
    label: str  # innermost annotation
    bytes: int = 0  # the larger of all inputs and all outputs

    def __str__(self) -> str:
        group = "" if self.group == "default" else f" of process group {self.group!r}"
        label = f" ({self.label})" if self.label else ""
        return f"{self.operation} #{self.sequence}{group}{label}"

    @property
    def is_point_to_point(self) -> bool:
        return self.operation in POINT_TO_POINT


class CollectiveLog(Watcher):
    """The notes of one call of one rank; written as they happen."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.label = Label()
        self.measuring = False
        self.begin()

    def begin(self) -> None:
        """Forget the last call."""
        self._number = 0
        self._sequences: Counter[str] = Counter()
        self._written = 0
        # A work stays here, alive, until somebody takes care of its end.
        self._in_flight: dict[int, tuple[Launch, Any]] = {}
        self._coalescing: list[Launch] | None = None
        self._rewind()

    def in_flight(self) -> list[Launch]:
        """Launches whose work nobody took care of, in order."""
        with self._lock:
            return [launch for launch, _ in self._in_flight.values()]

    def unfinished(self) -> list[Launch]:
        """Those of `in_flight()` that have not ended."""
        with self._lock:
            works = list(self._in_flight.values())
        return [launch for launch, work in works if not _is_completed(work)]

    def sequences(self) -> dict[str, int]:
        """How many collectives this rank launched in each group."""
        return dict(self._sequences)

    # What `watching` asks of a watcher.

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        launch = self._note(group, operation, arguments)
        with self._range(_launch_range(launch)):
            work = call()
        with self._lock:
            if self._coalescing is not None:
                self._coalescing.append(launch)
            elif work is not None:
                self._in_flight[id(work)] = (launch, work)
        return work

    def start_coalescing(self, call: Call, group: Any) -> Any:
        self._coalescing = []
        return call()

    def end_coalescing(self, call: Call, group: Any) -> Any:
        """One work stands for all that was launched since `start_coalescing`."""
        work = call()
        launches, self._coalescing = self._coalescing, None
        if launches and work is not None:
            with self._lock:
                self._in_flight[id(work)] = (launches[-1], work)
        return work

    def wait(self, call: Call, work: Any) -> Any:
        launch = self.take(work)
        if launch is None:
            return call()
        with self._lock:
            self._write("wait", launch)
        with self._range(wait_range(launch.operation)):
            result = call()
        with self._lock:  # not after an exception: then the wait is where it failed
            self._write("done", launch)
        return result

    def _range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        on = self.measuring
        return torch.profiler.record_function(name) if on else contextlib.nullcontext()

    def _note(self, group: Any, operation: str, arguments: tuple[Any, ...]) -> Launch:
        name, ranks = describe_group(group)
        point_to_point = operation in POINT_TO_POINT
        counter = f"{name} p2p" if point_to_point else name
        with self._lock:
            launch = Launch(
                self._number,
                name,
                ranks,
                self._sequences[counter],
                operation,
                _describe_payload(arguments, ranks if point_to_point else ()),
                self.label.name,
                max(map(num_bytes, arguments), default=0),
            )
            self._number += 1
            self._sequences[counter] += 1
            self._write("launch", launch)
        return launch

    def take(self, work: Any) -> Launch | None:
        """Somebody takes care of the end of `work`; the launch, the first time."""
        with self._lock:
            entry = self._in_flight.pop(id(work), None)
        return entry[0] if entry else None

    def _write(self, event: str, launch: Launch) -> None:
        if self._written >= _MAX_ENTRIES:
            self._rewind()
        self._written += 1
        line = json.dumps([event, *(getattr(launch, name) for name in _FIELDS)])
        os.write(self._file, line.encode() + b"\n")

    def _rewind(self) -> None:
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self._written = 0


_FIELDS = tuple(Launch.__slots__)


@dataclass(frozen=True, slots=True)
class Notes:
    """What a collective log says, read from outside."""

    launches: tuple[Launch, ...] = ()  # in order
    # the collective in which the rank is blocked, if it is
    waits_in: Launch | None = None


def read_notes(file: int) -> Notes:
    """Read a collective log's file, also while its rank writes or after it has died."""
    size = os.fstat(file).st_size
    lines = os.pread(file, size, 0).split(b"\n")[:-1]
    launches, waits_in = [], None
    for line in lines:
        try:
            event, number, group, ranks, *rest = json.loads(line)
        except ValueError:  # torn by a kill
            continue
        launch = Launch(number, group, tuple(ranks), *rest)
        if event == "launch":
            launches.append(launch)
        else:
            waits_in = launch if event == "wait" else None
    return Notes(tuple(launches), waits_in)


# --- The hooks -------------------------------------------------------------------

_installed: tuple[CollectiveLog, Any] | None = None  # with what keeps it at work


def install(file: int) -> CollectiveLog:
    """Make this process note its collectives in `file`, for good."""
    global _installed
    if _installed is not None:
        raise RuntimeError("this process has a collective log already")
    log = CollectiveLog(file)
    watch = watching(log)
    watch.__enter__()
    _installed = log, watch
    for method in _TAKEN_BY:
        if hasattr(Work, method):
            setattr(Work, method, _taking(log, method))
    return log


def _taking(log: CollectiveLog, method: str) -> Callable[..., Any]:
    original = getattr(Work, method)

    @functools.wraps(original)
    def take_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "is_completed" and not original(self):
            return False  # the caller polls, and must come back
        log.take(self)
        return original(self, *args, **kwargs)

    return take_and_call


def _launch_range(launch: Launch) -> str:
    return launch_range(
        launch.operation, launch.group, launch.sequence, launch.bytes, launch.label
    )


def _describe_payload(arguments: tuple[Any, ...], peers: tuple[int, ...]) -> str:
    tensors = list(tensors_in(arguments))
    if not tensors:
        return ""
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    peer = ""
    if peers and len(arguments) > 1 and isinstance(arguments[1], int):
        peer = f" with rank {peers[arguments[1]]}"
    return f"{dtype}{list(tensors[0].shape)}{more}{peer}"
