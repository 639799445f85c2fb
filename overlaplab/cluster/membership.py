"""What a script finds out, and may ask for again, of the world that it runs in.

A script for `torchrun` reads its rank from the environment and calls
`init_process_group`. In a rank of `run` the world is there already: the environment
says so in torchrun's words, and the call is accepted if it asks for the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from overlaplab.torch_versions import rewrapped

Init = Callable[..., None]


@dataclass(frozen=True)
class Member:
    """A rank of a run."""

    rank: int  # global rank
    world_size: int  # number of ranks
    backends: tuple[str, ...]  # those that the cluster is, or stands for; its own first
    # makes the world again after `destroy_process_group`; gets torch's
    # `init_process_group`
    connect: Callable[[Init], None]

    def check(self, backend: Any, world_size: int | None, rank: int | None) -> None:
        """Raise ValueError if a script asks for another world than it is in.

        Args:
            backend, world_size, rank: as `init_process_group` gets them; None or -1
                ask for nothing.
        """
        asked = [part.rpartition(":")[2] for part in str(backend or "").split(",")]
        if backend and not set(asked) & set(self.backends):
            known = " or ".join(map(repr, self.backends))
            self._refuse(f"backend={str(backend)!r}", f"the cluster is {known}")
        if world_size not in (None, -1, self.world_size):
            found = f"the run has world_size={self.world_size}"
            self._refuse(f"world_size={world_size}", found)
        if rank not in (None, -1, self.rank):
            self._refuse(f"rank={rank}", f"this is rank {self.rank}")

    def _refuse(self, asked: str, found: str) -> None:
        argument = asked.partition("=")[0]
        raise ValueError(
            f"init_process_group({asked}) on rank {self.rank} of ol.run: {found}, and "
            f"torch.distributed is initialised with it already. Leave {argument} out, "
            "or change the call of ol.run."
        )


def environment_of(rank: int, world_size: int, port: int = 29500) -> dict[str, str]:
    """What torchrun sets for a rank on one machine, and that it is a rank of `run`."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OVERLAPLAB_RANK": str(rank),
    }


ENVIRONMENT = tuple(environment_of(0, 1))


@contextlib.contextmanager
def accepting_init(member: Callable[[], Member | None]) -> Iterator[None]:
    """In this block ranks may call `init_process_group` once more; see `Member`. The
    calling thread is `member()`; None where it is no rank, or its world is being
    made."""

    def accepting(init: Init) -> Init:
        def init_again(
            backend: Any = None,
            init_method: Any = None,
            timeout: Any = None,
            world_size: int | None = -1,
            rank: int | None = -1,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            me = member()
            if me is None:
                init(backend, init_method, timeout, world_size, rank, *args, **kwargs)
                return
            me.check(backend, world_size, rank)
            if not dist.is_initialized():
                me.connect(init)

        return init_again

    with rewrapped(dist.init_process_group, accepting):
        yield


@contextlib.contextmanager
def empty_store(name: str) -> Iterator[None]:
    """In this block the world's store has nothing in it that was said before.

    A world serves many runs, and keys that one leaves would be read by the next.
    `name` is new each time, and the same on all ranks.
    """
    world = dist.group.WORLD
    kept: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    backend, store = kept[world]
    kept[world] = backend, dist.distributed_c10d.PrefixStore(name, store)
    try:
        yield
    finally:
        if world in kept:  # else the function destroyed it
            kept[world] = backend, store
