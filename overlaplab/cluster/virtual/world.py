"""torch.distributed's idea of the process, one for each rank thread.

During a run `torch.distributed` sees the world of the calling rank; other threads see
the process's own as before. Everything is put back at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.membership import Init, Member, accepting_init
from overlaplab.cluster.virtual.communicator import Communicator
from overlaplab.cluster.virtual.group import VirtualGroup
from overlaplab.cluster.virtual.meeting import Meetings
from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder, current_recorder, rank_here
from overlaplab.cluster.virtual.streams import torch_cpu_streams
from overlaplab.streams import install_thread_provider
from overlaplab.torch_versions import BaseStore, rewrapped

BACKEND = "virtual"
_c10d_native: Any = torch._C._distributed_c10d  # its stubs lack a name


class _WorldOfThread:
    """Stands in for c10d's `_world`: each rank has its own."""

    def __init__(self, process_world: Any) -> None:
        object.__setattr__(self, "process_world", process_world)

    def __getattr__(self, name: str) -> Any:
        world = getattr(rank_here, "world", None)
        return getattr(self.process_world if world is None else world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        world = getattr(rank_here, "world", None)
        setattr(self.process_world if world is None else world, name, value)


@contextlib.contextmanager
def worlds_of_threads() -> Iterator[None]:
    """While open, threads that `join` have a world of their own."""
    names = ("_backend", "_default_pg_init_method")
    saved = [(c10d, n, getattr(c10d, n)) for n in names if hasattr(c10d, n)]

    def make_group(_: Recorder, helper: Any, *args: Any, **kwargs: Any) -> Any:
        """In a rank every group is virtual, whatever backend it names."""
        kwargs.pop("backend_options", None)
        return helper(*args[:3], BACKEND, *args[4:], **kwargs)

    def member() -> Member | None:
        return getattr(rank_here, "member", None)

    if not hasattr(dist.Backend, BACKEND.upper()):
        how: Any = {"extended_api": True, "devices": ["cpu"]}
        dist.Backend.register_backend(BACKEND, _create, **how)
    patches = (
        *saved,  # put back what `connect` sets
        (sys, "excepthook", sys.excepthook),
        (c10d, "_world", _WorldOfThread(c10d._world)),
        in_ranks(c10d, "_new_process_group_helper", make_group),
        in_ranks(c10d, "split_group", _split_group),
        in_ranks(dist, "split_group", _split_group),
    )
    try:
        with patched(patches), torch_cpu_streams(), accepting_init(member):
            _c10d_native._set_thread_isolation_mode(True)
            yield
    finally:
        _c10d_native._set_thread_isolation_mode(False)


def join(recorder: Recorder, meetings: Meetings, world_size: int, store: Any) -> None:
    """Make the calling thread a rank: `torch.distributed` is initialised in it."""
    rank_here.recorder = recorder
    rank_here.meetings = meetings
    rank_here.world = SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        pg_config_info=[],
        comms=[],
    )
    # Kept here: C++ holds the store, but not the Python object with its methods.
    rank_here.store = RankStore(store, recorder)
    rank_here.num_worlds = 0

    def connect(init: Init) -> None:
        """Also after a `destroy_process_group`: then under other names."""
        member, rank_here.member = rank_here.member, None
        where = c10d.PrefixStore(f"world {rank_here.num_worlds}", rank_here.store)
        rank_here.num_worlds += 1
        init(BACKEND, rank=recorder.rank, world_size=world_size, store=where)
        rank_here.member = member

    rank_here.member = None
    connect(dist.init_process_group)
    backends = (BACKEND, "gloo", "nccl")
    rank_here.member = Member(recorder.rank, world_size, backends, connect)


# Of objects, which have values where tensors have none; of messages the peer's matter.
_OF_OBJECTS = (
    *("all_gather_object", "gather_object"),
    *("scatter_object_list", "broadcast_object_list"),
)


@contextlib.contextmanager
def objects_have_values() -> Iterator[None]:
    """While open, ranks whose tensors are fake send pickles of objects as they are."""

    def with_values(send: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if current_recorder() is None:
                return send(*args, **kwargs)
            with unset_fake_temporarily():
                return send(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in _OF_OBJECTS:
            stack.enter_context(rewrapped(getattr(dist, name), with_values))
        yield


def inherit() -> Callable[[], None]:
    """The result makes the thread that calls it a thread of the calling one's rank."""
    mine = dict(vars(rank_here))

    def become() -> None:
        vars(rank_here).update(mine)
        for group, name in rank_here.world.pg_names.items():  # C++ has a list a thread
            _c10d_native._register_process_group(name, group)

    return become


def leave(*, late: bool) -> None:
    """The calling thread is no rank any more. `late`: the run has ended without it; its
    groups are no longer registered apart from the process's own, so leave all of them
    alone."""
    if not late:
        _c10d_native._unregister_all_process_groups()
    vars(rank_here).clear()


def _leave_in_child() -> None:
    """A process that a rank forks (a loader's worker) is no rank, though its thread is
    a copy of the rank's: there nobody records, and there are no other ranks."""
    if current_recorder() is not None:
        vars(rank_here).clear()
        install_thread_provider(None)
        rank_here.modes = _disable_current_modes()  # kept: its end would put them back
        rank_here.modes.__enter__()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_in_child)


def _split_group(
    _: Recorder,
    __: Any,
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **___: Any,
) -> Any:
    """As `dist.split_group`, which wants NCCL: the own group, None if in none. The
    ranks are in the parent's numbers."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    ranks = dist.get_process_group_ranks(parent_pg)
    for part in split_ranks:
        members = [ranks[i] for i in part]
        if dist.get_rank() in members:
            return dist.new_group(
                members, use_local_synchronization=True, group_desc=group_desc
            )
    return None


def _create(options: Any, _: Any) -> VirtualGroup:
    recorder = current_recorder()
    if recorder is None:
        raise RuntimeError(
            'backend "virtual" exists in the ranks of ol.run(cluster="virtual") only'
        )
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return VirtualGroup(
        Communicator(
            recorder,
            rank_here.meetings,
            options.group_rank,
            ranks,
            str(options.group_id),
            rank_here.num_worlds,
        )
    )


@dataclass(frozen=True)
class KeyWait:
    """What a rank waits for whose CPU stands in `store.get` or `store.wait`."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        # torch puts the group's name and "//" before the user's key.
        keys = [repr(key.rpartition("//")[2]) for key in self.keys]
        return f"waits for {', '.join(keys)} in the store"


class RankStore(BaseStore):  # type: ignore[misc]
    """One rank's handle of the run's key-value store: waiting hands on the turn.

    torch's own stores block in C++ while the rank holds the turn: nobody could ever
    set the key.
    """

    def __init__(self, shared: Any, recorder: Recorder) -> None:
        super().__init__()
        self._shared = shared
        self._recorder = recorder

    def get(self, key: str) -> Any:
        self._until(lambda: self._shared.check([key]), (key,))
        return self._shared.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._until(lambda: self._shared.check(list(keys)), tuple(keys))

    def set(self, key: str, value: Any) -> None:
        self._shared.set(key, value)

    def add(self, key: str, amount: int) -> Any:
        return self._shared.add(key, amount)

    def check(self, keys: Sequence[str]) -> Any:
        return self._shared.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._shared.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> Any:
        return self._shared.delete_key(key)

    def num_keys(self) -> Any:
        return self._shared.num_keys()

    def _until(self, there: Callable[[], bool], keys: tuple[str, ...]) -> None:
        if not there():
            recorder = self._recorder
            recorder.turns.block(recorder.thread, there, KeyWait(keys))
