"""How many messages are best, by what launching and sending them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import Graph

from overlaplab.hardware import find_hardware, with_link
from overlaplab.techniques.compiler import sizing
from overlaplab.techniques.compiler.agreement import collectives_text
from overlaplab.techniques.compiler.bucketing import Merge
from overlaplab.techniques.compiler.compilation import Settings, compile_inserted
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.sizing import plan_sizes
from tests.techniques.compiler.making import Making

CHALK = find_hardware("chalk")
GRADIENT = 40_000  # bytes; a product takes 2 us, a message 1 us and 4 us on the wire
EXPENSIVE = replace(CHALK, launch_ns=1_000, collective_launch_ns=20_000)
MS = 1_000_000

# Eight layers of a thousand times a thousand: dX and dW take 2 ms each, so a gradient
# of 4 MB is ready each 4 ms. By default four of them travel together.
LAYERS, LARGE_GRADIENT = 8, 4_000_000


@pytest.fixture
def one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that holds one gradient by default."""
    monkeypatch.setattr(sizing, "default_cap_bytes", lambda total: GRADIENT)


@pytest.fixture
def four_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that holds four large gradients by default."""
    monkeypatch.setattr(sizing, "default_cap_bytes", lambda total: 4 * LARGE_GRADIENT)


def eight_layers() -> Graph:
    """The backward of eight layers, a message for each weight's gradient."""
    making, shape = Making(), (1000, 1000)
    mm, grad = torch.ops.aten.mm.default, making.input("grad", *shape)
    averages = []
    for layer in range(LAYERS, 0, -1):
        x, w = (making.input(f"{name}{layer}", *shape) for name in "xw")
        below = making.call(mm, grad, w, name=f"dx{layer}")
        weight = making.call(mm, grad, x, name=f"dw{layer}")
        averages.append(making.reduced(weight, "avg"))
        grad = below
    return making.returning(grad, *averages)


def link_of(ms_a_gradient: float, **changes: int) -> Costs:
    rate = int(LARGE_GRADIENT / ms_a_gradient * 1000)
    linked = with_link(CHALK, latency_ns=0, bytes_per_s=rate)
    return Costs(replace(linked, **changes), 2)


def cut(merges: Sequence[Merge]) -> list[int]:
    """How many gradients are in each message."""
    return [len(merge.launches) for merge in merges]


@pytest.mark.usefixtures("four_large")
def test_on_a_slow_link_each_message_is_what_is_ready_when_the_wire_is_free():
    compiled = compile_inserted(eight_layers(), link_of(10), Settings())

    # The first gradient leaves alone. While the wire carries it, two more are ready (in
    # 8 ms: the wire is planned a fifth faster), then four, then the last. The order
    # computes the first dW before dX, so all begins at 2 ms and ends with 80 of wire.
    assert cut(compiled.merges) == [1, 2, 4, 1]
    sent = [s for s in compiled.predicted.spans if s.lane == "comm"]
    assert [(s.start_ns / MS, s.end_ns / MS) for s in sent] == [
        (2, 12),
        (12, 32),
        (32, 72),
        (72, 82),
    ]
    # Estimated in the given order. Four and four would leave at 16 ms.
    assert [(cut(s.merges), s.step_ns / MS) for s in compiled.sizes] == [
        ([1, 2, 4, 1], 84),
        ([8], 112),
        ([4, 4], 96),
        ([2, 4, 2], 88),
    ]


@pytest.mark.usefixtures("four_large")
def test_where_launches_bind_the_usual_messages_stay():
    costs = link_of(0.5, launch_ns=3 * MS, collective_launch_ns=2 * MS)

    compiled = compile_inserted(eight_layers(), costs, Settings())

    assert cut(compiled.merges) == [4, 4]


@pytest.mark.usefixtures("four_large")
def test_what_was_compiled_before_says_what_is_sent():
    binding = link_of(0.5, launch_ns=3 * MS, collective_launch_ns=2 * MS)
    first = compile_inserted(eight_layers(), link_of(10), Settings())

    again = compile_inserted(eight_layers(), binding, Settings(), sending=first.sending)

    assert cut(again.merges) == [1, 2, 4, 1]
    assert collectives_text(again.graph) == collectives_text(first.graph)


@pytest.mark.usefixtures("four_large")
def test_more_messages_must_win_on_a_slow_cpu_too(monkeypatch: pytest.MonkeyPatch):
    cheap = link_of(10, launch_ns=1_000, collective_launch_ns=1_000)
    monkeypatch.setattr(sizing, "SLOW_LAUNCH_NS", 0)
    monkeypatch.setattr(sizing, "SLOW_COLLECTIVE_NS", 20 * MS)

    sizes = plan_sizes(eight_layers(), cheap)

    assert [(cut(s.merges), s.step_ns // MS, s.slow_ns // MS) for s in sizes] == [
        ([4, 4], 96, 100),
        ([8], 112, 112),
        ([2, 4, 2], 88, 100),
        ([1, 2, 4, 1], 84, 110),
    ]


@pytest.mark.usefixtures("four_large")
def test_what_was_tried_is_explained_with_both_times():
    compiled = compile_inserted(eight_layers(), link_of(10), Settings())

    text = str(compiled)

    assert "3.8 MiB, all_reduce on group 0, closed by a free wire; async" in text
    assert (
        """sizes that were tried, of which the first is taken:
  4 messages of at least 3.8 MiB, when the wire is free: 84 ms, on a slow CPU 84.05 ms
  1 message of at least 30.5 MiB, when the wire is free: 112 ms, on a slow CPU 112 ms
  2 messages of up to 15.3 MiB: 96 ms, on a slow CPU 96.05 ms
"""
        in text
    )


@pytest.mark.usefixtures("four_large")
def test_no_size_that_was_tried_is_above_the_limit():
    limit_bytes = 2 * LARGE_GRADIENT + 1

    sizes = plan_sizes(eight_layers(), link_of(10), limit_bytes=limit_bytes)

    assert [(cut(s.merges), s.bytes) for s in sizes] == [
        ([1, 2, 2, 2, 1], LARGE_GRADIENT),
        ([2, 2, 2, 2], limit_bytes),
    ]


@pytest.mark.usefixtures("one_gradient")
def test_where_launches_are_expensive_gradients_share_a_launch():
    compiled = compile_inserted(nine_operators(), Costs(EXPENSIVE, 2), Settings())

    # The CPU: five products, 5 us, and one launch, 20; then 1 us and 12 on the wire.
    assert [
        (s.lane, s.name, s.start_ns, s.end_ns)
        for s in compiled.predicted.spans
        if s.kind == "communication" or s.name == "launch all_reduce"
    ] == [
        ("cpu", "launch all_reduce", 5_000, 25_000),
        ("comm", "all_reduce", 25_000, 38_000),
    ]
    # Estimated in the given order, six products before the last launch.
    assert [(cut(s.merges), s.step_ns) for s in compiled.sizes] == [
        ([3], 39_000),
        ([1, 2], 55_000),
        ([2, 1], 51_000),
        ([1, 1, 1], 71_000),
    ]


@pytest.mark.usefixtures("one_gradient")
def test_where_launches_are_free_each_gradient_leaves_at_once():
    compiled = compile_inserted(nine_operators(), Costs(CHALK, 2), Settings())

    assert cut(compiled.merges) == [1, 1, 1]


def test_what_promises_less_than_formulas_are_off_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sizing, "default_cap_bytes", lambda total: 2 * GRADIENT)
    cheap = replace(CHALK, collective_launch_ns=10_250)

    sizes = plan_sizes(nine_operators(), Costs(cheap, 2))

    assert [(cut(s.merges), s.step_ns) for s in sizes] == [
        ([2, 1], 25_500),
        ([3], 25_000),
        ([1, 2], 29_500),
    ]


@pytest.mark.usefixtures("one_gradient")
def test_a_limit_and_a_given_cap_hold_whatever_a_launch_costs():
    costs = Costs(EXPENSIVE, 2)

    limited = compile_inserted(
        nine_operators(), costs, Settings(limit_bytes=2 * GRADIENT)
    )
    given = compile_inserted(nine_operators(), costs, Settings(cap_bytes=GRADIENT))

    assert [m.bytes for m in limited.merges] == [2 * GRADIENT, GRADIENT]
    assert [cut(s.merges) for s in limited.sizes] == [[2, 1], [1, 2], [1, 1, 1]]
    assert [m.bytes for m in given.merges] == [GRADIENT] * 3
    assert not given.sizes
