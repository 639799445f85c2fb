"""What the notebook of lab 04 calls: `from overlaplab_course import lab04 as lab`.

Its exercises are graded in `collectives`, `waits`, `window`, `small`, `ring`, `repair`
and `choose`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.timeline import Timeline
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.board import (
    BOARD,
    message_ns,
    play,
    shares_text,
)
from overlaplab_course.lab04.choose import CASES
from overlaplab_course.lab04.collectives import (
    after_each,
    all_gather,
    collectives_table,
    compare_predictions,
    crossings,
    reduce_scatter,
)
from overlaplab_course.lab04.measured import (
    by_size_table,
    machine,
    measure_it_here,
    number,
    predicted_ms,
    small_table,
    stored,
    ways_table,
    windows_table,
)
from overlaplab_course.lab04.repair import broken_blocks, luck_us, patient
from overlaplab_course.lab04.ring import (
    bus_of_ours,
    measured_points,
    play_ring,
    points_machine,
    ring_inputs,
    ring_of_ours,
    ring_text,
)
from overlaplab_course.lab04.small import latencies, one_by_one, play_small
from overlaplab_course.lab04.waits import (
    experts_inputs,
    layer_inputs,
    two_sums_inputs,
)
from overlaplab_course.lab04.window import (
    backward,
    backward_us,
    messages_alive,
    play_window,
)

__all__ = [
    "BOARD",
    "CASES",
    "after_each",
    "all_gather",
    "backward",
    "backward_us",
    "broken_blocks",
    "bus_of_ours",
    "by_size_table",
    "collectives_table",
    "compare_predictions",
    "crossings",
    "experts_inputs",
    "halves",
    "keep",
    "latencies",
    "layer_inputs",
    "luck_us",
    "machine",
    "measure_it_here",
    "measured_points",
    "message_ns",
    "messages_alive",
    "mine_or_ours",
    "number",
    "one_by_one",
    "patient",
    "play",
    "play_ring",
    "play_small",
    "play_window",
    "points_machine",
    "predicted_ms",
    "reduce_scatter",
    "ring_inputs",
    "ring_of_ours",
    "ring_text",
    "shares_text",
    "side_by_side",
    "small_table",
    "stored",
    "two_sums_inputs",
    "ways_table",
    "whose",
    "windows_table",
]

_kept = Kept({"4.3": reference.experts, "4.4": reference.average_gradients})
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def whose(exercise_id: str) -> str:
    """ "yours" or "the course's"."""
    return "yours" if exercise_id in _kept else "the course's"


@lru_cache(maxsize=1)
def halves() -> dict[str, Timeline]:
    """One all-reduce of 400 kB, and its two halves."""
    inputs = [(torch.ones(100_000),) for _ in range(4)]
    return {
        "all_reduce": play(_whole, inputs).timeline,
        "reduce_scatter, then all_gather": play(_two_halves, inputs).timeline,
    }


def _whole(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _two_halves(tensor: torch.Tensor) -> None:
    part = tensor.new_empty(tensor.numel() // dist.get_world_size())
    reduce_scatter(part, tensor)
    all_gather(tensor, part)
