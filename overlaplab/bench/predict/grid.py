"""What is predicted and measured: models, batches, variants, links, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Set before NCCL starts; without P2P the GPUs talk through the host's memory.
LINKS: dict[str, dict[str, str]] = {"nvlink": {}, "p2p-off": {"NCCL_P2P_DISABLE": "1"}}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The configurations of the comparison.

    Args:
        batches: sizes for each model of `data_parallel.MODELS`.
        launch_bound: the same, of steps that wait for the CPU; they are reported apart.
        buckets_mib: caps of the bucketed reducer.
        tokens: sequence length.
        links: of `LINKS`.
        rounds: most blocks of each variant; the time that is left may allow fewer.
        steps_a_round: counted steps of a block.
        warmup: steps before a variant is timed.
    """

    batches: Mapping[str, tuple[int, ...]]
    launch_bound: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buckets_mib: tuple[float, ...] = (12, 50, 200, 800)
    tokens: int = 1024
    links: tuple[str, ...] = tuple(LINKS)
    rounds: int = 5
    steps_a_round: int = 3
    warmup: int = 3

    def cases(self) -> list[tuple[str, int, bool]]:
        """(model, batch, whether it is bound by launches)."""
        return [
            (name, batch, apart)
            for sizes, apart in ((self.batches, False), (self.launch_bound, True))
            for name, several in sizes.items()
            for batch in several
        ]

    def variants(self) -> dict[str, float | None]:
        """Name to bucket cap, None where there is none."""
        return {
            "serial": None,
            "per parameter": None,
            **{f"bucketed {cap:g}": cap for cap in self.buckets_mib},
        }


# Batches that keep the GPU busy: earlier measurements of this benchmark (results/
# data_parallel-2xH100-2026-11-28.json) say that eager steps of fewer sequences are
# bound by launches here, and then vary by a fifth from one round to the next.
GPU = Grid(
    batches={
        "gpt-162m": (20, 28, 40),
        "gpt-738m": (6, 8, 12),
        "gpt-1.4b": (5, 6, 8),
    },
    launch_bound={"gpt-162m": (8,), "gpt-738m": (2,)},
)
REHEARSAL = Grid(
    batches={"tiny": (1, 2)},
    buckets_mib=(0.05, 0.2),
    tokens=16,
    rounds=1,
    steps_a_round=2,
    warmup=1,
)
