"""Loads a checkpoint into a sharded model and its optimizers: all of it, or nothing.

[Note: what is known before anything is read]
An optimizer that has made no step has no states to load into, and only its code knows
which ones it will have. So the checkpoint is asked: its metadata says which tensors
there are. What does not fit is found there, on every rank alike. The values are read
into memory of their own and take their places when every rank has all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.storage import StorageReader
from torch.optim import Optimizer

from overlaplab.techniques.zero.checkpoint import (
    groups_of,
    model_state,
    restore_optimizer,
)
from overlaplab.techniques.zero.differences import (
    differing_names,
    differing_shape,
    differing_tensors,
    raise_differences,
    shape_of,
)
from overlaplab.techniques.zero.pieces import BoxedTensor, Piece

Source = str | os.PathLike[str] | StorageReader
_STATES, _GROUPS, _MODEL = "optimizer.state.", "optimizer.param_groups.", "model."


def load(
    source: Source,
    at: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    pieces: Sequence[Piece],
    group: dist.ProcessGroup,
) -> None:
    """Read and check everything, then change `model` and `optimizers`. Collective.

    Args:
        source: a folder, or what reads another storage.
        at: what every key begins with: nothing, or something that ends with a dot.
        model: sharded, its state dicts not refused.
        optimizers: over pieces; none: the model alone is read.
        pieces: of the model.
        group: the ranks.

    Raises:
        ValueError: names or shapes differ; nothing is changed then.
    """
    storage = _Storage(source, at, group)
    state = model_state(model, pieces)
    groups = list(groups_of(optimizers, pieces))
    storage.check(differing_tensors(storage.below(_MODEL), state, "the checkpoint"))
    room: dict[str, Any] = {}
    if groups:
        empty = {key: _empty(md) for key, md in storage.below(_GROUPS).items()}
        settings = _nested(storage.read(_GROUPS, empty), str.partition)
        storage.check(_differing_groups(settings, [mine for _, _, mine in groups]))
        updated = {piece.info.name: piece for _, _, mine in groups for piece in mine}
        room, problems = _room_for_states(storage.below(_STATES), updated)
        storage.check(problems)
    values = storage.read(_MODEL, {name: _room(value) for name, value in state.items()})
    states = _nested(storage.read(_STATES, room), str.rpartition)

    with torch.no_grad():
        for name, value in state.items():
            if isinstance(value, BoxedTensor):
                value.flat.copy_(values.pop(name).flat)
    model.load_state_dict(values, strict=False)  # buffers and extra states
    for optimizer in optimizers:
        its = [
            (group, settings[str(number)], mine)
            for number, (owner, group, mine) in enumerate(groups)
            if owner is optimizer
        ]
        restore_optimizer(optimizer, its, states)


class _Storage:
    """What is in a checkpoint below `at`, and reading it. Every rank's is equal."""

    def __init__(self, source: Source, at: str, group: dist.ProcessGroup) -> None:
        self._reader: Any = source
        if isinstance(source, str | os.PathLike):
            self._reader = FileSystemReader(source)
        self._saved = self._reader.read_metadata().state_dict_metadata
        self._source, self._at, self._group = source, at, group
        if not self.below(_MODEL):
            some = ", ".join(list(self._saved)[:3]) or "none"
            raise ValueError(
                f"the checkpoint {source} has no key that begins with "
                f"{at + _MODEL!r}; some that it has: {some}. What stands before "
                "'model.' there is the prefix= of load_checkpoint()."
            )

    def check(self, problems: Iterable[str]) -> None:
        """Raise ValueError if there are any."""
        if found := list(problems):
            raise_differences(f"the checkpoint {self._source}", found)

    def below(self, start: str) -> dict[str, Any]:
        """Metadata by the rest of its key."""
        start = self._at + start
        return {
            key.removeprefix(start): stored
            for key, stored in self._saved.items()
            if key.startswith(start)
        }

    def read(self, start: str, into: Mapping[str, Any]) -> dict[str, Any]:
        """The values of keys below `start`, tensors in the memory that is given."""
        values = {f"{self._at}{start}{key}": value for key, value in into.items()}
        if values:
            load_in_place(
                values, storage_reader=self._reader, process_group=self._group
            )
        return dict(zip(into, values.values(), strict=True))


def _nested(values: Mapping[str, Any], split: Any) -> dict[str, dict[str, Any]]:
    """{"0.lr": 1} as {"0": {"lr": 1}}, split at the first dot or at the last."""
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        first, _, rest = split(key, ".")
        nested.setdefault(first, {})[rest] = value
    return nested


def _empty(stored: Any) -> Tensor | None:
    """Room for what has this metadata; None for what is no tensor."""
    if isinstance(stored, TensorStorageMetadata):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return None


def _room(value: Any) -> Any:
    """For another value of its kind."""
    if isinstance(value, BoxedTensor):
        return value.with_room()
    return torch.empty_like(value) if isinstance(value, Tensor) else deepcopy(value)


def _differing_groups(
    settings: Mapping[str, dict[str, Any]], groups: Sequence[Sequence[Piece]]
) -> Iterator[str]:
    if len(settings) != len(groups):
        yield (
            f"the checkpoint has {len(settings)} groups of optimizers, and "
            f"{len(groups)} are to be loaded"
        )
        return
    for number, mine in enumerate(groups):
        names = [piece.info.name for piece in mine]
        its = map(str, settings.get(str(number), {}).get("params", ()))
        yield from differing_names(its, names, f"group {number} of the checkpoint")


def _room_for_states(
    saved: Mapping[str, Any], updated: Mapping[str, Piece]
) -> tuple[dict[str, Any], list[str]]:
    """What states are read into, by NAME.KEY, and what does not fit."""
    nested = _nested(saved, str.rpartition)
    # Of a parameter without dimensions every state looks like a number.
    numbers = {"step"} | {
        key
        for name, its in nested.items()
        for key, stored in its.items()
        if name in updated and updated[name].shape and _is_number(stored)
    }
    room: dict[str, Any] = {}
    problems = [
        f"{name} has states in the checkpoint, and no optimizer here updates it"
        for name in nested
        if name not in updated
    ]
    for name, piece in updated.items():
        for key, stored in nested.get(name, {}).items():
            where = f"{name}.{key}"
            if shape_of(stored) is None or (_is_number(stored) and key in numbers):
                room[where] = _empty(stored)
            else:
                problems += differing_shape(where, stored, piece.shape)
                room[where] = piece.boxed().with_room(stored.properties.dtype)
    return room, problems


def _is_number(stored: Any) -> bool:
    return shape_of(stored) == ()
