"""What a calibration measures: sizes and counts, of which `plan.toml` has the usual."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from overlaplab.models import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A transformer of which every operator is timed.

    Args:
        d_model, num_heads, vocab_size, num_layers: of the model.
        batch: sequences.
        tokens: of one sequence.
    """

    d_model: int
    num_heads: int
    vocab_size: int
    batch: int
    num_layers: int = 2
    tokens: int = 1024

    def config(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """How much to measure.

    Args:
        dtype: of the models.
        models: whose operators are timed, smallest first.
        launch_model: small, so that its step is bound by launches.
        matmul_sizes: square matrices, for each of `matmul_dtypes`.
        matmul_dtypes: names of torch's dtypes.
        memory_bytes: tensors that are copied in device memory, and to the host.
        wire_bytes: payloads of all-reduces of one tensor.
        coalesced: (tensors, bytes in all) of coalesced all-reduces.
        contention: the model that runs beside collectives, and for how many steps.
        beside_bytes: payload of the all-reduces that run beside it.
        small_beside_bytes: of small ones.
        most_sends: at most so many beside one step.
        hot_ns: a measurement that depends on heat runs at least so long.
        repeats: of each measurement.
        steps: of the models, of which the median is taken.
        launch_rounds: of eight steps of the launch model, in turn with each reducer.
    """

    dtype: str
    models: tuple[ModelCase, ...]
    launch_model: ModelCase
    matmul_sizes: tuple[int, ...]
    matmul_dtypes: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    coalesced: tuple[tuple[int, int], ...]
    contention: ModelCase
    beside_bytes: int
    small_beside_bytes: tuple[int, ...]
    most_sends: int
    hot_ns: int
    repeats: int = 5
    steps: int = 4
    launch_rounds: int = 5


_PLANS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, CalibrationPlan]
)
GPU, CPU = _PLANS["gpu"], _PLANS["cpu"]


def quick(plan: CalibrationPlan) -> CalibrationPlan:
    """Every other model and size, fewer repeats: coarser, in less than half the time.

    The largest are kept: beyond them a profile extrapolates.
    """
    return replace(
        plan,
        models=plan.models[::-2][::-1],
        matmul_sizes=plan.matmul_sizes[::-2][::-1],
        memory_bytes=plan.memory_bytes[::-2][::-1],
        wire_bytes=plan.wire_bytes[::2],
        coalesced=plan.coalesced[::-2][::-1],
        repeats=max(2, plan.repeats // 2),
        steps=3,
        launch_rounds=max(1, plan.launch_rounds // 2),
    )
