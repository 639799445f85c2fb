"""16.1 and 16.3: the peak of a choice, and the fastest choice within a budget."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab16 import chain_checks as checks
from overlaplab_course.lab16 import chains, reference
from overlaplab_course.lab16.chains import UNEVEN, Block

# -- 16.1


def right_peak(blocks, again):
    kept, most = 0, 0
    for i, b in enumerate(blocks):
        most = max(most, kept + b.input + b.inside + b.work)
        kept += b.input + (i not in again) * b.inside
    return most


def by_moments(blocks, again):
    """One sum for each block at work."""
    return max(
        sum(b.input for b in blocks[: i + 1])
        + sum(blocks[j].inside for j in range(i) if j not in again)
        + blocks[i].inside
        + blocks[i].work
        for i in range(len(blocks))
    )


def backwards(blocks, again):
    """From the last block to the first, as the backward goes; a float is a number."""
    living = float(sum(b.input for b in blocks))
    living += sum(b.inside for i, b in enumerate(blocks) if i not in again)
    most = 0.0
    for i in reversed(range(len(blocks))):
        living += blocks[i].inside * (i in again)
        most = max(most, living + blocks[i].work)
        living -= blocks[i].inside + blocks[i].input
    return most


def the_boundaries_are_freed(blocks, again):
    """The inputs of blocks that compute again are gone, too."""
    kept, most = 0, 0
    for i, b in enumerate(blocks):
        most = max(most, kept + b.input + b.inside + b.work)
        kept += 0 if i in again else b.input + b.inside
    return most


def one_boundary_is_enough(blocks, again):
    return right_peak([Block(0, b.inside, b.work, b.ms) for b in blocks], again)


def what_is_saved(blocks, again):
    """The saved set, not the peak."""
    return sum(b.input + (i not in again) * b.inside for i, b in enumerate(blocks))


def without_work(blocks, again):
    return right_peak([Block(b.input, b.inside, 0, b.ms) for b in blocks], again)


def gone_is_gone(blocks, again):
    """What is computed again needs no room."""
    kept, most = 0, 0
    for i, b in enumerate(blocks):
        inside = 0 if i in again else b.inside
        most = max(most, kept + b.input + inside + b.work)
        kept += b.input + inside
    return most


def all_insides(blocks, again):
    return right_peak(blocks, set())


def as_if_all_came_back_at_once(blocks, again):
    """As if all blocks computed again at the same time; right for a single one."""
    least = sum(b.inside for b in blocks if b.inside)
    return max(right_peak(blocks, again), least)


def at_the_border(blocks, again):
    """The last block's moment alone."""
    kept = what_is_saved(blocks[:-1], again)
    last = blocks[-1]
    return kept + last.input + last.inside + last.work


def of_the_largest_block(blocks, again):
    """The moment of the block with the largest work, inside and input."""
    i = max(range(len(blocks)), key=lambda i: blocks[i].inside + blocks[i].work)
    b = blocks[i]
    return what_is_saved(blocks[:i], again) + b.input + b.inside + b.work


WRONG_PEAKS = {
    the_boundaries_are_freed: checks.INPUTS,
    one_boundary_is_enough: checks.INPUTS,
    what_is_saved: checks.AT_WORK,
    without_work: checks.AT_WORK,
    gone_is_gone: checks.AT_WORK,
    all_insides: checks.KEPT,
    as_if_all_came_back_at_once: checks.KEPT,
    at_the_border: checks.LARGEST,
    of_the_largest_block: checks.INPUTS,
    lambda blocks, again: None: checks.INPUTS,
}


@pytest.mark.parametrize("peak", WRONG_PEAKS, ids=lambda f: f.__name__)
def test_a_wrong_peak_is_refused_for_its_own_reason(peak, faults):
    assert WRONG_PEAKS[peak] in faults(judge(find_exercise("16.1"), peak))


@pytest.mark.parametrize("peak", [right_peak, by_moments, backwards])
def test_a_right_peak_passes_however_it_is_found(peak):
    verdict = judge(find_exercise("16.1"), peak)
    assert verdict.passed, str(verdict)


def test_a_refusal_names_the_chain_and_both_numbers(faults):
    wrong = faults(judge(find_exercise("16.1"), gone_is_gone))
    assert "1 block without input, again [0]: you say 9 MiB" in wrong[checks.AT_WORK]
    assert "49 MiB" in wrong[checks.AT_WORK]


# -- 16.3


def fastest(blocks, budget, *, need=None, unit=1, slack=0, keeps=None):
    """What the exercise asks for, with a knob for each mistake."""
    need = need or (lambda b: b.input + b.inside + b.work)
    keeps = keeps or (lambda b: b.input)
    best = {0: (0, frozenset())}
    for i, b in enumerate(blocks):
        longer = {}
        for kept, (ms, again) in best.items():
            if kept + need(b) > budget - slack:
                continue
            for more, way in (
                (keeps(b) + b.inside, (ms, again)),
                (keeps(b), (ms + b.ms, again | {i})),
            ):
                at = -(-(kept + more) // unit) * unit
                if at not in longer or way[0] < longer[at][0]:
                    longer[at] = way
        best = longer
    return set(min(best.values())[1]) if best else None


def by_lists(blocks, budget):
    """Beginnings in a list, sorted; those that another beats in both are dropped."""
    ways = [(0, 0, ())]
    for i, b in enumerate(blocks):
        ways = [w for w in ways if w[0] + b.input + b.inside + b.work <= budget]
        ways = sorted(
            [(k + b.input + b.inside, ms, a) for k, ms, a in ways]
            + [(k + b.input, ms + b.ms, (*a, i)) for k, ms, a in ways]
        )
        kept, least = [], None
        for way in ways:
            if least is None or way[1] < least:
                kept.append(way)
                least = way[1]
        ways = kept
    return list(min(ways, key=lambda w: w[1])[2]) if ways else None


def from_the_last(blocks, budget):
    """With memory, from the end: what is the best for the rest, with so much kept?"""
    seen = {}

    def rest(i, kept):
        if i == len(blocks):
            return 0, frozenset()
        if (i, kept) not in seen:
            b, found = blocks[i], []
            if kept + b.input + b.inside + b.work <= budget:
                for inside, ms, more in ((b.inside, 0, set()), (0, b.ms, {i})):
                    behind = rest(i + 1, kept + b.input + inside)
                    if behind:
                        found.append((behind[0] + ms, behind[1] | more))
            seen[i, kept] = min(found, key=lambda w: w[0]) if found else None
        return seen[i, kept]

    answer = rest(0, 0)
    return None if answer is None else answer[1]


def in_a_row(blocks, budget):
    """A place for every MiB of the budget, and where its entry came from."""
    row = [None] * (budget + 1)
    row[0] = (0, None)
    for i, b in enumerate(blocks):
        longer = [None] * (budget + 1)
        for kept, entry in enumerate(row):
            if entry is None or kept + b.input + b.inside + b.work > budget:
                continue
            for at, ms, mine in (
                (kept + b.input + b.inside, entry[0], entry[1]),
                (kept + b.input, entry[0] + b.ms, (i, entry[1])),
            ):
                if longer[at] is None or ms < longer[at][0]:
                    longer[at] = (ms, mine)
        row = longer
    found = [entry for entry in row if entry is not None]
    if not found:
        return None
    chain, again = min(found, key=lambda entry: entry[0])[1], set()
    while chain is not None:
        again.add(chain[0])
        chain = chain[1]
    return frozenset(again)


def no_temporaries(blocks, budget):
    return fastest(blocks, budget, need=lambda b: b.input + b.inside)


def the_saved_set(blocks, budget):
    """What is saved has to fit, not what is computed again."""
    ways = [(0, 0, ())]
    for i, b in enumerate(blocks):
        ways = [(k + b.input + b.inside, ms, a) for k, ms, a in ways] + [
            (k + b.input, ms + b.ms, (*a, i)) for k, ms, a in ways
        ]
        fits = sorted(w for w in ways if w[0] <= budget)
        ways = [
            w
            for j, w in enumerate(fits)
            if j == 0 or w[1] < min(v[1] for v in fits[:j])
        ]
    return set(min(ways, key=lambda w: w[1])[2]) if ways else None


def boundaries_are_free(blocks, budget):
    return fastest(blocks, budget, keeps=lambda b: 0)


def all_or_nothing(blocks, budget):
    """Everything again, unless nothing has to be."""
    for again in (set(), set(range(len(blocks)))):
        if right_peak(blocks, again) <= budget:
            return again
    return None


def keeps_the_fastest_beginning_alone(blocks, budget):
    """Greedy: each block is kept if the rest would fit with all computed again."""
    again = set(range(len(blocks)))
    for i in range(len(blocks)):
        if right_peak(blocks, again - {i}) <= budget:
            again -= {i}
    return again if right_peak(blocks, again) <= budget else None


def grain_of_the_budget(blocks, budget):
    """The larger the budget, the coarser the table: a larger one may be slower."""
    found = fastest(blocks, budget, unit=max(1, budget // 250))
    return fastest(blocks, budget) if found is None else found


def never_gives_up(blocks, budget):
    found = fastest(blocks, budget)
    return set(range(len(blocks))) if found is None else found


def gives_up_early(blocks, budget):
    """A reserve of 1 MiB."""
    return fastest(blocks, budget, slack=1)


def counts_from_one(blocks, budget):
    found = fastest(blocks, budget)
    return found and {i + 1 for i in found}


def of_names(blocks, budget):
    found = fastest(blocks, budget)
    return found if found is None else [f"block {i}" for i in found]


def largest_first(blocks, budget):
    return chains.largest_first(blocks, budget)


def cheapest_first(blocks, budget):
    return chains.cheapest_first(blocks, budget)


WRONG_CHOICES = {
    no_temporaries: checks.FITS,
    the_saved_set: checks.FITS,
    boundaries_are_free: checks.FITS,
    all_or_nothing: checks.LITTLE,
    largest_first: checks.LITTLE,
    cheapest_first: checks.LITTLE,
    keeps_the_fastest_beginning_alone: checks.LITTLE,
    grain_of_the_budget: checks.MONOTONIC,
    never_gives_up: checks.NONE,
    gives_up_early: checks.NONE,
    counts_from_one: checks.FITS,
    of_names: checks.USABLE,
}


@pytest.mark.parametrize("function", WRONG_CHOICES, ids=lambda f: f.__name__)
def test_a_wrong_choice_is_refused_for_its_own_reason(function, faults):
    wrong = faults(judge(find_exercise("16.3"), function))
    assert WRONG_CHOICES[function] in wrong, wrong


def as_an_array(blocks, budget):
    found = fastest(blocks, budget)
    return None if found is None else torch.tensor(sorted(found)).numpy()


@pytest.mark.parametrize(
    "function", [fastest, by_lists, from_the_last, in_a_row, as_an_array]
)
def test_a_right_choice_passes_however_it_is_found(function):
    verdict = judge(find_exercise("16.3"), function)
    assert verdict.passed, str(verdict)


def every_choice(blocks, budget):
    """Right, and too slow for more than a few blocks."""
    best = None
    for bits in product((0, 1), repeat=len(blocks)):
        again = {i for i, bit in enumerate(bits) if bit}
        ms = sum(blocks[i].ms for i in again)
        fits = reference.peak(blocks, again) <= budget
        if fits and (best is None or ms < best[0]):
            best = ms, again
    return None if best is None else best[1]


def endless(blocks, budget):
    while True:
        pass


@pytest.mark.parametrize(
    ("slow", "hint"),
    [
        (every_choice, "Each block doubles their number, and 16 blocks have 2**16."),
        (endless, "which loop, or which wait, does not end?"),
    ],
    ids=["every choice", "endless"],
)
def test_whose_time_is_over_is_told_of_choices_or_of_an_endless_loop(slow, hint):
    verdict = judge(replace(find_exercise("16.3"), timeout_s=2), slow)
    assert "your code was stopped" in verdict.error
    assert hint in verdict.hint


# -- what they are judged by


@pytest.mark.parametrize("seed", range(20))
def test_the_lessons_own_choice_is_that_of_brute_force(seed):
    draw = random.Random(seed)
    blocks = chains.random_chain(draw.randint(1, 7), 100 + seed)
    budget = draw.randint(20, 300)
    right, found = chains.brute_force(blocks, budget), reference.fastest(blocks, budget)
    assert (right is None) == (found is None)
    if right is not None and found is not None:
        assert chains.peak_of(blocks, found) <= budget
        assert chains.extra_ms(blocks, found) == chains.extra_ms(blocks, right)


def test_a_walk_is_a_literal_step():
    blocks = (Block(1, 10, 4, 2), Block(2, 20, 5, 3))
    (memory,) = chains.walk(blocks, {0}).memory
    assert [(t // 10**6, size // chains.MIB) for t, size in memory.steps] == [
        (0, 11),  # F0
        (2, 23),  # F1, block 0 without its inside
        (5, 28),  # B1
        (11, 11),  # F0 again
        (13, 15),  # B0
        (17, 0),
    ]
    assert chains.walk(blocks, {0}).order().splitlines()[3] == (
        "0 default F0 again 11000000-13000000"
    )


def test_in_the_lessons_chain_neither_rule_is_the_best_and_both_fit():
    for rule in (chains.largest_first, chains.cheapest_first):
        lost = 0
        for budget in range(70, 240, 10):
            again = rule(UNEVEN, budget)
            best = reference.fastest(UNEVEN, budget)
            assert chains.peak_of(UNEVEN, again) <= budget
            lost += chains.extra_ms(UNEVEN, again) > chains.extra_ms(UNEVEN, best)
        assert lost
