"""What the GPU tests of lab 08 run on every rank: a learner's code, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab_course.lab08 import late, reference

ROWS, WIDTH, NUM_BATCHES = 4096, 512, 24  # 8 MiB per batch, of inputs alone


def wrong_batches(way: str) -> list[int]:
    """The batches that a step did not get, whole and unspoiled, by "prefetch" or
    "double_buffered". Each step is busy before and between two looks at its batch."""
    batches = [_batch(i) for i in range(NUM_BATCHES)]
    right = [[float(t.double().sum()) for t in batch] for batch in batches]
    if way == "prefetch":
        fed = reference.prefetch(_pinned(batches))
    else:
        full = batches[0]
        pinned = [_like(full, pin=True) for _ in "AB"]
        device = [
            tuple(torch.empty_like(t, device=streams.device()) for t in full)
            for _ in "AB"
        ]
        fed = reference.double_buffered(iter(batches), pinned, device)
    seen = []
    for batch in fed:
        _be_busy()
        first = [t.double().sum() for t in batch]
        _be_busy()
        seen.append([first, [t.double().sum() for t in batch]])
    found = [[[float(x) for x in look] for look in looks] for looks in seen]
    assert len(found) == NUM_BATCHES
    return [
        i
        for i, looks in enumerate(found)
        if any(
            abs(x - y) > 1e-6 * abs(y)
            for k in looks
            for x, y in zip(k, right[i], strict=True)
        )
    ]


def _batch(number: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    rows = ROWS // 3 if number == NUM_BATCHES - 1 else ROWS
    return (
        torch.rand(rows, WIDTH, generator=draw),
        torch.rand(rows, 8, generator=draw),
    )


def _like(batch: tuple[torch.Tensor, ...], *, pin: bool) -> tuple[torch.Tensor, ...]:
    pin = pin and streams.device().type == "cuda"
    return tuple(torch.empty_like(t, pin_memory=pin) for t in batch)


def _pinned(
    batches: list[tuple[torch.Tensor, ...]],
) -> Iterator[tuple[torch.Tensor, ...]]:
    for batch in batches:
        held = _like(batch, pin=True)
        for target, source in zip(held, batch, strict=True):
            target.copy_(source)
        yield held


def _be_busy() -> None:
    if streams.device().type == "cuda":
        torch.cuda._sleep(3_000_000)  # about 2 ms


def worst_of_late(case: late.Case) -> float:
    """The largest difference of a weight to late training in one process."""
    rank, device, fixture = dist.get_rank(), streams.device(), case.fixture
    model = fixture.build(rank).to(device)
    reducer, optimizer = reference.LateReducer(model), late.make_optimizer(model)
    for step in range(1, case.num_steps + 1):
        batch = (t.to(device) for t in fixture.make_batch(rank, step))
        fixture.loss(model, *batch).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
        if step in case.flush_after and reducer.flush():
            optimizer.step()
            optimizer.zero_grad()
    _, right = late.right(case)
    return max(
        float((parameter.detach().cpu() - right[name]).abs().max())
        for name, parameter in model.named_parameters()
    )
