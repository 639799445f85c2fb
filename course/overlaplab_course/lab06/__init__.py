"""What the notebook of lab 06 calls: `from overlaplab_course import lab06 as lab`.

Its exercises are graded in `plan`, `reduce`, `choose`, `reading`,
`repair` and `settings`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from overlaplab.cluster.run import run
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.hardware import Hardware
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import Program, replay
from overlaplab.streams import annotate
from overlaplab.timeline import Timeline
from overlaplab.view.stacking import Picture
from overlaplab.view.units import percentages
from overlaplab_course.lab06 import choose, plan, reduce, reference
from overlaplab_course.lab06.measured import (
    machine,
    measured,
    message_points,
    stored_benchmarks,
    stored_ms,
)
from overlaplab_course.lab06.reading import KNOBS, WHAT_IF, turn
from overlaplab_course.lab06.repair import patient
from overlaplab_course.lab06.runs import (
    ETHERNET,
    INFINIBAND,
    LAYERS,
    MIB,
    NUM_RANKS,
    NVLINK,
    SEQUENCE,
    STEP,
    WIDTH,
    GivenRun,
    Message,
    cut,
    in_bfloat16,
    measured_step,
    name_gradients,
    three_runs,
)
from overlaplab_course.lab06.settings import try_ddp
from overlaplab_course.lab06.state import ReducerState

__all__ = [
    "ETHERNET",
    "INFINIBAND",
    "KNOBS",
    "NVLINK",
    "WHAT_IF",
    "backward_ns",
    "GivenRun",
    "Message",
    "ReducerState",
    "cut",
    "draw_valleys",
    "gradient_bytes",
    "in_bfloat16",
    "keep",
    "machine",
    "measure_it_here",
    "measured",
    "measured_step",
    "message_points",
    "messages",
    "mine_or_ours",
    "name_gradients",
    "patient",
    "record_reducer",
    "shares_text",
    "side_by_side",
    "stored_benchmarks",
    "stored_ms",
    "sweep",
    "three_runs",
    "try_ddp",
    "turn",
    "valley",
    "whose",
]

_kept = Kept(
    {
        "6.1": reference.plan_buckets,
        "6.2": reference.install_hooks,
        "6.3": reference.finish,
    }
)
keep, mine_or_ours = _kept.keep, _kept.mine_or_ours


def whose(*exercise_ids: str) -> str:
    """Whose reducer the parts make: the learner's only if each part is theirs."""
    mine = all(exercise_id in _kept for exercise_id in exercise_ids)
    return "your reducer" if mine else "the course's reducer"


def shares_text(timeline: Timeline) -> str:
    """The shares of the critical path, in the percents of `view.table`."""
    shares_ns = timeline.critical_path().shares_ns
    named = zip(shares_ns, percentages(shares_ns.values()), strict=True)
    return ", ".join(f"{share} {percent} %" for share, percent in named if percent)


def record_reducer(
    plan_buckets: Callable[..., Sequence[Sequence[int]]],
    install_hooks: Callable[[ReducerState], Any],
    finish: Callable[[ReducerState], Any],
    *,
    sequences: int,
    bucket_mib: float = 25,
) -> Program:
    """The 24-layer step with a reducer out of three parts, shapes only."""
    recorded = run(
        _reducer_step,
        plan_buckets,
        install_hooks,
        finish,
        sequences,
        int(bucket_mib * MIB),
        world_size=NUM_RANKS,
        fake=True,
        timeout_s=90,
    )
    assert recorded.program is not None
    return cut(recorded.program)


def _reducer_step(
    plan_buckets: Callable[..., Sequence[Sequence[int]]],
    install_hooks: Callable[[ReducerState], Any],
    finish: Callable[[ReducerState], Any],
    sequences: int,
    cap_bytes: int,
) -> None:
    config = TransformerConfig(
        num_layers=LAYERS, d_model=WIDTH, num_heads=16, vocab_size=256
    )
    with in_bfloat16():
        model: nn.Module = Transformer(config)
    name_gradients(model)
    params = list(model.parameters())
    state = ReducerState.of(model, plan_buckets(params, cap_bytes))
    install_hooks(state)
    tokens = torch.randint(256, (sequences, SEQUENCE))
    with annotate(STEP):
        model(tokens, targets=tokens).backward()
        finish(state)


def messages(given: GivenRun) -> list[Message]:
    """What a run sends, in the order in which it leaves."""
    return given.messages()


def gradient_bytes(program: Program) -> list[int]:
    """The size of each gradient of the recorded step, in the order of arrival."""
    return [
        part.bytes
        for op in program.ranks[0]
        if op.collective is not None
        for part in op.collective.payload
    ]


def backward_ns(timeline: Timeline) -> int:
    """From the start of the first backward kernel to the end of the last."""
    spans = [
        span
        for span in timeline.spans
        if span.kind == "compute" and span.attributes.get("phase") == "backward"
    ]
    return max(s.end_ns for s in spans) - min(s.start_ns for s in spans)


def sweep(
    program: Program, hardware: Hardware, bucket_mib: Sequence[float]
) -> dict[float, int]:
    """The step in nanoseconds for each bucket size; `inf` is one message for all."""
    total = sum(gradient_bytes(program))
    steps = {}
    for mib in bucket_mib:
        cap = int(min(mib * MIB, total))
        steps[mib] = replay(program, hardware=hardware, buckets=cap).step_ns
    return steps


def valley(steps: Mapping[float, int], within: float = 0.02) -> tuple[float, float]:
    """The smallest and the largest size whose step is within 2 % of the best."""
    best = min(steps.values())
    good = [mib for mib, step_ns in steps.items() if step_ns <= (1 + within) * best]
    return min(good), max(good)


def draw_valleys(
    sweeps: Mapping[str, Mapping[float, int]], stars: Mapping[str, float] | None = None
) -> Figure:
    """Step over bucket size, each relative to its own best; `stars` are sizes."""
    figure = Picture(figsize=(9, 3.4))
    ax = figure.add_axes((0.08, 0.16, 0.62, 0.76))
    inks = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    styles = ("o-", "s--", "^-.", "d:")
    for (name, steps), ink, style in zip(sweeps.items(), inks, styles, strict=False):
        best = min(steps.values())
        sizes = list(steps)
        relative = [step / best for step in steps.values()]
        ax.plot(sizes, relative, style, color=ink, label=name, markersize=5)
        if stars and name in stars:
            star = stars[name]
            at_star = float(np.interp(math.log(star), np.log(sizes), relative))
            face: Any = {"markerfacecolor": ink, "markeredgecolor": "black"}
            ax.plot([star], [at_star], "*", markersize=15, zorder=5, **face)
    ax.axhspan(1.0, 1.02, color="#dddddd", zorder=0)
    ax.set_xscale("log")
    ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_ylim(0.99, 1.35)
    ax.set_xlabel("bucket size (MiB)")
    ax.set_ylabel("step / best step")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.legend(loc="center left", bbox_to_anchor=(0.71, 0.6), frameon=False)
    return figure


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"This machine has {count} GPUs. Two or more could measure here."
    return (
        f"This machine has {count} GPUs. To measure here, run in a terminal:\n"
        "    python -m overlaplab.bench data-parallel --quick"
    )


FIT = "alpha and bandwidth meet 0, 25 and 100 MiB within 10 %"
MISSED = "which measured point the line misses most"


@exercise(
    "6.0",
    title="what a message costs",
    solution=("latency_us", "gbyte_per_s", "missed_mib"),
    verifies=(FIT, MISSED),
    points=1,
    timeout_s=10.0,
)
def grade_fit(
    sheet: Sheet, latency_us: float, gbyte_per_s: float, missed_mib: float
) -> None:
    """Any way of fitting will do."""
    sheet.ran("your line at the five measured sizes")
    points = message_points()
    off = {}
    for mib, measured_us in points.items():
        predicted_us = float(latency_us) + mib * MIB / (float(gbyte_per_s) * 1e3)
        off[mib] = predicted_us / measured_us - 1
        if mib in (0, 25, 100):
            sheet.expect(
                FIT,
                abs(off[mib]) <= 0.10,
                seen=f"at {mib} MiB the line says {predicted_us:.0f} us, measured are "
                f"{measured_us:.0f} us",
                expected="within 10 %",
                hint="an empty message shows alpha; the slope from 25 to 100 MiB is "
                "75 MiB more in 357 us more",
            )
    worst = max(points, key=lambda mib: abs(off[mib]))
    sheet.expect(
        MISSED,
        missed_mib == worst,
        seen=f"at {missed_mib} MiB your line is off by {off.get(missed_mib, 0):+.0%}",
        expected="the size at which it is off most",
    )
