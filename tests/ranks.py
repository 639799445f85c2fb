"""Functions on ranks without a timeline, which costs more than what small nets compute.

For tests that look at values and findings only. A refusal is the same with a timeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from overlaplab.cluster.pool.pool import Outcome, the_pool
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import Finding, find_deadlock, find_findings
from tests.guards import GUARD_S

CLUSTERS = ("virtual", "gloo")


class On(NamedTuple):
    """Where a test runs."""

    cluster: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.cluster}-{self.ranks}"


EVERYWHERE = [On(cluster, ranks) for ranks in (2, 3) for cluster in CLUSTERS]
everywhere = pytest.mark.parametrize("on", EVERYWHERE, ids=str)


class Untimed(NamedTuple):
    """Of the virtual cluster, as far as it is known without a hardware profile."""

    values: tuple[Any, ...]
    warnings: tuple[Finding, ...]


def run_untimed(
    fn: Callable[..., Any], *args: Any, cluster: str = "virtual", world_size: int = 2
) -> Untimed | Outcome:
    """As `ol.run`; what it returns has `values` and `warnings`."""
    if cluster == "virtual":
        values, program = run_virtual(
            fn, args, {}, world_size=world_size, timeout_s=GUARD_S
        )
        deadlock = find_deadlock(program)  # of streams; ranks had one raised to them
        if deadlock is not None:
            raise deadlock
        return Untimed(values, find_findings(program))
    pool = the_pool()
    return pool.run(fn, args, {}, world_size, cluster, GUARD_S, measure=False)


def run_on(on: On, fn: Callable[..., Any], *args: Any) -> Untimed | Outcome:
    """As `run_untimed`."""
    return run_untimed(fn, *args, cluster=on.cluster, world_size=on.ranks)


def values_of(
    fn: Callable[..., Any], *args: Any, cluster: str = "virtual", world_size: int = 2
) -> tuple[Any, ...]:
    """What each rank returns; nothing is looked for in the record."""
    if cluster == "virtual":
        return run_virtual(fn, args, {}, world_size=world_size, timeout_s=GUARD_S)[0]
    return run_untimed(fn, *args, cluster=cluster, world_size=world_size).values


def values_on(on: On, fn: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    """As `values_of`."""
    return values_of(fn, *args, cluster=on.cluster, world_size=on.ranks)


def run_here(
    fn: Callable[..., Any],
    *args: Any,
    backend: str,
    world_size: int,
    environment: object = None,
) -> None:
    """As `processes.run_ranks`, on processes that tests share: torch is there."""
    assert not environment, "these have begun already"
    values_of(fn, *args, cluster=backend, world_size=world_size)
