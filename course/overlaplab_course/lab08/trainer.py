"""The trainer of lab 08's extras: one loop, with or without two of everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import run
from overlaplab.grading.forms import Examined
from overlaplab.timeline import Timeline
from overlaplab.view import format_bytes
from overlaplab_course import stored
from overlaplab_course.lab03.jobs import SET_UP
from overlaplab_course.lab08 import late
from overlaplab_course.peaks import most_bytes

NUM_BATCHES = 5
# A batch takes 2 ms from pinned memory and 4 from pageable.
BOARD = replace(late.BOARD, host_bytes_per_s=4 * 10**6, pageable_bytes_per_s=2 * 10**6)
# (model, loader, optimizer, served)
Train = Callable[..., object]


class Trained(Examined):
    """A loop that ran; `values`: by rank, whether what is served was trained last."""

    @property
    def timeline(self) -> Timeline:
        """Rank 0's, from the loop's first operator on."""
        own = self.run.timeline.of_rank(0)
        return own.where(lambda span: span.attributes.get("label") != SET_UP)


def play_trainer(train: Train) -> Trained:
    """Run `train(model, loader, optimizer, served)` on two ranks."""
    return Trained(run(_on_rank, train, world_size=2, hardware=BOARD, timeout_s=30))


def _on_rank(train: Train) -> bool:
    """Whether the model that is served has the weights of the one that was trained."""
    with streams.annotate(SET_UP):
        model = late.EQUAL.fixture.build(0)
        served = copy.deepcopy(model)
        draw = torch.Generator().manual_seed(80 + dist.get_rank())
        loader = [
            torch.randn(32, 64, generator=draw, device="cpu")
            for _ in range(NUM_BATCHES)
        ]
        optimizer = late.make_optimizer(model)
        streams.synchronize()
    train(model, loader, optimizer, served)
    pairs = zip(model.parameters(), served.parameters(), strict=True)
    return all(torch.equal(a.detach(), b.detach()) for a, b in pairs)


def trainers_table(runs: Mapping[str, Trained]) -> str:
    """Time, memory and findings of each."""
    rows = [
        (
            name,
            f"{seen.timeline.step_ns / 1e6:.1f}",
            format_bytes(most_bytes(seen.program)),
            str(len(seen.findings)),
        )
        for name, seen in runs.items()
    ]
    return stored.text_table(("", "ms", "memory", "findings"), rows)
