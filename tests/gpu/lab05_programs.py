"""What the GPU test of lab 05 runs on every rank: the lesson's reducers, unchanged."""

from __future__ import annotations

import torch.distributed as dist

from overlaplab.grading import fixtures
from overlaplab_course.lab05 import given, reference
from overlaplab_course.lab05.repairs import KINDS, RepairCase

STEPS = 3


def worst_gradient(name: str, device: str = "cuda") -> float:
    """The largest difference to one process, relative to its tensor's largest value."""
    fixture = given.UNTIED.fixture
    if name in KINDS:
        fixture = RepairCase(name, (512, 640, 512), dist.get_world_size()).fixture
    right, _ = fixtures.oracle(fixture, steps=STEPS, world_size=dist.get_world_size())
    model = fixture.build(dist.get_rank()).to(device)
    reducer = getattr(reference, name)(model)
    optimizer = fixtures.make_sgd(model)
    worst = 0.0
    for step in range(1, STEPS + 1):
        batch = [t.to(device) for t in fixture.make_batch(dist.get_rank(), step)]
        fixture.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
        reducer.wait()
        for param_name, param in model.named_parameters():
            wanted = right[step - 1][param_name]
            assert param.grad is not None and wanted is not None
            off = (param.grad.cpu() - wanted).abs().max() / wanted.abs().max()
            worst = max(worst, float(off))
        optimizer.step()
        optimizer.zero_grad()
    return worst
