"""What a calibration measures: sizes and counts, of which `plan.toml` has the usual."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from overlaplab.models import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A transformer of which every operator is timed."""

    d_model: int
    num_heads: int
    vocab_size: int
    batch: int  # of sequences
    num_layers: int = 2
    tokens: int = 1024  # of one sequence

    def config(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """How much to measure."""

    dtype: str  # of the models
    models: tuple[ModelCase, ...]  # whose operators are timed, smallest first
    launch_model: ModelCase  # small, so that its step is bound by launches
    matmul_sizes: tuple[int, ...]  # square matrices, for each of `matmul_dtypes`
    matmul_dtypes: tuple[str, ...]  # names of torch's dtypes
    memory_bytes: tuple[int, ...]  # of copies in device memory, and to the host
    wire_bytes: tuple[int, ...]  # payloads of all-reduces of one tensor
    coalesced: tuple[tuple[int, int], ...]  # all-reduces of (tensors, bytes in all)
    contention: ModelCase  # runs beside collectives
    beside_bytes: int  # payload of the all-reduces that run beside it
    small_beside_bytes: tuple[int, ...]  # of small ones
    beside_ns: int  # of kernels of one kind that run beside a few of them
    most_sends: int  # at most so many beside one step
    hot_ns: int  # a measurement that depends on heat runs at least so long
    repeats: int = 5  # of each measurement
    steps: int = 4  # of the models, of which the median is taken
    # of eight steps of the launch model, in turn with each reducer
    launch_rounds: int = 5


_PLANS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, CalibrationPlan]
)
GPU, CPU = _PLANS["gpu"], _PLANS["cpu"]
