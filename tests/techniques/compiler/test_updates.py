"""Whole steps: collectives that a person put behind the backward, and the optimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph
from torch.optim.sgd import sgd

from overlaplab import streams
from overlaplab.cluster.pool.pool import Outcome
from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.bucketing import merge
from overlaplab.techniques.compiler.capture import capture_step
from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.compilation import (
    Compilation,
    Settings,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.graphs import FUNCTIONAL, GraphError
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.runtime import load
from overlaplab.techniques.compiler.scheduling import plan_schedule, schedule
from overlaplab.techniques.compiler.updates import divide_updates, plan_updates
from tests.ranks import Untimed, run_untimed
from tests.techniques.compiler.making import Making, aten, names

SIZE = 16
STATES = {"sgd": 1, "adamw": 3}  # tensors for each parameter


def make_model(size: int = SIZE) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (part for _ in range(3) for part in (nn.Linear(size, size), nn.Tanh()))
    return nn.Sequential(*layers)


def make_states(kind: str, parameters: list[Tensor]) -> list[list[Tensor]]:
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(STATES[kind])]
    return [*moments[:2], [torch.zeros(()) for _ in parameters]][: STATES[kind]]


def batch_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2 * SIZE, SIZE, generator=generator)


def averaged(gradients: Any, group: str) -> list[Tensor]:
    """As a person does it: everything behind the backward, first layer first."""
    sent = [FUNCTIONAL.all_reduce(g.contiguous(), "avg", group) for g in gradients]
    return [FUNCTIONAL.wait_tensor(each) for each in sent]


def update(
    kind: str, weights: list[Tensor], gradients: list[Tensor], *states: list[Tensor]
) -> None:
    """torch's own, on lists."""
    if kind == "sgd":
        sgd(
            *(weights, gradients, *states),
            foreach=True,
            **{"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0},
            nesterov=False,
            maximize=False,
        )
        return
    first, second, steps = states
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        *(weights, gradients, first, second, [], steps),
        **{"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8},
        amsgrad=False,
        maximize=False,
    )


@cache
def compiled(
    kind: str, groups: tuple[str, ...] = ("0",), size: int = SIZE
) -> Compilation:
    """Of a batch of twice the size; a bucket holds a layer."""
    model = make_model(size)
    named = dict(model.named_parameters())

    def step(weights: Any, states: Any, x: Tensor) -> Tensor:
        loss = torch.func.functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, [*weights.values()])
        for group in groups:
            gradients = averaged(gradients, group)
        update(kind, [w.detach() for w in weights.values()], gradients, *states)
        return loss

    states = make_states(kind, [p.detach() for p in named.values()])
    graph = capture_step(step, named, states, torch.zeros(2 * size, size))
    settings = Settings(cap_bytes=4 * size * size + 4 * size)
    costs = Costs(find_hardware("chalk"), 2)
    return compile_inserted(graph, costs, settings, name="step")


def train(source: str, kind: str, num_steps: int = 2) -> list[Tensor]:
    """The weights of a rank behind some steps of generated code."""
    device = streams.device()
    weights = [p.detach().to(device) for p in make_model().parameters()]
    states = make_states(kind, weights)
    world: Any = dist.group.WORLD
    if "(args, groups" in source:
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        world = {"rows": rows[rank // 2], "columns": columns[rank % 2]}
    run = load(source, "step", {}).run
    for step in range(num_steps):
        x = batch_of(10 * step + dist.get_rank()).to(device)
        run([*weights, *(s for each in states for s in each), x], world, device)
    return weights


def expected(kind: str, world_size: int, num_steps: int = 2) -> list[Tensor]:
    """In one process; gradients are summed in the order of ranks."""
    model = make_model()
    weights = list(model.parameters())
    states = make_states(kind, weights)
    for step in range(num_steps):
        total: Any = None
        for rank in range(world_size):
            loss = model(batch_of(10 * step + rank)).square().mean()
            own = torch.autograd.grad(loss, weights)
            total = own if total is None else [*map(torch.add, total, own)]
        with torch.no_grad():
            update(kind, weights, [t / world_size for t in total], *states)
    return [w.detach() for w in weights]


@cache
def trained(kind: str, cluster: str, world_size: int) -> Untimed | Outcome:
    source = compiled(kind).code.source
    return run_untimed(train, source, kind, cluster=cluster, world_size=world_size)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize(
    ("cluster", "world_size"), [("virtual", 1), ("virtual", 2), ("virtual", 3)]
)
def test_a_step_ends_where_one_process_ends(
    kind: str, cluster: str, world_size: int
) -> None:
    run = trained(kind, cluster, world_size)

    assert run.warnings == ()
    for weights in run.values:
        torch.testing.assert_close(weights, expected(kind, world_size), rtol=0, atol=0)


def test_a_step_on_gloo_ends_where_one_process_ends() -> None:
    for weights in trained("adamw", "gloo", 2).values:
        torch.testing.assert_close(weights, expected("adamw", 2), rtol=0, atol=0)


def test_what_a_person_sent_last_leaves_in_the_order_of_readiness() -> None:
    found = compiled("adamw", size=200)

    def places(graph: Graph, start: str) -> list[int]:
        return [i for i, name in enumerate(names(graph)) if name.startswith(start)]

    last = places(found.inserted, "mm")[-1]
    assert min(places(found.inserted, "all_reduce")) > last
    # The gradients of a layer leave together, the last layer's first.
    assert [m.launches for m in found.merges] == [
        ("all_reduce_4", "all_reduce_5"),
        ("all_reduce_2", "all_reduce_3"),
        ("all_reduce", "all_reduce_1"),
    ]
    mms = places(found.graph, "mm")
    sent = [order for b in range(3) for order in places(found.graph, f"bucket_{b}")[:1]]
    assert sum(m > min(sent) for m in mms) >= 2
    assert max(mms) > sorted(sent)[1]


@pytest.mark.parametrize("kind", STATES)
def test_an_update_starts_while_other_messages_travel(kind: str) -> None:
    found = compiled(kind, size=200)
    merged = merge(found.inserted, found.merges)
    whole = schedule(merged, plan_schedule(merged, found.costs))

    spans = found.predicted.spans
    last = max(s.end_ns for s in spans if s.kind == "communication")
    updates = [s for s in spans if s.name in ("_foreach_add_", "_fused_adamw_")]
    behind = [s for s in updates if s.start_ns >= last]
    assert 0 < len(behind) <= len(updates) / 3  # those of the last bucket alone
    assert _step_ns(found.graph, found.costs) < _step_ns(whole, found.costs)


def _step_ns(graph: Graph, costs: Costs) -> int:
    return predict(graph, costs).report().step_ns


def test_two_groups_travel_through_all_passes() -> None:
    """Averages over rows, then over columns, are averages over all."""
    source = compiled("sgd", ("rows", "columns")).code.source
    assert source.count("groups['rows']") == source.count("groups['columns']") > 0

    run = run_untimed(train, source, "sgd", world_size=4)

    assert run.warnings == ()
    for weights in run.values:
        torch.testing.assert_close(weights, expected("sgd", 4))


def updating() -> Making:
    """An update of three weights, of which one needs no message."""
    m = Making()
    weights = [m.input(f"w{i}", 4) for i in range(3)]
    gradients = [m.input(f"g{i}", 4) for i in range(3)]
    one, two = m.reduced(gradients[0]), m.reduced(gradients[1])
    added = [one, two, gradients[2]]
    for name, target, *args in (
        ("shrink", aten._foreach_mul_.Scalar, weights, 0.9),
        ("step", aten._foreach_add_.List, weights, added),
    ):
        m.graph.create_node("call_function", target, tuple(args), name=name)
    return m


def test_an_operator_on_lists_is_divided_by_the_messages_that_it_needs() -> None:
    graph = updating().returning(None)

    after = divide_updates(graph, plan_updates(graph))

    assert plan_updates(graph) == {
        "shrink": [[0, 1, 2]],
        "step": [[0], [1], [2]],
    }
    assert names(after)[-4:] == ["shrink", "step_1", "step_2", "step_3"]


def mix_up_two_gradients(graph: Graph) -> None:
    (step,) = (node for node in graph.nodes if node.name == "step")
    weights, (one, two, three) = step.args
    step.args = (weights, [two, one, three])


def test_a_gradient_that_goes_to_another_weight_is_refused() -> None:
    with pytest.raises(GraphError, match="changes what the graph leaves in its inputs"):
        graph_pass(mix_up_two_gradients)(updating().returning(None))


@pytest.mark.parametrize("groups", [[[0], [1]], [[0], [1, 2], [2]], [[0], [1, 2, 3]]])
def test_a_plan_that_loses_an_element_is_refused(groups: list[list[int]]) -> None:
    graph = updating().returning(None)

    with pytest.raises(GraphError, match="expected each of its 3 elements once"):
        divide_updates(graph, {"step": groups})
