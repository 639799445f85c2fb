"""Whole steps, optimizer included: compiled ones beside DistributedDataParallel's.

Ours is one graph of forward, backward, averages and AdamW, in which each bucket's
update begins when its averages are there. DDP's optimizer runs behind the last of them,
or weight by weight in a hook of PyTorch's own. Behind the first step all variants must
have the same weights, or no time is believed.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward,
)
from torch.optim import AdamW
from torch.utils import _pytree as pytree

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.compiled import Plan
from overlaplab.bench.timing import exposed_rows, time_in_turn
from overlaplab.bench.variants import Batch
from overlaplab.bench.workload import build, build_model, release_memory, say
from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler import (
    Costs,
    Settings,
    capture_step,
    compile_inserted,
)
from overlaplab.techniques.compiler.graphs import FUNCTIONAL
from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.techniques.groups import own_group

ALONE = "compute and update"
DDP, IN_HOOKS = "ddp, then AdamW", "ddp, AdamW in its hooks"
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
SETTINGS: dict[str, Any] = {
    "lr": LR,
    "betas": BETAS,
    "eps": EPS,
    "weight_decay": DECAY,
    "fused": True,
}
# Of all that the first step changed: AdamW begins with the signs of gradients, and near
# zero these go by the order of sums in bfloat16. Without averages it is about 1.
WEIGHTS_RTOL = 0.2
_DDP = {"bucket_cap_mb": 100, "gradient_as_bucket_view": True}


@dataclass
class Training:
    """One way to run a whole step."""

    step: Callable[[], object]
    model: nn.Module  # which it trains
    averages: bool = True
    facts: dict[str, Any] = field(default_factory=dict)  # for the results
    close: Callable[[], None] = field(default=lambda: None)


def measure_case(name: str, batch_size: int, plan: Plan) -> dict[str, Any]:
    """All ways of one model and batch size. Collective; rank 0's result counts.

    Exposed is a step minus the same computing and update without averages.
    """
    start, batch, head = build(name, batch_size, plan.tokens)
    say(f"\n{name}, batch {batch_size}, whole steps with AdamW")
    made: dict[str, Training] = {}
    expected: nn.Module | None = None  # the weights behind DDP's first step
    for way, make in ways(plan).items():
        begin = time.perf_counter()
        training = made[way] = make(build_model(name)[0], batch)
        training.step()
        streams.synchronize()
        training.facts["first_step_s"] = round(time.perf_counter() - begin, 3)
        if training.averages:
            expected = expected or copy.deepcopy(training.model)
            check_weights(way, training.model, expected, start)
        for _ in range(plan.warmup):
            training.step()
    times = time_in_turn(
        {way: training.step for way, training in made.items()},
        num_rounds=plan.rounds,
        steps_a_round=plan.steps_a_round,
    )
    rows = exposed_rows(times, ALONE)
    best = min(its.median_ns for way, its in times.items() if way in (DDP, IN_HOOKS))
    for way, row in rows.items():
        ratio = times[way].median_ns / best
        row |= {**made[way].facts, "ratio_to_best_peer": round(ratio, 4)}
        say(f"  {way:<32}{row['median_ms']:9.3f} ms  {ratio:.3f}")
    for training in made.values():
        training.close()
    made.clear()
    release_memory()
    return head | {"optimizer": "AdamW, fused", "variants": rows}


def check_weights(
    way: str, model: nn.Module, other: nn.Module, start: nn.Module
) -> None:
    """Right first: the weights are those of `other`, and the same on every rank.

    Args:
        start: all began with its weights.

    Raises:
        AssertionError: they are not.
    """
    norms = torch.zeros(3, dtype=torch.float64, device=streams.device())
    triples = (model.parameters(), other.parameters(), start.parameters())
    with torch.no_grad():
        for mine, theirs, before in zip(*triples, strict=True):
            norms[0] += (mine.float() - theirs.float()).square().sum()
            norms[1] += (theirs.float() - before.float()).square().sum()
            norms[2] += mine.float().square().sum(dtype=torch.float64)
    lowest, highest = norms.clone(), norms.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if lowest[2] != highest[2]:
        raise AssertionError(f"{way}: ranks have different weights")
    off = float((norms[0] / norms[1]).sqrt())
    if not off < WEIGHTS_RTOL:
        raise AssertionError(
            f"{way}: weights differ from DDP's by {off:.3f} of what the step changed"
        )


def ways(plan: Plan) -> Mapping[str, Callable[[nn.Module, Batch], Training]]:
    """By name, what trains a model; `DDP` is the first that averages."""
    found: dict[str, Callable[[nn.Module, Batch], Training]] = {ALONE: alone, DDP: ddp}
    if streams.device().type == "cuda":  # the hook waits for an accelerator's stream
        found[IN_HOOKS] = ddp_in_hooks
    ours = functools.partial(one_graph, plan=plan)
    return found | {"our reducer, then AdamW": reduced, "ours, one graph": ours}


def _training(
    model: nn.Module,
    batch: Batch,
    run: nn.Module,
    wait: Callable[[], object] = lambda: None,
    **others: Any,
) -> Training:
    optimizer = AdamW(model.parameters(), **SETTINGS)

    def step() -> None:
        run(*batch).backward()
        wait()
        optimizer.step()
        optimizer.zero_grad()

    return Training(step, model, **others)


def alone(model: nn.Module, batch: Batch) -> Training:
    """Forward, backward and update of each rank by itself."""
    return _training(model, batch, model, averages=False)


def ddp(model: nn.Module, batch: Batch) -> Training:
    run = variants.wrap_in_ddp(model, static_graph=True, **_DDP)
    return _training(model, batch, run)


def ddp_in_hooks(model: nn.Module, batch: Batch) -> Training:
    """PyTorch's own way to update during the backward pass, which is private there."""
    _apply_optimizer_in_backward(AdamW, model.parameters(), SETTINGS)
    run = variants.wrap_in_ddp(model, **_DDP)
    return Training(lambda: run(*batch).backward(), model)


def reduced(model: nn.Module, batch: Batch) -> Training:
    reducer = BucketedReducer(model)
    return _training(model, batch, model, reducer.wait, close=reducer.remove)


def one_graph(model: nn.Module, batch: Batch, *, plan: Plan) -> Training:
    """What `capture_step` follows of a plain loop, with all passes of our compiler."""
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    moments = [[torch.zeros_like(w) for w in weights.values()] for _ in range(2)]
    counts = [torch.zeros((), device=streams.device()) for _ in weights]
    group, states = own_group(), [*moments, counts]

    def step(
        weights: dict[str, Tensor],
        buffers: dict[str, Tensor],
        states: list[list[Tensor]],
        batch: Batch,
    ) -> Tensor:
        loss: Tensor = torch.func.functional_call(model, {**weights, **buffers}, batch)
        found = torch.autograd.grad(loss, [*weights.values()])
        name = group.group_name
        sent = [FUNCTIONAL.all_reduce(g.contiguous(), "avg", name) for g in found]
        averages = [FUNCTIONAL.wait_tensor(each) for each in sent]
        _update([weight.detach() for weight in weights.values()], averages, *states)
        return loss

    args = weights, buffers, states, batch
    costs = Costs(find_hardware(plan.hardware), dist.get_world_size())
    made = compile_inserted(capture_step(step, *args), costs, Settings(), name="step")
    tensors = [tensor.detach() for tensor in pytree.tree_leaves(args)]

    def run() -> None:
        with torch.no_grad():
            made.code.run([*tensors], group, streams.device())

    facts = {
        "predicted_ms": round(made.step_ns / 1e6, 4),
        "num_messages": len(made.merges),
    }
    return Training(run, model, facts=facts)


def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
) -> None:
    """What `AdamW(fused=True)` runs."""
    torch._foreach_add_(counts, 1)
    torch._fused_adamw_(
        weights,
        gradients,
        first,
        second,
        [],
        counts,
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )
