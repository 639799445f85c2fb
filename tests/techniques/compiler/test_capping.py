"""How many messages are best, by what launching and sending them takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlaplab.hardware import find_hardware, with_link
from overlaplab.techniques.compiler import capping
from overlaplab.techniques.compiler.capping import plan_cap
from overlaplab.techniques.compiler.compilation import Settings, compile_inserted
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.example import nine_operators

CHALK = find_hardware("chalk")
GRADIENT = 40_000  # bytes; a product takes 2 us, a message 1 us and 4 us on the wire
EXPENSIVE = replace(CHALK, launch_ns=1_000, collective_launch_ns=20_000)


@pytest.fixture
def one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap that holds one gradient by default."""
    monkeypatch.setattr(capping, "default_cap_bytes", lambda total: GRADIENT)


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
    assert [(c.num_messages, c.step_ns) for c in compiled.caps] == [
        (1, 39_000),
        (2, 51_000),
        (3, 71_000),
    ]


@pytest.mark.usefixtures("one_gradient")
def test_where_launches_are_free_each_gradient_leaves_at_once():
    compiled = compile_inserted(nine_operators(), Costs(CHALK, 2), Settings())

    assert [len(merge.launches) for merge in compiled.merges] == [1, 1, 1]


def test_what_promises_less_than_formulas_are_off_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(capping, "default_cap_bytes", lambda total: 2 * GRADIENT)
    cheap = replace(CHALK, collective_launch_ns=10_250)

    caps = plan_cap(nine_operators(), Costs(cheap, 2))

    assert [(c.num_messages, c.step_ns) for c in caps] == [
        (2, 25_500),
        (1, 25_000),
        (3, 35_750),
    ]


def test_more_messages_than_usual_are_estimated_and_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(capping, "default_cap_bytes", lambda total: 3 * GRADIENT)
    slow = with_link(CHALK, bytes_per_s=4 * 10**9, latency_ns=0)  # 10 us a message

    caps = plan_cap(nine_operators(), Costs(slow, 2))

    assert [(c.num_messages, c.step_ns) for c in caps] == [(1, 42_000), (3, 34_000)]


@pytest.mark.usefixtures("one_gradient")
def test_a_limit_and_a_given_cap_hold_whatever_a_launch_costs():
    costs = Costs(EXPENSIVE, 2)

    limited = compile_inserted(
        nine_operators(), costs, Settings(limit_bytes=2 * GRADIENT)
    )
    given = compile_inserted(nine_operators(), costs, Settings(cap_bytes=GRADIENT))

    assert [m.bytes for m in limited.merges] == [2 * GRADIENT, GRADIENT]
    assert [c.num_messages for c in limited.caps] == [2, 3]
    assert [m.bytes for m in given.merges] == [GRADIENT] * 3
    assert not given.caps
