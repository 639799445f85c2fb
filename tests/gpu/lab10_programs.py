"""What the GPU test of lab 10 runs on every rank: the step of a learner, unchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlaplab_course.lab10 import given, reference
from overlaplab_course.lab10.given import Stack, split

# Wide enough that a gather takes longer than its launch.
STACK = Stack(num_layers=6, width=1024, rows=2048, tables=(0, 0, 3000, 0, 0, 0))


def worst_of_a_step(depth: int, steps: int = 3) -> float:
    """The largest difference to one process, relative to the largest value."""
    n, rank = dist.get_world_size(), dist.get_rank()
    weights = STACK.weights()
    shards = [[part.cuda() for part in split(layer, n)] for layer in weights]
    grads = [[torch.zeros_like(part) for part in layer] for layer in shards]
    inputs = [x.cuda() for x in STACK.inputs(n)]
    parts = (reference.prefetched, (depth,), reference.forward, reference.backward)
    outputs, whole = STACK.right(n)
    worst = 0.0
    for _ in range(steps):
        held = given.step_on_rank(STACK, shards, grads, inputs, *parts)
        y, mine = held.value
        pairs = [(y, outputs[rank])]
        pairs += [
            (part, split(layer, n)[rank])
            for part, layer in zip(mine, whole, strict=True)
        ]
        for seen, right in pairs:
            off = (seen.cpu() - right).abs().max() / right.abs().max()
            worst = max(worst, float(off))
    return worst
