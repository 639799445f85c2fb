"""What is sent when nothing is computed any more, and on which group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.hardware import find_hardware, with_link
from overlaplab.techniques.compiler.agreement import collectives_text
from overlaplab.techniques.compiler.compilation import (
    Settings,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.graphs import GraphError
from overlaplab.techniques.compiler.runtime import load
from overlaplab.techniques.compiler.scheduling import plan_schedule, schedule
from overlaplab.techniques.compiler.tail import part_tail, plan_tail
from tests.ranks import run_untimed
from tests.techniques.compiler.making import Making, aten, names

COSTS = Costs(find_hardware("chalk"), 2)  # a matmul takes 2 us, a message 5
ORDERED = schedule(nine_operators(), plan_schedule(nine_operators(), COSTS))


def test_the_tail_is_what_begins_behind_all_computing() -> None:
    assert plan_tail(ORDERED, COSTS) == ["all_reduce_dw1"]

    slow = COSTS.on(with_link("chalk", bytes_per_s=4_000_000_000))  # 11 us
    assert plan_tail(ORDERED, slow) == ["all_reduce_dw2", "all_reduce_dw1"]

    fast = COSTS.on(with_link("chalk", latency_ns=1, bytes_per_s=10**14))
    assert plan_tail(ORDERED, fast) == []  # the last leaves behind dw1, beside dx1


def test_before_the_tail_the_stream_waits_for_what_was_sent() -> None:
    parted = part_tail(ORDERED, ["all_reduce_dw2", "all_reduce_dw1"])

    assert names(parted) == [
        *("grad3_t", "dw3", "all_reduce_dw3", "dx3", "grad2_t", "dw2", "dx2"),
        *("grad1_t", "dw1", "dx1", "wait_dw3"),
        *("all_reduce_dw2", "all_reduce_dw1", "wait_dw2", "wait_dw1"),
    ]


def test_what_reads_an_early_average_stays_behind_its_wait() -> None:
    m = Making()
    one, two = m.input("one", 4), m.input("two", 4)
    graph = m.returning(
        m.call(aten.div.Scalar, m.reduced(one), 2, name="half"), m.reduced(two)
    )

    parted = part_tail(graph, ["reduce_two"])

    assert names(parted) == [
        *("reduce_one", "wait_one", "half", "reduce_two", "wait_two"),
    ]


def test_an_operator_that_needs_an_average_leaves_no_tail() -> None:
    m = Making()
    weight = m.input("w", 100, 100)
    average = m.reduced(m.call(aten.mm.default, weight, weight))
    graph = m.returning(m.call(aten.mm.default, average, weight))

    assert plan_tail(graph, COSTS) == []


def test_messages_that_are_waited_for_at_once_have_no_tail() -> None:
    settings = Settings(cap_bytes=1, least_gain_ns=10**9, part_tail=True)
    assert compile_inserted(nine_operators(), COSTS, settings).tail == []


def test_a_tail_that_is_not_the_end_is_refused() -> None:
    with pytest.raises(GraphError, match="the tail is all_reduce_dw3; expected the la"):
        part_tail(ORDERED, ["all_reduce_dw3"])
    with pytest.raises(ValueError, match="part_tail=True is not for side_stream"):
        Settings(part_tail=True, limit_bytes=1)


COMPILED = compile_inserted(
    nine_operators(), COSTS, Settings(cap_bytes=1, part_tail=True)
)


def test_the_code_takes_the_group_of_the_tail() -> None:
    lines = [line.strip() for line in COMPILED.code.source.splitlines()]

    assert lines[0] == "def backward(args, group, device, tail):"
    assert [line for line in lines if "average(" in line] == [
        "all_reduce_dw3 = average([dw3], group)",
        "all_reduce_dw2 = average([dw2], group)",
        "all_reduce_dw1 = average([dw1], tail)",
    ]
    assert (
        "behind all computing, on a communicator with more blocks: the last 1"
        in str(COMPILED)
    )
    first, *_, last = collectives_text(COMPILED.graph, COMPILED.tail).splitlines()
    assert last.endswith("on the tail's group") and "tail" not in first


def run_both(with_tail: str, plain: str) -> tuple[list[Tensor], list[Tensor]]:
    """Results of both codes on this rank."""
    device, world = streams.device(), dist.group.WORLD
    generator = torch.Generator().manual_seed(dist.get_rank())
    args = [torch.randn(100, 100, generator=generator).div(100) for _ in range(7)]
    found = []
    for source, tail in ((with_tail, [dist.new_group()]), (plain, [])):
        run = load(source, "backward", {}).run
        found.append(run([a.to(device) for a in args], world, device, *tail))
    copies = tuple([result.clone() for result in results] for results in found)
    streams.synchronize()
    return copies[0], copies[1]


@pytest.mark.parametrize(
    ("cluster", "world_size"), [("virtual", 1), ("virtual", 3), ("gloo", 2)]
)
def test_it_sends_what_was_sent_without_a_tail(cluster: str, world_size: int) -> None:
    plain = compile_inserted(nine_operators(), COSTS, Settings(cap_bytes=1))
    sources = COMPILED.code.source, plain.code.source

    run = run_untimed(run_both, *sources, cluster=cluster, world_size=world_size)

    assert run.warnings == ()
    for parted, whole in run.values:
        torch.testing.assert_close(parted, whole, rtol=0, atol=0)
