"""The Python methods through which collectives are launched and waited for, and the
ranges by which a CPU process marks them in a trace of torch.profiler.

c10d's `ProcessGroup` and `Work` cover torch.distributed's functions, the coalescing
manager, object collectives, FSDP2 and our reducers. Collectives that C++ launches by
itself (DDP's reducer, functional collectives, compiled graphs) pass elsewhere. Knows no
clock and no cluster.

[Note: ranges of gloo]
Gloo's own ranges are those of its threads: when bytes travel, and nothing of who sent
them. Ours say who launched what, under which label, and who waited; a reader pairs the
two by their order. In a rank of the process pool its collective log writes the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from overlaplab import streams
from overlaplab.profiling.trace.names import LAUNCH_RANGE, WAIT_RANGE
from overlaplab.torch_versions import OPERATIONS

Call = Callable[[], Any]
_INHERITED = object()


class Watcher:
    """Stands around every launch and wait; each method calls `call` exactly once."""

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        return call()

    def start_coalescing(self, call: Call, group: Any) -> Any:
        return call()

    def end_coalescing(self, call: Call, group: Any) -> Any:
        return call()

    def wait(self, call: Call, work: Any) -> Any:
        return call()


@contextlib.contextmanager
def watching(
    watcher: Watcher, *, group_class: Any = ProcessGroup, work_class: Any = Work
) -> Iterator[None]:
    """While open, every launch and wait of this process goes through `watcher`.

    Where a group's method calls another one, as groups in Python do, the outer counts.
    """
    patches: list[tuple[Any, str, Any]] = []
    here = threading.local()

    def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            # What getattr gives of pybind's methods does not bind when it is put back.
            patches.append((owner, name, vars(owner).get(name, _INHERITED)))
            original = getattr(owner, name)
            setattr(owner, name, functools.wraps(original)(make(original)))

    def around_launch(operation: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
                call = functools.partial(original, self, *args, **kwargs)
                if getattr(here, "launching", False):
                    return call()
                here.launching = True
                try:
                    arguments = (*args, *kwargs.values())
                    return watcher.launch(call, self, operation, arguments)
                finally:
                    here.launching = False

            return launch

        return make

    def around(method: Callable[[Call, Any], Any]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
                return method(functools.partial(original, self, *args, **kwargs), self)

            return watched

        return make

    for name, operation in OPERATIONS.items():
        patch(group_class, name, around_launch(operation))
    patch(group_class, "_start_coalescing", around(watcher.start_coalescing))
    patch(group_class, "_end_coalescing", around(watcher.end_coalescing))
    for name in ("wait", "synchronize"):
        patch(work_class, name, around(watcher.wait))
    try:
        yield
    finally:
        for owner, name, before in reversed(patches):
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


# Torch's own methods, whatever has been put around them.
def wait_for(work: Any) -> None:
    """Wait for `work`, unseen by those who watch."""
    inspect.unwrap(type(work).wait)(work)


def future_of(work: Any) -> Any:
    """The future of `work`, unseen by those who watch."""
    return inspect.unwrap(type(work).get_future)(work)


def describe_group(group: Any) -> tuple[str, tuple[int, ...]]:
    """ "default" or the communicator's name, and its global ranks."""
    if group is dist.group.WORLD:
        return "default", tuple(range(dist.get_world_size()))
    ranks = tuple(dist.get_process_group_ranks(group))
    description = group.group_desc
    named = description and description != "undefined"
    return (description if named else group.group_name), ranks


def num_bytes(value: Any) -> int:
    """Of the tensors in an argument."""
    # Not `nbytes`: sparse tensors, which gloo reduces, have none.
    return sum(t.numel() * t.element_size() for t in tensors_in(value))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument: one, or nested lists of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def sequence_numbers() -> dict[Any, int]:
    """For each group of this rank how many collectives it has launched, in any way."""
    found: dict[Any, int] = {}
    if not (dist.is_available() and dist.is_initialized()):
        return found
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(RuntimeError, AttributeError):
            found[group] = int(group._get_sequence_number_for_group())
    return found


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
    """While open, launches and waits of this process are ranges, unless they are.

    See [Note: ranges of gloo].
    """
    if hasattr(ProcessGroup.allreduce, "__wrapped__"):  # by the pool's collective_log
        yield
        return
    ranges = _Ranges()
    with streams.listening_to_ranges(ranges.label.entered), watching(ranges):
        yield


class Label(threading.local):
    """The innermost range of the calling thread."""

    name = ""

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """What this thread launches in the `with` block carries `name`."""
        outer, self.name = self.name, name
        try:
            yield
        finally:
            self.name = outer


class _Ranges(Watcher):
    def __init__(self) -> None:
        self.label = Label()
        self._sequences: Counter[str] = Counter()
        # Until somebody waits: an id is a work's own only while that is alive.
        self._works: dict[int, tuple[Any, str]] = {}

    def launch(
        self, call: Call, group: Any, operation: str, arguments: tuple[Any, ...]
    ) -> Any:
        name, _ = describe_group(group)
        sequence = self._sequences[name]
        self._sequences[name] += 1
        size = max(map(num_bytes, arguments), default=0)
        what = launch_range(operation, name, sequence, size, self.label.name)
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
