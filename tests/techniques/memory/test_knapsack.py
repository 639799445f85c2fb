"""The choice under a budget is the best one, checked against all of them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab.techniques.memory import (
    Block,
    BudgetError,
    Chain,
    Option,
    every,
    find_curve,
    none,
)


def choose(chain: Chain, budget_bytes: int) -> tuple[int, ...]:
    return find_curve(chain).choose(budget_bytes)


def least_choice(chain: Chain) -> tuple[int, ...]:
    return find_curve(chain).choice(0)


def _chain(seed: int, num_blocks: int, num_options: int) -> Chain:
    """A random chain, no block of which is like another."""
    draw = random.Random(seed).randrange
    blocks = []
    for number in range(num_blocks):
        most = draw(1, 60)
        menu = [Option("0", most, most + draw(9), most + draw(20), draw(4), 3, draw(9))]
        for policy in range(1, num_options):
            kept = draw(most + 1)
            menu.append(
                Option(
                    str(policy),
                    kept,
                    kept + draw(30),
                    kept + draw(70),
                    draw(4),
                    3,
                    menu[0].step_ns + draw(12),
                )
            )
        sizes = [draw(12) for _ in range(4)]
        blocks.append(Block(f"blocks.{number}", tuple(menu), *sizes))
    return Chain(tuple(blocks), draw(50), draw(30), draw(30), draw(20))


def _check_against_all(chain: Chain, draw: random.Random) -> None:
    everything = [
        (chain.peak_bytes(choice), chain.step_ns(choice))
        for choice in itertools.product(*(range(len(b.options)) for b in chain.blocks))
    ]
    least = min(peak for peak, _ in everything)
    most = max(peak for peak, _ in everything)
    assert chain.peak_bytes(least_choice(chain)) == least
    for budget in (least, draw.randint(least, most), draw.randint(least, most), most):
        choice = choose(chain, budget)
        assert chain.peak_bytes(choice) <= budget
        best = min(ns for peak, ns in everything if peak <= budget)
        assert chain.step_ns(choice) == best
    with pytest.raises(BudgetError) as caught:
        choose(chain, least - 1)
    assert caught.value.least_bytes == least


def test_500_random_chains_of_up_to_eight_blocks_are_planned_as_by_brute_force() -> (
    None
):
    for seed in range(500):
        _check_against_all(_chain(seed, 1 + seed % 8, 2), random.Random(seed))


@pytest.mark.parametrize("num_blocks", [2, 4, 6])
@pytest.mark.parametrize("num_options", [3, 4])
def test_blocks_times_policies_are_chosen_as_by_brute_force(
    num_blocks: int, num_options: int
) -> None:
    for seed in range(4):
        chain = _chain(1000 + seed, num_blocks, num_options)
        _check_against_all(chain, random.Random(seed))


def test_a_literal_peak() -> None:
    keep = Option("keep", 10, 12, 14, 0, 2, 3)
    again = Option("recompute", 0, 12, 16, 0, 2, 4)
    block = Block("b", (keep, again), 3, 5, 4, 6)
    chain = Chain((block, block), 100, first_bytes=7, last_bytes=8)
    # backward of the second: 100 resident, 10 kept by the first, 5 outside, 14
    assert chain.peak_bytes((0, 0)) == 129
    assert chain.holders((0, 0)) == (
        "backward of b",
        (
            ("resident", 100),
            ("kept by earlier blocks", 10),
            ("the model outside its blocks", 5),
            ("this block", 14),
        ),
    )
    # backward of the first: the gradients of the second are there
    assert chain.peak_bytes((1, 1)) == 100 + 5 + 16 + 2
    assert chain.later_gradients == (4, 2, 0)


def test_what_recomputation_needs_itself_counts() -> None:
    """Keeping [1, 1, 50, 1, 1] in one segment of which everything is computed again."""
    blocks = tuple(
        Block(
            str(n),
            (Option("keep", n, n, n, 0, 0, 1), Option("recompute", 0, n, n, 0, 0, 2)),
            *(0,) * 4,
        )
        for n in (1, 1, 50, 1, 1)
    )
    chain = Chain(blocks, 0)
    assert chain.peak_bytes(least_choice(chain)) == 50
    for budget in range(3, 50):
        with pytest.raises(BudgetError, match=r"smallest peak .* is 50 bytes"):
            choose(chain, budget)
    times = [chain.step_ns(choose(chain, budget)) for budget in range(50, 61)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 200))
def test_a_larger_budget_is_never_slower(seed: int, num_blocks: int, more: int) -> None:
    chain = _chain(seed, num_blocks, 3)
    budget = chain.peak_bytes(least_choice(chain))
    less = chain.step_ns(choose(chain, budget))
    assert chain.step_ns(choose(chain, budget + more)) <= less


def test_200_unlike_blocks_fit_their_budget_and_cost_no_more_than_rules() -> None:
    chain = _chain(7, 200, 5)
    for policy in ("1", "2"):
        rule = every(chain, 1, policy)
        choice = choose(chain, chain.peak_bytes(rule) * 102 // 100)  # rounded up sizes
        assert chain.peak_bytes(choice) <= chain.peak_bytes(rule) * 102 // 100
        assert chain.step_ns(choice) <= chain.step_ns(rule)


def test_rules_are_of_every_block_and_of_every_kth() -> None:
    chain = _chain(1, 5, 2)
    assert none(chain) == (0,) * 5
    assert every(chain, 2, "1") == (1, 0, 1, 0, 1)


def test_rules_name_what_is_wrong() -> None:
    chain = _chain(1, 5, 2)
    with pytest.raises(ValueError, match="k is 0"):
        every(chain, 0)
    with pytest.raises(
        ValueError, match=r"blocks\.0 has no policy 'recompute'; .* 0, 1"
    ):
        every(chain, 1)
