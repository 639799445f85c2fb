"""Nested batches: the leaves are replaced, the nesting and its types stay.

Knows tuples, lists, dicts, their kin, dataclasses and attrs classes, and nothing of
devices or streams.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserString, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

Replace = Callable[[Any], Any]
# By id: an object (kept, so that no other gets its id), what it was replaced by, and
# how often it was met since.
_Done = dict[int, list[Any]]

_ATOMS = frozenset({bool, complex, float, int, range})
# Sequences of what is no tensor; some of an item that is one of them again.
_TEXTS = (str, bytes, bytearray, memoryview, array.array, UserString)


def replace_leaves(batch: Any, replace: Replace) -> Any:
    """`batch` with `replace(leaf)` in the place of every leaf.

    Leaves are tensors, and objects whose class has a method `pin_memory`, or `to`
    unless they are mappings or sequences. Looked into are those (mappings: their
    values), dataclasses and attrs classes. All else is kept as it is, sets too. It is
    what torch's DataLoader does, which knows no dataclasses and no `to`.

    Args:
        batch: not changed.
        replace: called once for each leaf, in order. A leaf that is there twice is
            replaced by one object.

    Returns:
        What holds no leaf that changed is the same object as before, otherwise a new
        one of the same type, made without `__init__` where Python can.

    Raises:
        TypeError: a container cannot be made anew: its class copies neither itself nor
            takes its content as its only argument, or it holds itself.
    """
    return _replaced(batch, replace, {})


def moves_itself(value: Any) -> bool:
    """Whether its class has `pin_memory`, or `to` and no items to look at."""
    if has_method(value, "pin_memory"):
        return True
    return has_method(value, "to") and not isinstance(value, (Mapping, Sequence))


def has_method(value: Any, name: str) -> bool:
    """Whether its class says so: in an instance, `to` may be a field."""
    return not isinstance(value, type) and callable(getattr(type(value), name, None))


def _replaced(value: Any, replace: Replace, done: _Done) -> Any:
    if value is None or type(value) in _ATOMS or isinstance(value, _TEXTS):
        return value
    known = done.get(id(value))
    if known is not None:
        known[2] += 1
        return known[1]
    done[id(value)] = entry = [value, value, 0]
    if isinstance(value, Tensor) or moves_itself(value):
        new = replace(value)
    else:
        content = _content(value)
        changed = {}
        for key, child in content:
            other = _replaced(child, replace, done)
            if other is not child:
                changed[key] = other
        if changed and entry[2]:
            raise TypeError(
                f"a {type(value).__name__} in a batch holds tensors and, somewhere "
                "within, itself: no other can be made of it. Repair: leave out what "
                "points back"
            )
        new = _with(value, changed) if changed else value
    entry[1] = new
    return new


def _content(value: Any) -> Iterable[tuple[Any, Any]]:
    """What is in `value`, by key, index or attribute."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, Sequence):
        return enumerate(value)
    return [(n, getattr(value, n)) for n in _fields(value) if hasattr(value, n)]


def _fields(value: Any) -> list[str]:
    """The names of the attributes of a dataclass or attrs class."""
    if isinstance(value, type):
        return []
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return [field.name for field in getattr(type(value), "__attrs_attrs__", ())]


def _with(value: Any, changed: Mapping[Any, Any]) -> Any:
    """A new `value` with other content at some places."""
    if isinstance(value, tuple):
        return _with_items(value, changed)
    if not isinstance(value, (Mapping, Sequence)):
        new = copy.copy(value)
        for name, child in changed.items():
            object.__setattr__(new, name, child)  # frozen ones, too
        return new
    # A copy of any other class may share its content with the original.
    if isinstance(value, (dict, list, deque)) or hasattr(type(value), "__copy__"):
        clone: Any = copy.copy(value)
        if clone is not value:
            for key, child in changed.items():
                clone[key] = child
            return clone
    content: Any
    if isinstance(value, Mapping):
        content = {**value, **changed}
    else:
        content = [changed.get(i, child) for i, child in enumerate(value)]
    try:
        make: Any = type(value)
        return make(content)
    except TypeError as error:
        raise TypeError(
            f"a {type(value).__name__} in a batch holds tensors, and no other can be "
            f"made of its type: {type(value).__name__}(content) failed: {error}. "
            "Repair: give the class a method to(device, non_blocking=False) that "
            "returns it moved, or __copy__ and __setitem__"
        ) from error


def _with_items(value: tuple[Any, ...], changed: Mapping[int, Any]) -> Any:
    items = [changed.get(i, child) for i, child in enumerate(value)]
    make: Any = type(value)
    try:
        new = tuple.__new__(make, items)
    except TypeError:  # torch.return_types.max and the like
        return make(items)
    if hasattr(value, "__dict__"):
        new.__dict__.update(vars(value))
    return new
