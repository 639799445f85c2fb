"""A window of `no_sync()`: many micro-batches, one message per bucket, one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.techniques.data_parallel import AllReduce, BucketedReducer
from tests.ranks import On, everywhere, run_on

NUM_LAYERS, WIDTH = 4, 64
LAYER_BYTES = 4 * WIDTH**2
NUM_MICRO = 3


class CountingWire(AllReduce):
    """Notes how many tensors each launch has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.sizes: list[int] = []

    def launch(self, tensors: list[Tensor]) -> Any:
        self.sizes.append(len(tensors))
        return super().launch(tensors)


def train(num_micro: int, cut_short: bool = False) -> tuple[list[int], int]:
    """Sizes of the messages of two windows, and how many buckets the plan has."""
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
    )
    assert dist.group.WORLD is not None
    wire = CountingWire(dist.group.WORLD)
    bucket_mib = 2 * LAYER_BYTES / 2**20  # two layers
    reducer = BucketedReducer(model, bucket_mib=bucket_mib, wire=wire)
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        model.zero_grad()
        with reducer.no_sync():
            for _ in range(num_micro - 1 + cut_short):
                model(x).sum().backward()
        if not cut_short:
            model(x).sum().backward()
        reducer.wait()
    return wire.sizes, len(reducer.plan)


@everywhere
@pytest.mark.parametrize("cut_short", [False, True])
def test_each_bucket_is_sent_once_in_each_window(on: On, cut_short: bool) -> None:
    found = run_on(on, train, NUM_MICRO, cut_short)
    # Two layers a bucket; the last one brings the flags.
    assert tuple(found.values) == (([2, 3, 2, 3], 2),) * on.ranks
    assert found.warnings == ()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_timeline_has_them_once_too_and_behind_the_last_micro_batch(
    ranks: int,
) -> None:
    spans = ol.run(train, NUM_MICRO, world_size=ranks).timeline.of_rank(0).spans
    collectives = [s for s in spans if s.kind == "communication"]
    sent = [s for s in collectives if s.attributes["label"].startswith("bucket")]
    assert [s.attributes["label"] for s in sent] == ["bucket 0", "bucket 1"] * 2
    products = [s for s in spans if s.name == "mm"]
    per_window = len(products) // 2
    # Before a window's first message: all of its products but those of two layers.
    early = [s for s in products if s.start_ns < sent[0].start_ns]
    assert per_window * (NUM_MICRO - 1) // NUM_MICRO < len(early) < per_window


def test_accumulation_has_one_copy_of_the_gradients() -> None:
    peaks = []
    for num_micro in (1, NUM_MICRO, 2 * NUM_MICRO):
        (memory,) = ol.run(train, num_micro).timeline.of_rank(0).memory
        peaks.append(memory.peak_bytes)
    one, some, more = peaks
    assert some == more
    # A new gradient is there until it is added to the old one: of one layer, no more.
    assert LAYER_BYTES <= some - one < 2 * LAYER_BYTES < NUM_LAYERS * LAYER_BYTES
