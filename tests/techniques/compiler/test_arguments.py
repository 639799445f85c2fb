"""Wrong arguments of the passes: each is named, with what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import overlaplab as ol
from overlaplab.errors import RankError
from overlaplab.hardware import find_hardware
from overlaplab.techniques import compiler
from overlaplab.techniques.compiler import Costs, GraphError, Settings


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu()).sum()


X = torch.ones(3, 4)
GRAPH, GRADIENTS = compiler.capture_gradients(Net(), X)
COSTS = Costs(find_hardware("chalk"), 2)
SENT = compiler.insert_all_reduces(GRAPH, GRADIENTS, "0")
MERGES = compiler.plan_merges(SENT, 10**6)
DECISIONS = compiler.plan_decisions(SENT, COSTS)


def shards(found: Any, num_ranks: Any = 2) -> Callable[[], Any]:
    return lambda: compiler.insert_shards(GRAPH, GRADIENTS, found, "0", num_ranks)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (shards({0: "one.weight"}, 4), r"shape \(6, 4\), and 4 ranks shard"),
        (shards({0: "one.weight"}, 0), "num_ranks is 0; expected at least 1"),
        (shards({0: "one.weight"}, 1.5), "num_ranks is 1.5; expected a whole"),
        (shards({99: "one.weight"}), "at 99, and the graph takes 5 inputs"),
        (shards({-1: "one.weight"}), "at -1, and the graph takes 5 inputs"),
        (shards({2: "one.weight"}), r"input 2 has the shape \(2, 6\), and the grad"),
        (shards({0: "a", 1: "a"}), "shards has a twice"),
        (shards(["one.weight"]), "expected names by position"),
        (
            lambda: compiler.insert_all_reduces(GRAPH, {-1: "w"}, "0"),
            "w at -1, and the graph returns 5 values; expected a position from 0 to 4",
        ),
        (
            lambda: compiler.insert_all_reduces(GRAPH, ["w"], "0"),  # type: ignore[arg-type]
            "expected names by position",
        ),
        (
            lambda: compiler.compile_inserted(
                GraphModule(nn.Module(), GRAPH),  # type: ignore[arg-type]
                COSTS,
                Settings(),
            ),
            r"graph is a GraphModule; expected a torch.fx.Graph\. Give its \.graph",
        ),
        (lambda: compiler.generate(GRAPH, "my step"), "name is 'my step'; expected"),
        (lambda: compiler.merge(GRAPH, MERGES), "this graph does not have it"),
        (lambda: compiler.merge(SENT, MERGES * 2), "all_reduce_two_weight twice"),
        (lambda: compiler.decide(GRAPH, DECISIONS), "which this graph does not have"),
        (
            lambda: compiler.decide(SENT, [replace(DECISIONS[0], launch="typo")]),
            "a decision names typo",
        ),
        (lambda: compiler.capture_step(Net(), X), "a tensor that is not among its arg"),
        (lambda: compiler.capture_step(5, X), "step is 5; expected a function"),  # type: ignore[arg-type]
        (lambda: compiler.capture_gradients(nn.Linear(4, 2), X), "expected its loss"),
        (
            lambda: compiler.capture_gradients(Net().requires_grad_(False), X),
            "Net has no parameter that requires a gradient",
        ),
        (lambda: Settings(max_states=0), "max_states is 0; expected at least 1"),
        (lambda: Settings(lowering="eagre"), "lowering is 'eagre'; expected one of"),
        (lambda: Settings(limit_bytes=1.5), "limit_bytes is 1.5; expected a whole"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_argument_is_named(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, GraphError), match=message):
        ask()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_delay_ms": float("nan")}, "max_delay_ms is nan; expected a finite"),
        ({"max_delay_ms": -1}, "max_delay_ms is -1; expected a finite number of at"),
        ({"max_delay_ms": "5"}, "max_delay_ms is '5'; expected a number of ms"),
        ({"least_gain_us": float("inf")}, "least_gain_us is inf; expected a finite"),
        ({"max_states": "x"}, "max_states is 'x'; expected a whole number"),
        ({"side_stream": "yes"}, "side_stream is 'yes'; expected True or False"),
    ],
)
def test_a_wrong_setting_of_the_backend_is_named(settings: Any, message: str) -> None:
    with pytest.raises(RankError) as failure:
        ol.run(lambda: compiler.backend(**settings), world_size=1)

    assert message in str(failure.value.__cause__)
