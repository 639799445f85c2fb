"""Ranks as processes of this machine: a pool that lives from call to call.

Light to import; torch and the processes come with the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlaplab.cluster.pool.pool import Outcome

__all__ = ["close", "run_processes"]


def run_processes(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    world_size: int,
    backend: str,
    timeout_s: float,
    measure: bool = True,
) -> Outcome:
    """Call `fn(*args, **kwargs)` once on each of `world_size` processes.

    The processes stay for the next call. Each starts with the same random state, a
    copy of the arguments, and torch.distributed initialised. What a rank prints
    appears here as "[rank 1] ...".

    Args:
        fn, args, kwargs: pickled with their closures; see `pickling`.
        world_size: number of processes.
        backend: "gloo", or "nccl" with one GPU of this machine each.
        timeout_s: deadline of the call; starting processes does not count.
        measure: profile the ranks. It costs microseconds an operator.

    Returns:
        `Outcome(values, timeline, warnings)`; tensors in `values` are on the CPU.

    Raises:
        TypeError: `fn`, an argument or a result cannot be pickled.
        RankError: a rank raised, or its process died.
        RunTimeoutError: the deadline passed; says where each rank was. Where the
            ranks wait for one another it is a DeadlockError too.
    """
    from overlaplab.cluster.pool.pool import the_pool

    return the_pool().run(
        fn, args, kwargs, world_size, backend, timeout_s, measure=measure
    )


def close() -> None:
    """End all processes of the pool; the next call starts new ones."""
    from overlaplab.cluster.pool.pool import the_pool

    the_pool().close()
