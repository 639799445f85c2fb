"""Parameters that are gathered once or twice: the same values, other memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph

import overlaplab as ol
from overlaplab import streams
from overlaplab.hardware import find_hardware
from overlaplab.program import peak_bytes
from overlaplab.techniques.compiler import regathering
from overlaplab.techniques.compiler.capture import capture_gradients
from overlaplab.techniques.compiler.compilation import (
    Compilation,
    Settings,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.graphs import GraphError, launches, operation
from overlaplab.techniques.compiler.regathering import peak_whole
from overlaplab.techniques.compiler.runtime import load
from overlaplab.techniques.compiler.sharding import insert_shards
from overlaplab.techniques.compiler.simplification import simplify
from tests.guards import GUARD_S

SIDE, DEPTH = 128, 6
WHOLE = 4 * SIDE * SIDE  # bytes of a layer's weight
COSTS = Costs(find_hardware("chalk"), 2)


class Deep(nn.Module):
    """Layers of which each weight is read once in either pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch_of(rank: int) -> Tensor:
    return torch.randn(2, SIDE, generator=torch.Generator().manual_seed(rank))


@cache
def inserted(again: bool, ahead_bytes: int | None = None) -> Graph:
    graph, gradients = capture_gradients(Deep(), batch_of(0))
    shards = dict(enumerate(gradients.values()))
    return insert_shards(
        *(simplify(graph), gradients, shards, "0", 2),
        again=again,
        ahead_bytes=ahead_bytes,
    )


@cache
def compiled(again: bool, cap_bytes: int = WHOLE) -> Compilation:
    # Else all gradients are in flight at the end, and nothing is won.
    settings = Settings(cap_bytes=cap_bytes, limit_bytes=2 * WHOLE)
    return compile_inserted(inserted(again), COSTS, settings, name="step")


def step(source: str) -> tuple[Tensor, ...]:
    rank, device = dist.get_rank(), streams.device()
    mine = [p.detach().chunk(2)[rank].to(device) for p in Deep().parameters()]
    run = load(source, "step", {}).run
    return run([*mine, batch_of(rank).to(device)], dist.group.WORLD, device)


@cache
def ran(again: bool) -> ol.Run:
    source = compiled(again).code.source
    return ol.run(step, source, world_size=2, hardware="chalk", timeout_s=GUARD_S)


def test_gathered_again_the_values_are_the_same_and_nothing_races() -> None:
    once, twice = ran(False), ran(True)

    assert once.warnings == twice.warnings == ()
    torch.testing.assert_close(once.values, twice.values, rtol=0, atol=0)


def gathers(graph: Graph) -> int:
    return sum(operation(n).startswith("all_gather") for n in launches(graph))


def test_what_the_backward_reads_is_gathered_again() -> None:
    assert gathers(inserted(False)) == DEPTH
    # The first layer's weight is not read there: nothing needs its inputs' gradient.
    assert gathers(inserted(True)) == DEPTH + DEPTH - 1


def test_gathered_again_two_layers_are_whole_at_a_time_and_not_all() -> None:
    assert peak_whole(compiled(False).graph) == DEPTH * WHOLE
    assert peak_whole(compiled(True).graph) == 2 * WHOLE


def test_the_whole_step_takes_less_memory_though_not_by_all_of_that() -> None:
    once, twice = ran(False).program, ran(True).program

    # Its peak moves from the end of the forward to gradients in the backward.
    assert once is not None and twice is not None
    assert WHOLE < peak_bytes(once) - peak_bytes(twice) < (DEPTH - 2) * WHOLE


def test_a_bucket_of_gathers_is_held_for_all_of_its_members() -> None:
    found = compiled(True, 2 * WHOLE)

    kinds = [m.kind[0] for m in found.merges if len(m.launches) == 2]
    assert kinds.count("all_gather_into_tensor") == 5
    assert peak_whole(found.graph) == 2 * WHOLE


@pytest.mark.parametrize(("ahead", "layers"), [(0, 1), (WHOLE, 1), (3 * WHOLE, 3)])
def test_no_more_is_gathered_ahead_than_was_asked_for(ahead: int, layers: int) -> None:
    found = compile_inserted(inserted(True, ahead), COSTS, Settings(cap_bytes=1))

    assert peak_whole(found.graph) == layers * WHOLE


def test_without_a_loss_nobody_knows_where_the_backward_begins() -> None:
    graph, gradients = capture_gradients(Deep(), batch_of(0))
    last = next(iter(reversed(graph.nodes)))
    last.args = (last.args[0][1:],)
    moved = {position - 1: name for position, name in gradients.items()}

    with pytest.raises(GraphError, match="Return the loss, too"):
        insert_shards(graph, moved, {0: "layers.0.weight"}, "0", 2, again=True)


def the_first_gather(graph: Graph, whole: Any, readers: Any) -> Any:
    second = REAL(graph, whole, readers)
    second.replace_all_uses_with(whole)
    graph.erase_node(second)
    return whole


REAL = regathering._again


def test_a_second_gather_that_nobody_waits_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regathering, "_again", the_first_gather)

    with pytest.raises(GraphError, match="is launched and never waited for"):
        inserted.__wrapped__(True)
