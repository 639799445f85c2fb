"""The process groups of techniques, and what their ranks say through the store.

A job has a communicator of its own, so that its collectives wait for nobody else's.
Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from overlaplab import streams

Group = dist.ProcessGroup

_own_groups: WeakKeyDictionary[Group, dict[str, Group]] = WeakKeyDictionary()


def own_group() -> Group:
    """The world; on NCCL a communicator of the reducers' own, at high priority.

    The virtual cluster gives that priority to all that the world sends from then on.

    Raises:
        ValueError: there is no process group.
    """
    world = _world()
    if dist.get_backend(world) == "nccl":
        return job_group("reduce")
    streams.go_first(world)
    return world


def job_group(job: str) -> Group:
    """All ranks, on a communicator for `job` alone; on NCCL at high priority.

    Without the priority a collective's blocks wait behind those of large matmuls. One
    a job is shared by all who do it in a process: each would cost GPU memory.
    Collective: every rank asks.

    Raises:
        ValueError: there is no process group.
    """
    world = _world()
    groups = _own_groups.setdefault(world, {})
    if job not in groups:
        options = None
        if dist.get_backend(world) == "nccl":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        groups[job] = dist.new_group(pg_options=options)
        streams.go_first(groups[job])
    return groups[job]


def asked_group(group: Group) -> Group:
    """The world if `group` is one of these, which have the same ranks; else `group`."""
    for world, groups in _own_groups.items():
        if any(own is group for own in groups.values()):
            return world
    return group


def checked_group(group: object) -> Group:
    """`group`, if it is a process group that this rank is in.

    Raises:
        TypeError: it is no process group.
        ValueError: this rank is not in it.
    """
    if isinstance(group, Group):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group does not contain this rank. Build the reducer on the "
            "group's ranks only."
        )
    raise TypeError(f"process_group is {group!r}; expected a ProcessGroup or None")


def is_registered(group: Group) -> bool:
    """Whether `group` has not been destroyed."""
    return group in dist.distributed_c10d._world.pg_map


def _world() -> Group:
    if not dist.is_initialized():
        raise ValueError(
            "torch.distributed has no process group. Run the function with "
            "ol.run(...) or under torchrun, or call init_process_group first."
        )
    world = dist.group.WORLD
    assert world is not None
    return world


T = TypeVar("T")


class OfGroups(Generic[T]):
    """Something for each group of the world, for as long as its store serves.

    Ranks forget it together, with what they said: `destroy_process_group` ends a store,
    and so does a run on a cluster, whose groups may serve the next one.

    Args:
        make: makes it where a group has none.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._by_store: WeakKeyDictionary[Any, dict[str, T]] = WeakKeyDictionary()

    def __getitem__(self, group: Group) -> T:
        by_name = self._by_store.setdefault(_store(), {})
        if group.group_name not in by_name:
            by_name[group.group_name] = self._make()
        return by_name[group.group_name]

    def __iter__(self) -> Iterator[T]:
        """All that there is, also of worlds that are gone or another rank's."""
        return chain.from_iterable(map(dict.values, tuple(self._by_store.values())))


_reducers = OfGroups(lambda: count(1))


def number_in(group: Group) -> int:
    """A number for one more reducer; ranks build theirs in one order."""
    return next(_reducers[group])


def exchange(group: Group, key: str, number: int) -> list[int]:
    """Every rank's number, through the store: collectives may be out of step.

    Args:
        key: the call and its number, as people know them: it is in reports.

    Raises:
        RuntimeError: a rank does not come.
    """
    return list(map(int, exchange_texts(group, key, str(number))))


def exchange_texts(group: Group, key: str, text: str) -> list[str]:
    """Every rank's text, as `exchange`."""
    say(group, key, text)
    ranks = dist.get_process_group_ranks(group)
    return [hear(group, key, rank) for rank in ranks]


def say(group: Group, key: str, text: str) -> None:
    """Leave a text for the ranks of a group, in the store; waits for nobody."""
    _store().set(_key(group, key, dist.get_rank()), text)


def hear(group: Group, key: str, rank: int) -> str:
    """What `rank` says; the CPU waits for it.

    Raises:
        RuntimeError: the rank does not come.
    """
    its = _key(group, key, rank)
    try:
        _store().wait([its])
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} did not come to {key} in time. Call it on every rank."
        ) from error
    return str(_store().get(its).decode())


def _key(group: Group, key: str, rank: int) -> str:
    where = f"{key} on rank {rank} of {group.group_name!r}"
    life = _life()
    return where if life == 1 else f"{where} in world {life}"


_lives: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def _life() -> int:
    """How often this rank has begun to speak on the world's store; equal on all ranks.

    torchrun's store serves a second `init_process_group` of the same processes, with
    all that was said in the world before.
    """
    store = _store()
    if store not in _lives:
        _lives[store] = store.add(f"worlds of rank {dist.get_rank()}", 1)
    return _lives[store]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
