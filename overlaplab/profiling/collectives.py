"""The Python methods through which collectives are launched and waited for.

c10d's `ProcessGroup` and `Work` cover torch.distributed's functions, the coalescing
manager, object collectives, FSDP2 and our reducers. Collectives that C++ launches by
itself (DDP's reducer, functional collectives, compiled graphs) pass elsewhere. Knows no
clock and no cluster.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

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
