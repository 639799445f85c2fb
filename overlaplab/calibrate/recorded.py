"""The calibration's models as the virtual cluster records them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlaplab import streams
from overlaplab.calibrate.plan import ModelCase
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import Op, Program

_FIRST = "embedding"  # the first operator of a step of our transformer


def record_steps(
    config: TransformerConfig,
    batch: int,
    tokens: int,
    dtype: str,
    *,
    num_steps: int,
    num_ranks: int = 2,
    make_reducer: Callable[[torch.nn.Module], Any] | None = None,
) -> Program:
    """Forward, backward and averaging on one rank that stands for all, no values.

    Args:
        config, batch, tokens, dtype: the model and its input.
        num_steps: one after the other, after the model and the reducer were made.
        num_ranks: of the job.
        make_reducer: as `BucketedReducer`; None: forward and backward alone.
    """
    from overlaplab.cluster.virtual import run_virtual
    from overlaplab.hardware import find_hardware

    def steps() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device(streams.device()):
                model = Transformer(config)
                text = torch.zeros(batch, tokens, dtype=torch.int64)
        finally:
            torch.set_default_dtype(before)
        reducer = make_reducer(model) if make_reducer else None
        for _ in range(num_steps):
            model.zero_grad()
            model(text, text).backward()
            if reducer is not None:
                reducer.wait()

    _, program = run_virtual(
        steps,
        (),
        {},
        world_size=num_ranks,
        hardware=find_hardware("chalk"),
        timeout_s=600,
        fake=True,
    )
    return program


def step_starts(ops: tuple[Op, ...]) -> list[int]:
    """The indices of the operators with which the steps begin."""
    return [op.index for op in ops if op.name == _FIRST and op.phase == "forward"]


def operators_of_step(case: ModelCase, dtype: str) -> tuple[Op, ...]:
    """The operators of one step of `case` without a reducer, in order."""
    program = record_steps(case.config(), case.batch, case.tokens, dtype, num_steps=1)
    (ops,) = program.ranks
    return ops[step_starts(ops)[0] :]
