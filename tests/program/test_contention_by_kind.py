"""Kinds of kernels slow the wire, and are slowed, each by its own factors.

On `chalk` two ranks all-reduce n bytes in 1000 + n/10 ns; a kernel of a thousand bytes
takes 1 ns.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.hardware import find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.techniques.data_parallel import BucketedReducer

BY_KIND = replace(
    find_hardware("chalk"),
    contention={
        "matmul": (500, 250),
        "matmul, high priority": (800, 500),
        "elementwise": (1000, 500),
    },
    compute_rate_permille=100,
    wire_rate_permille=100,
)


def spans(program: Program, rank: int = 0) -> list[tuple[str, int, int]]:
    found = resolve(program, BY_KIND).spans
    return [(s.name, s.start_ns, s.end_ns) for s in found if s.rank == rank]


def a_product_and_an_addition(*, high_priority: bool) -> Program:
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000, high_priority=high_priority)
        b.compute(rank, "mm", ns=2_000)
        b.compute(rank, "add", read_bytes=1_000_000)
    return b.build()


def test_the_wire_changes_its_speed_where_a_kernel_of_another_kind_begins() -> None:
    # From 1000 on the product has 1000 left and goes half as fast; the wire does a
    # quarter of 2000 beside it, and half of 1000 beside the addition.
    assert spans(a_product_and_an_addition(high_priority=False)) == [
        ("all_reduce", 0, 4_000),
        ("mm", 0, 3_000),
        ("add", 3_000, 4_000),
    ]


def test_a_collective_of_high_priority_goes_by_factors_of_its_own() -> None:
    # 1000 of the product at 0.8, half of 1250 on the wire; additions have one pair.
    assert spans(a_product_and_an_addition(high_priority=True)) == [
        ("all_reduce", 0, 3_000),
        ("mm", 0, 2_250),
        ("add", 2_250, 3_250),
    ]


def test_a_kind_of_which_nothing_is_known_goes_by_the_factors_of_all() -> None:
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=1_000)
        b.compute(rank, "layer_norm", read_bytes=1_010_000)
    # 10 are left where the wire's 100 begin: at a tenth 100 ns, and 10 of the wire.
    assert spans(b.build()) == [("all_reduce", 0, 1_190), ("layer_norm", 0, 1_100)]


@pytest.mark.parametrize("product_on", [0, 1])
def test_the_kernel_that_leaves_least_sets_the_wire_s_speed_on_both_ranks(
    product_on: int,
) -> None:
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=500)
    b.compute(product_on, "mm", ns=1_100)
    b.compute(1 - product_on, "add", read_bytes=1_400_000)
    # 50 on the wire at a quarter, as the product lets it: 200 ns, beside both.
    found = [spans(b.build(), rank) for rank in (product_on, 1 - product_on)]
    assert found == [
        [("all_reduce", 0, 1_200), ("mm", 0, 1_200)],
        [("all_reduce", 0, 1_200), ("add", 0, 1_400)],
    ]


def test_two_kernels_at_once_are_slowed_each_by_its_kind() -> None:
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=100_000)
        b.compute(rank, "mm", ns=1_000)
        b.compute(rank, "add", read_bytes=1_000_000, stream="side")
    # Halves of the GPU until 1000; then 500 are left of each, at 1/4 and at 1/2.
    assert spans(b.build())[1:] == [("mm", 0, 2_500), ("add", 0, 2_000)]


def test_beside_collectives_of_both_priorities_a_kernel_goes_at_the_slower_speed() -> (
    None
):
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        for group in ("default", "other"):
            high = group == "other"
            b.collective(
                rank, "all_reduce", bytes=10**6, group=group, high_priority=high
            )
        b.compute(rank, "mm", ns=2_000)
    assert ("mm", 0, 3_000) in spans(b.build())


def test_reducers_send_at_high_priority_and_dist_by_itself_does_not() -> None:
    def program() -> None:
        dist.all_reduce(torch.ones(4, device=ol.device()))
        model = nn.Linear(4, 4).to(ol.device())
        reducer = BucketedReducer(model)
        model(torch.ones(1, 4, device=ol.device())).sum().backward()
        reducer.wait()

    run = ol.run(program, world_size=2)
    sent = [op.collective for op in run.program.ranks[0] if op.collective]
    assert not sent[0].high_priority and sent[-1].high_priority
