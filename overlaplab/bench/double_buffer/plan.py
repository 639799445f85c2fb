"""How much the benchmark of double buffering measures."""

from __future__ import annotations

from dataclasses import dataclass

from overlaplab.bench.workload import MAIN, plans

PARTS = ("prefetch", "reducer")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    batches_mib: tuple[float, ...] = (1, 8, 64, 256, 512)  # of the prefetcher
    loaders: tuple[str, ...] = ("pinned", "pageable", "torch's workers")
    # a step's length in times of its copy's, but at least so long
    lengths: tuple[float, ...] = (1.25, 3.0)
    least_ms: float = 2.0
    matmul_width: int = 4096
    # that fill pinned memory; torch's own number may be that of a whole host
    fill_threads: int = 8
    # before each block, at least so many steps and so long: what worked ahead is used
    # up, and the clock of a GPU falls in tens of milliseconds of matmuls
    settling: int = 8
    settling_ms: float = 150.0
    model: str = MAIN
    batches: tuple[int, ...] = (1, 2, 8)  # sequences on each rank, of the reducers
    tokens: int = 1024  # of a sequence
    caps_mib: tuple[float, ...] = (25, 100, 400)  # sizes of buckets to try
    warmup: int = 3  # steps before a way is timed
    rounds: int = 7  # at most; the time that is left may allow fewer
    steps_a_round: int = 8


BRIEF, REHEARSAL = plans("double_buffer", Plan).values()
