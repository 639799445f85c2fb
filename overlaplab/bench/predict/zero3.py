"""What the virtual cluster says of the whole steps that `zero3` measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from overlaplab import streams
from overlaplab.bench.predict.predict import from_first_step, predict
from overlaplab.bench.sharded import WAYS
from overlaplab.bench.workload import MODELS, default_dtype
from overlaplab.hardware import Hardware
from overlaplab.models import Transformer
from overlaplab.program import Program

NOT_PREDICTED = ("ddp",)  # C++ that needs values
CAPTURED = "captured"
NUM_STEPS = 3  # ours finds its plan in the first; one is timed, one profiled


def predict_zero3(
    measured: dict[str, Any],
    hardware: Hardware,
    models: Sequence[str] = (),
    batches: Sequence[int] = (),
) -> Iterator[str]:
    """Add `predicted_ms` and `predicted_exposed_ms` to each way of each case.

    A step in a CUDA graph is the same step, launched for nothing.

    Args:
        measured: what the benchmark wrote; is changed.
        hardware: the profile.
        models, batches: those alone; empty: all.

    Yields:
        A line for each, when it is there.
    """
    measured["predicted_with"] = hardware.name
    for model in measured["models"]:
        if models and model["model"] not in models:
            continue
        for case in model["cases"]:
            if batches and case["batch"] not in batches:
                continue
            for way, row in case["variants"].items():
                if way in NOT_PREDICTED:
                    continue
                size = case["batch"], case["tokens"]
                eager = way.removesuffix(CAPTURED).rstrip(", ")
                program = record_way(
                    eager, model["model"], size, model["dtype"], measured["world_size"]
                )
                hw = _without_launches(hardware) if eager != way else hardware
                found = predict(program, hw, steps_a_round=1, profiled_steps=1)
                row["predicted_ms"] = round(found.step_ns / 1e6, 4)
                row["predicted_exposed_ms"] = round(found.exposed_ns / 1e6, 4)
                yield (
                    f"{model['model']}, batch {case['batch']}, {way}: "
                    f"{row['predicted_ms']:.2f} ms predicted, "
                    f"{row['median_ms']:.2f} measured"
                )


def _without_launches(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        launch_ns=0,
        backward_launch_ns=0,
        collective_launch_ns=0,
        collective_part_launch_ns=0,
    )


def record_way(
    way: str, model: str, size: tuple[int, int], dtype: str, num_ranks: int
) -> Program:
    """Steps one after the other, on one rank that stands for all, no values.

    Args:
        way: of `WAYS`.
        model: of `MODELS`.
        size: sequences, and tokens of each.
        dtype: of the model.
        num_ranks: of the job.
    """
    from overlaplab.cluster.virtual import run_virtual

    def steps() -> None:
        with default_dtype(dtype), torch.device(streams.device()):
            module = Transformer(MODELS[model])
        text: Tensor = torch.zeros(size, dtype=torch.int64, device=streams.device())
        training = WAYS[way](module)
        for _ in range(NUM_STEPS):
            training.step((text, text))

    _, program = run_virtual(
        steps, (), {}, world_size=num_ranks, timeout_s=600, fake=True
    )
    return from_first_step(program)
