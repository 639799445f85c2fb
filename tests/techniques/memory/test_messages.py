"""Steps with messages in their backward: the plan that ends first, as it happens."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.bench.workload import MODELS
from overlaplab.hardware import find_hardware
from overlaplab.models import Transformer
from overlaplab.techniques.memory import (
    BudgetError,
    Chain,
    CheckpointPlan,
    Communication,
    Costs,
    measure_costs,
)
from overlaplab.techniques.memory.messages import choose_with_messages, step_ns
from tests.techniques.memory.test_knapsack import _chain

SENT = Communication(world_size=2, hardware="chalk")
_CHALK = find_hardware("chalk")
_SLOW = replace(_CHALK, link=replace(_CHALK.link, latency_ns=0, bytes_per_s=1_000_000))
SENT_SLOWLY = Communication(world_size=2, hardware=_SLOW)


def _slow(chain: Chain, draw: Callable[[int], int]) -> Chain:
    """The chain with microseconds; a byte of its gradients is one on the wire."""
    blocks = []
    for block in chain.blocks:
        forward_ns, num_bytes = 1000 * draw(4), draw(20)
        menu = tuple(
            replace(
                option,
                step_ns=1000 * option.step_ns + 3 * forward_ns,
                forward_ns=0 if number else forward_ns,
                gradient_bytes=num_bytes,
            )
            for number, option in enumerate(block.options)
        )
        blocks.append(replace(block, options=menu))
    return replace(chain, blocks=tuple(blocks))


def test_the_step_that_ends_first_is_found_as_by_brute_force() -> None:
    otherwise = 0
    for seed in range(60):
        draw = random.Random(seed).randrange
        chain = _slow(_chain(seed, 1 + seed % 6, 3), draw)
        rows = [
            (chain.peak_bytes(c), sum(step_ns(chain, c, SENT_SLOWLY)), chain.step_ns(c))
            for c in itertools.product(*(range(len(b.options)) for b in chain.blocks))
        ]
        least, most = min(rows)[0], max(rows)[0]
        for budget in {least, (2 * least + most) // 3, (least + most) // 2, most}:
            choice = choose_with_messages(chain, budget, SENT_SLOWLY)
            fits = [row for row in rows if row[0] <= budget]
            assert chain.peak_bytes(choice) <= budget
            best = min(row[1] for row in fits)
            assert (
                best <= sum(step_ns(chain, choice, SENT_SLOWLY)) <= best * 1.00001 + 1
            )
            otherwise += chain.step_ns(choice) > min(row[2] for row in fits)
        with pytest.raises(BudgetError):
            choose_with_messages(chain, least - 1, SENT_SLOWLY)
    assert otherwise  # it computed more than it had to, and was faster


WIDTH, TOKENS = 64, 64


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, hidden, bias=False)
        self.narrow = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(x)))


class Stack(nn.Module):
    """The last block is the cheapest to compute twice; the peak is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden) for hidden in (448, 448, 448, 416))
        self.head = nn.Linear(WIDTH, 4096, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def _made() -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(TOKENS, WIDTH, requires_grad=True),)


@functools.cache
def _costs() -> Costs:
    return measure_costs(*_made(), hardware="chalk")


def _step(plan: CheckpointPlan) -> None:
    model, inputs = _made()
    plan.apply(model)
    reducer = ol.BucketedReducer(model, bucket_mib=4 * 2 * WIDTH * 448 / 2**20)
    model(*inputs).backward()
    reducer.wait()


def _timeline(plan: CheckpointPlan) -> Any:
    whole = ol.run(_step, plan, world_size=2, hardware="chalk", check=False).timeline
    begin = min(span.start_ns for span in whole.spans if span.name == "mm")
    return whole.between(begin, whole.end_ns)  # without making model and reducer


def test_an_early_block_is_computed_twice_where_a_late_one_delays_every_message() -> (
    None
):
    costs = _costs()
    budget = costs.none().peak_bytes - 1
    least = costs.fastest(budget)
    first = costs.fastest(budget, SENT)
    assert least.names[:3] == ("keep",) * 3 and least.names[3] != "keep"
    assert first.names[3] == "keep" and first.names != ("keep",) * 4
    assert costs.chain.step_ns(first.choice) > costs.chain.step_ns(least.choice)
    said = replace(least, communication=SENT).step_ns
    assert first.step_ns < said
    ends = [_timeline(plan).step_ns for plan in (least, first)]
    # Both timelines: what was predicted, but for the model outside its blocks.
    assert ends == pytest.approx([said, first.step_ns], rel=0.02)
    assert ends[1] < ends[0]


def test_a_plan_says_what_is_exposed_and_names_what_lives_beside_the_model() -> None:
    model, inputs = _made()
    states = {"states of AdamW": 5000, "buckets": 700}
    plan = ol.plan_checkpoints(
        model,
        inputs,
        budget_bytes=2**40,
        hardware="chalk",
        communication=SENT,
        resident_bytes=states,
    )
    assert plan.exposed_ns > 0
    assert f"{plan.exposed_ns / 1e6:.3f} of them exposed communication" in str(plan)
    assert plan.peak_bytes == _costs().none().peak_bytes + 5700
    _, holders = plan.chain.holders(plan.choice)
    assert states.items() <= dict(holders).items()
    assert sum(num_bytes for _, num_bytes in holders) == plan.peak_bytes
    with pytest.raises(ValueError, match="expected 0 to"):
        measure_costs(*_made(), hardware="chalk", resident_bytes={"buckets": -1})


def test_without_a_second_rank_the_plan_is_the_one_that_computes_least() -> None:
    alone = replace(SENT, world_size=1)
    costs = _costs()
    for plan in costs.frontier():
        assert costs.fastest(plan.peak_bytes, alone).step_ns == plan.step_ns


def test_with_blocks_all_alike_least_recomputation_ends_almost_first() -> None:
    """Only the last block delays the first message; then the wire is never idle."""
    hw = find_hardware("h200-nvlink")
    link = replace(hw.link, latency_ns=32_000, bytes_per_s=29_000_000_000, times=())
    sent = Communication(world_size=2, hardware=replace(hw, link=link))
    with torch.device("meta"):
        model = Transformer(MODELS["gpt-369m"]).bfloat16()
        tokens = torch.randint(50_000, (5, 1024))
    costs = measure_costs(model, (tokens, tokens), hardware="h200-nvlink")
    curve = costs.frontier()
    for point in curve[1 :: len(curve) // 6]:
        least = replace(point, communication=sent)
        first = costs.fastest(point.peak_bytes, sent)
        assert least.exposed_ns > 0.02 * least.step_ns
        assert first.step_ns <= least.step_ns <= 1.005 * first.step_ns
