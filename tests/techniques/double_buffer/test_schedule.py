"""When batches are copied, on the virtual clock."""

from __future__ import annotations

import torch

import overlaplab as ol


def consume(num: int) -> list[float]:
    weight = torch.eye(512, device=ol.device())
    host = [torch.full((256, 512), float(i), device="cpu") for i in range(num)]
    return [(batch @ weight)[0, 0] for batch in ol.BatchPrefetcher(host)]


def test_the_next_batch_is_copied_while_this_one_is_computed_on() -> None:
    run = ol.run(consume, 4, world_size=1, hardware="chalk")
    assert run.warnings == ()
    found = sorted(run.timeline.spans, key=lambda s: (s.start_ns, s.end_ns))
    copies = [s for s in found if s.name == "copy h2d"]
    matmuls = [s for s in found if s.name == "mm"]
    assert len(copies) == len(matmuls) == 4
    for copy, matmul in zip(copies[2:], matmuls[1:], strict=False):
        assert copy.start_ns < matmul.end_ns
