"""The same programs on the virtual cluster: step and exposed time by a profile."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from overlaplab.bench.workload import MODELS
from overlaplab.calibrate.operators import record_steps, step_starts
from overlaplab.hardware import Hardware
from overlaplab.program import Op, Program, resolve
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
    SerialReducer,
)
from overlaplab.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one configuration, in nanoseconds."""

    step_ns: int  # the median of the steps of a block, as they are measured
    exposed_ns: int  # a step's, of the profiled ones


def record_variant(
    model: str, batch: int, tokens: int, dtype: str, cap_mib: float | None, kind: str
) -> tuple[Op, ...]:
    """The operators of one step in the middle of many, on a representative rank."""

    def reducer(module: nn.Module) -> Reducer:
        if cap_mib is not None:
            return BucketedReducer(module, bucket_mib=cap_mib)
        return SerialReducer(module) if kind == "serial" else HookReducer(module)

    sizes = MODELS[model], batch, tokens, dtype
    return middle_step(record_steps(*sizes, num_steps=2, make_reducer=reducer))


def middle_step(program: Program) -> tuple[Op, ...]:
    """The second of two steps of `program`, numbered as if both began at 0.

    The operators keep what they wait for in the step before them: index `len(step)`
    and on is this step, below that the one before.

    Raises:
        ValueError: the steps differ, or there are not two.
    """
    (ops,) = program.ranks
    starts = step_starts(ops)
    if len(starts) != 2 or starts[1] - starts[0] != len(ops) - starts[1]:
        raise ValueError(
            f"expected two equal steps, found beginnings at {starts} of {len(ops)}"
        )
    return tuple(
        replace(
            op,
            index=op.index - starts[0],
            after=tuple(a - starts[0] for a in op.after if a >= starts[0]),
            reads=(),
            writes=(),
        )
        for op in ops[starts[1] :]
    )


def repeat(step: tuple[Op, ...], num_steps: int, num_ranks: int) -> Program:
    """A program of `num_steps` equal steps, from the device at rest on."""
    length = len(step)
    sequences: dict[str, Iterator[int]] = defaultdict(itertools.count)
    ops: list[Op] = []
    for number in range(num_steps):
        shift = (number - 1) * length
        for op in step:
            collective = op.collective
            if collective is not None:
                sequence = next(sequences[collective.group])
                collective = replace(collective, sequence=sequence)
            ops.append(
                replace(
                    op,
                    index=op.index + shift,
                    after=tuple(a + shift for a in op.after if a + shift >= 0),
                    collective=collective,
                )
            )
    return Program((tuple(ops),), world_size=num_ranks, represents=num_ranks)


def predict(
    step: tuple[Op, ...],
    hardware: Hardware,
    *,
    steps_a_round: int,
    profiled_steps: int,
    num_ranks: int = 2,
) -> Prediction:
    """Time a step as the measurement does: some in a row, after one that warms up.

    Exposed time is that of the last `profiled_steps` of as many more: like the profiled
    ones they find the CPU ahead of the device.
    """
    num_steps = 1 + steps_a_round + profiled_steps
    timeline = resolve(repeat(step, num_steps, num_ranks), hardware)
    ends = step_ends(timeline, len(step))
    times = [b - a for a, b in itertools.pairwise(ends[: steps_a_round + 1])]
    first = (num_steps - profiled_steps) * len(step)
    last = timeline.where(lambda span: span.attributes.get("op", 0) >= first)
    exposed_ns = last.report().exposed_ns // profiled_steps
    return Prediction(int(statistics.median(times)), exposed_ns)


def step_ends(timeline: Timeline, length: int) -> list[int]:
    """When the last operator of each step ends, on the stream that waits for all.

    Args:
        timeline: of `repeat`.
        length: operators of a step.
    """
    ends: dict[int, int] = defaultdict(int)
    for span in timeline.spans:
        if span.kind in ("compute", "communication"):
            number = span.attributes["op"] // length
            ends[number] = max(ends[number], span.end_ns)
    return [ends[number] for number in sorted(ends)]
