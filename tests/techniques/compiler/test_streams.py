"""What runs beside computing, which events hold it, and what happens without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlaplab.cluster.pool.pool import Outcome
from overlaplab.techniques.compiler.codegen import generate
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.graphs import GraphError
from overlaplab.techniques.compiler.side_stream import (
    Crossing,
    StreamPlan,
    check_streams,
    plan_streams,
)
from tests.gpu.compiler_programs import CUTS, code_on_two_streams, run_source
from tests.ranks import Untimed, run_untimed
from tests.techniques.compiler.making import Making, aten

SOURCE = code_on_two_streams().source


def test_messages_are_on_communication_each_behind_an_event():
    plan = plan_streams(nine_operators())

    assert str(plan).splitlines() == [
        "on communication: all_reduce_dw3, all_reduce_dw2, all_reduce_dw1",
        "all_reduce_dw3 waits for an event behind dw3",
        "all_reduce_dw2 waits for an event behind dw2",
        "all_reduce_dw1 waits for an event behind dw1",
    ]


def test_what_only_prepares_a_message_goes_with_it():
    m = Making()
    one = m.call(aten.mul.Scalar, m.input("x", 4), 0.5, name="scaled")
    graph = m.returning(m.reduced(one))

    assert plan_streams(graph).side == ("scaled", "reduce_scaled")
    assert plan_streams(graph).crossings == (Crossing("x", "scaled"),)


@pytest.mark.parametrize("later", ["read", "overwritten"])
def test_what_compute_needs_too_stays_on_compute(later: str):
    m = Making()
    x = m.input("x", 4)
    scaled = m.call(aten.mul.Scalar, x, 0.5, name="scaled")
    if later == "read":
        m.call(aten.neg.default, scaled)
    else:
        m.call(aten.mul_.Scalar, x, 2)
    graph = m.returning(m.reduced(scaled))

    assert plan_streams(graph).side == ("reduce_scaled",)
    check_streams(graph, plan_streams(graph))


def test_what_was_sent_may_be_overwritten_behind_the_wait():
    m = Making()
    x = m.input("x", 4)
    average = m.reduced(x)
    written = m.call(aten.mul_.Scalar, x, 2, name="written")
    graph = m.returning(average, written)

    check_streams(graph, plan_streams(graph))


def without_an_event(plan: StreamPlan) -> StreamPlan:
    return replace(plan, crossings=plan.crossings[:1] + plan.crossings[2:])


def with_an_event_too_early(plan: StreamPlan) -> StreamPlan:
    crossings = [replace(c, after="dx3") for c in plan.crossings]
    return replace(plan, crossings=tuple(crossings))


def with_computing_beside(plan: StreamPlan) -> StreamPlan:
    return replace(plan, side=(*plan.side, "dx2"))


def of_another_graph(plan: StreamPlan) -> StreamPlan:
    return replace(plan, side=(*plan.side, "dw9"))


WRONG = {
    without_an_event: "all_reduce_dw2 is on communication and waits for no event "
    "behind dw2",
    with_an_event_too_early: "waits for no event behind dw3",
    with_computing_beside: "dx1 is on compute and needs dx2, which is on commun",
    of_another_graph: "the plan names dw9, which this graph does not have",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.__name__)
def test_a_plan_that_leaves_an_edge_to_chance_is_refused(wrong: Any):
    graph = nine_operators()

    with pytest.raises(GraphError) as refusal:
        generate(graph, "backward", wrong(plan_streams(graph)))

    assert WRONG[wrong] in str(refusal.value)


def test_a_bucket_is_packed_and_sent_beside_what_follows():
    lines = [line.strip() for line in SOURCE.splitlines()]

    at = lines.index("ready_0 = main.record_event()")
    assert lines[at - 2].startswith("dw2 = aten.mm.default(grad2_t, x2)")
    assert lines[at - 1 : at + 8] == [
        "bucket_0_flat = dw3.new_empty(524288)  # main's memory",
        "ready_0 = main.record_event()",
        "with streams.stream(side):  # beside what main launches below",
        "side.wait_event(ready_0)  # else it reads too early",
        "bucket_0_parts = pack([dw3, dw2], bucket_0_flat)",
        "# 2,097,152 bytes",
        "bucket_0 = average([bucket_0_flat], group); del bucket_0_flat",
        "dx2 = aten.mm.default(dx3, w2); del dx3, w2  # (512, 512)",
        "grad1_t = aten.t.default(dx2)  # (512, 512)",
    ]
    assert "bucket_0.wait(); del bucket_0, dw2, dw3" in lines


def run(source: str, **where: Any) -> Untimed | Outcome:
    return run_untimed(run_source, source, **where)


@pytest.mark.parametrize(
    ("cluster", "world_size"), [("virtual", 1), ("virtual", 2), ("gloo", 2)]
)
def test_two_streams_end_where_one_does(cluster: str, world_size: int):
    graph = nine_operators(width=512, rows=512)
    plain = generate(graph, "backward").source.replace("device)", "device, side)", 1)

    found = run(SOURCE, cluster=cluster, world_size=world_size)
    expected = run(plain, world_size=world_size)

    assert found.warnings == ()
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=0)


@pytest.mark.parametrize("edge", CUTS)
def test_an_edge_that_is_cut_is_a_finding(edge: str):
    assert run(CUTS[edge](SOURCE, True)).warnings == ()
    assert {f.kind for f in run(CUTS[edge](SOURCE, False)).warnings} == {"hazard"}
