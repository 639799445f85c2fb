"""Calls that mean something else in the threads of ranks, while a run is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from overlaplab.cluster.virtual.recorder import current_recorder

Patch = tuple[Any, str, Any]  # owner.name is another one
_INHERITED = object()


def in_ranks(owner: Any, name: str, act: Callable[..., Any]) -> Patch:
    """In a rank, `owner.name(...)` is `act(recorder, original, ...)`."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        if recorder is None:
            return original(*args, **kwargs)
        return act(recorder, original, *args, **kwargs)

    return owner, name, call


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """While open, all of `patches` are in place."""
    patches = list(patches)
    before = [
        (owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in patches
    ]
    try:
        for owner, name, new in patches:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in before:
            if old is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
