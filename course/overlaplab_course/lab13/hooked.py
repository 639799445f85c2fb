"""The nine operators with hooks in the place of a compiler: lab 06's reducer, run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from overlaplab import streams
from overlaplab.cluster.run import run
from overlaplab.timeline import Timeline
from overlaplab_course.lab06.given import ReducerState
from overlaplab_course.lab13.graphs import WIDTH
from overlaplab_course.lab13.moves import NUM_RANKS, SLOW, step_of

STEP = "step"


def with_hooks(
    plan_buckets: Callable[..., Any] | None = None,
    install_hooks: Callable[..., Any] | None = None,
    finish: Callable[..., Any] | None = None,
    cap_bytes: int = 40_000,
) -> Timeline:
    """The backward pass of three layers, run in eager mode with a reducer's hooks.

    Args:
        plan_buckets, install_hooks, finish: 6.1, 6.2 and 6.3; yours; None: the
            course's own.
        cap_bytes: of a bucket; a gradient has 40,000 bytes.
    """
    from overlaplab_course.lab06 import reference as lab06

    ran = run(
        _on_rank,
        plan_buckets or lab06.plan_buckets,
        install_hooks or lab06.install_hooks,
        finish or lab06.finish,
        cap_bytes,
        world_size=NUM_RANKS,
        hardware=SLOW,
    )
    assert ran.program is not None
    return step_of(ran.program)


def _on_rank(plan: Any, install_hooks: Any, finish: Any, cap_bytes: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = nn.Sequential(*layers).to(streams.device())
    x = torch.randn(WIDTH, WIDTH, device=streams.device(), requires_grad=True)
    state = ReducerState.of(model, plan(list(model.parameters()), cap_bytes))
    install_hooks(state)
    y = model(x)
    grad = torch.ones_like(y)
    streams.synchronize()
    with streams.annotate(STEP):
        y.backward(grad)
        finish(state)
