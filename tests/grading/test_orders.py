"""Twins of functions: sets, ids and hashes give each rank another order, no more."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import overlaplab as ol
from overlaplab.grading.orders import disagree

DTYPES = (torch.float32, torch.int64, torch.bfloat16)


def display(things):
    return [str(thing) for thing in {*things}]


def comprehension(things):
    return [str(thing) for thing in {thing for thing in things}]


def by_name(things):
    return [str(thing) for thing in set(things)]


def joined(things):
    return [str(t) for t in {things[0]} | {things[1]}.union(things[2:])]


def popped(things):
    left = set(things)
    return [str(left.pop()) for _ in range(len(things))]


def by_id(things):
    return [str(thing) for thing in sorted(things, key=id)]


def by_hash(things):
    return [str(thing) for thing in sorted(things, key=lambda t: hash(str(t)))]


def in_a_helper(things):
    return [str(thing) for thing in distinct(things)]


def distinct(things):
    return frozenset(things)


class InAMethod:
    def __init__(self, things):
        super().__init__()
        self.things = {thing for thing in things}

    def __iter__(self):
        return (str(thing) for thing in self.things)


@torch.no_grad()
def decorated(things):
    return [str(thing) for thing in distinct(things)]


def around(first):
    def closure(things):
        return [first, *(str(thing) for thing in {*things})]

    return closure


def map_by(function, things):
    return function(things)


def on_rank(solution):
    return list(disagree(solution)(DTYPES))


def orders(solution):
    return ol.run(on_rank, solution, world_size=2, hardware="chalk").values


@pytest.mark.parametrize(
    "solution",
    [
        display,
        comprehension,
        by_name,
        joined,
        popped,
        by_id,
        by_hash,
        in_a_helper,
        InAMethod,
        decorated,
        around("first"),
        partial(display),
        partial(map_by, display),
    ],
    ids=lambda f: getattr(f, "__name__", "partial"),
)
def test_what_walks_over_a_set_goes_another_way_on_each_rank(solution):
    one, other = orders(solution)
    assert one != other
    assert sorted(one) == sorted(other) == sorted(solution(DTYPES))


def sorts(things):
    return [str(thing) for thing in sorted({*things}, key=str)]


def asks(things):
    seen = set()
    return [str(t) for t in things if not (t in seen or seen.add(t))]


def counts(things):
    return [str(len({*things} - {things[0]})), str(max({1, 2} & {2, 3}))]


def keeps(things):
    return [str(thing) for thing in dict.fromkeys(things)]


def numbers(things):
    return [str(hash(n)) for n in (3, 1, 2)]


def looks_up(things):
    places = {id(thing): n for n, thing in enumerate(things)}
    return [str(places[id(thing)]) for thing in things]


@pytest.mark.parametrize("solution", [sorts, asks, counts, keeps, numbers, looks_up])
def test_what_needs_no_order_of_a_set_does_the_same_everywhere(solution):
    one, other = orders(solution)
    assert one == other == solution(DTYPES)


@pytest.mark.parametrize("solution", [len, lambda things: {*things}, DTYPES, None])
def test_what_has_no_source_of_its_own_stays_as_it_is(solution):
    assert disagree(solution) is solution


def test_an_empty_set_has_nothing_to_give():
    with pytest.raises(KeyError):
        disagree(pop_nothing)()


def pop_nothing():
    return set().pop()


made = []


def noted(function):
    made.append(function.__name__)
    return function


@noted
def named(things):
    return calls_back(things)


def calls_back(things):
    return {*things} if things else named(things)


@noted
def not_named(things):
    return {*things}


class Base:
    def all(self):
        return list(named(DTYPES))


class Derived(Base):
    def __iter__(self):
        return iter(self.all())


def derived(things):
    return [str(thing) for thing in Derived()]


def test_only_what_a_solution_names_is_made_again():
    one, other = orders(derived)
    assert one == other[::-1]
    assert "not_named" in made and len({*made}) == 2
    made.clear()
    disagree(derived)(DTYPES)
    assert made == ["named"]
