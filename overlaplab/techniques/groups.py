"""The process groups of techniques, and what their ranks say through the store.

A job has a communicator of its own, so that its collectives wait for nobody else's.
Knows no tensor.
"""

from __future__ import annotations

from typing import Any
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


# How many reducers each group has seen: equal on all ranks.
_numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def number_in(group: Group) -> int:
    """A number for one more reducer; ranks build theirs in one order."""
    _numbers[group] = _numbers.get(group, 0) + 1
    return _numbers[group]


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
    return f"{key} on rank {rank} of {group.group_name!r}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
