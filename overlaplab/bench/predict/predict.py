"""The same programs on the virtual cluster: step and exposed time by a profile."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from overlaplab.bench.workload import MODELS
from overlaplab.calibrate.operators import record_steps, step_starts
from overlaplab.hardware import Hardware
from overlaplab.program import Program, resolve
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
    model: str,
    batch: int,
    tokens: int,
    dtype: str,
    cap_mib: float | None,
    kind: str,
    num_steps: int,
) -> Program:
    """Steps one after the other, on a representative rank, from the device at rest."""

    def reducer(module: nn.Module) -> Reducer:
        if cap_mib is not None:
            return BucketedReducer(module, bucket_mib=cap_mib)
        return SerialReducer(module) if kind == "serial" else HookReducer(module)

    sizes = MODELS[model], batch, tokens, dtype
    return from_first_step(
        record_steps(*sizes, num_steps=num_steps, make_reducer=reducer)
    )


def from_first_step(program: Program) -> Program:
    """`program` without the construction of model and reducer."""
    (ops,) = program.ranks
    first = step_starts(ops)[0]
    steps = tuple(
        replace(
            op,
            index=op.index - first,
            after=tuple(a - first for a in op.after if a >= first),
            reads=(),
            writes=(),
        )
        for op in ops[first:]
    )
    return replace(program, ranks=(steps,), storages=(), names=())


def predict(
    program: Program, hardware: Hardware, *, steps_a_round: int, profiled_steps: int
) -> Prediction:
    """Time steps as the measurement does: some in a row, after one that warms up.

    Exposed time is that of the last `profiled_steps` of as many more: like the profiled
    ones they find the CPU ahead of the device.
    """
    timeline = resolve(program, hardware)
    starts = step_starts(program.ranks[0])
    ends = step_ends(timeline, starts)
    times = [b - a for a, b in itertools.pairwise(ends[: steps_a_round + 1])]
    first = starts[-profiled_steps]
    last = timeline.where(lambda span: span.attributes.get("op", 0) >= first)
    exposed_ns = last.report().exposed_ns // profiled_steps
    return Prediction(int(statistics.median(times)), exposed_ns)


def step_ends(timeline: Timeline, starts: Sequence[int]) -> list[int]:
    """When the last operator of each step ends, on the stream that waits for all.

    Args:
        starts: the operators with which the steps begin.
    """
    ends = [0] * len(starts)
    for span in timeline.spans:
        step = bisect_right(starts, span.attributes["op"]) - 1
        if span.kind in ("compute", "communication") and step >= 0:
            ends[step] = max(ends[step], span.end_ns)
    return ends
