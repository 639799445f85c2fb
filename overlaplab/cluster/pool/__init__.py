"""Ranks as processes of this machine: a pool that lives from call to call.

Light to import; torch and the processes come with the first call.
"""

from __future__ import annotations

from typing import Any

__all__ = ["close", "run_processes"]


def run_processes(*args: Any, **kwargs: Any) -> Any:
    """Call a function once on each of some processes; see `Pool.run`."""
    from overlaplab.cluster.pool.pool import the_pool

    return the_pool().run(*args, **kwargs)


def close() -> None:
    """End all processes of the pool; the next call starts new ones."""
    from overlaplab.cluster.pool.pool import the_pool

    the_pool().close()
