"""The search against brute force, and brute force against the virtual clock."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlaplab.program import ProgramBuilder, resolve
from overlaplab.techniques.compiler.problem import Problem, Task, end_of
from overlaplab.techniques.compiler.search import best_list, search

WIRE_NS = 1_000  # `chalk`'s latency: no message is shorter


def message(name: str, ns: int, *needs: int, num_bytes: int = 1) -> Task:
    return Task(name, ns, needs, is_message=True, bytes=num_bytes)


def random_problem(seed: int, size: int, *, is_limited: bool) -> Problem:
    """Up to `size` tasks, the last ones of which often read messages."""
    draw = random.Random(seed)
    tasks: list[Task] = []
    for position in range(size):
        needs = tuple(p for p in range(position) if draw.random() < 0.3)
        if position and draw.random() < 0.4:
            num_bytes = draw.randint(1, 5)
            tasks.append(
                Task(
                    f"m{position}",
                    WIRE_NS + 10 * draw.randint(0, 900),
                    needs or (position - 1,),
                    is_message=True,
                    bytes=num_bytes,
                    is_sync=draw.random() < 0.1,
                )
            )
        else:
            tasks.append(Task(f"c{position}", draw.randint(0, 9_000), needs))
    limit = draw.randint(5, 9) if is_limited else None
    return Problem(tuple(tasks), limit)


def orders(problem: Problem) -> Iterator[list[int]]:
    """Every order in which the tasks can be launched."""

    def grow(order: list[int], done: int) -> Iterator[list[int]]:
        if len(order) == len(problem.tasks):
            yield order
        for task, needs in enumerate(problem.needs):
            if not done >> task & 1 and not needs & ~done:
                yield from grow([*order, task], done | 1 << task)

    yield from grow([], 0)


def ends_with_waits(problem: Problem, order: list[int]) -> Iterator[int]:
    """When all is over, for every place at which each message may be waited for.

    Brute force of its own: it knows streams, a wire and a limit, and nothing of
    `problem.step`.
    """
    tasks = problem.tasks

    def go(at: int, compute: int, wire: int, flying: dict[int, int]) -> Iterator[int]:
        for early in flying if problem.limit_bytes is not None else ():
            left = {m: end for m, end in flying.items() if m != early}
            yield from go(at, max(compute, flying[early]), wire, left)
        if at == len(order):
            yield max(compute, wire)
            return
        task = order[at]
        own = tasks[task]
        read = {m: end for m, end in flying.items() if m in own.needs}
        compute = max([compute, *read.values()])
        flying = {m: end for m, end in flying.items() if m not in read}
        if not own.is_message:
            yield from go(at + 1, compute + own.ns, wire, flying)
            return
        held = sum(tasks[m].bytes for m in flying) + own.bytes
        if problem.limit_bytes is not None and held > problem.limit_bytes:
            return
        wire = max(compute, wire) + own.ns
        if own.is_sync:
            yield from go(at + 1, wire, wire, flying)
        else:
            yield from go(at + 1, compute, wire, {**flying, task: wire})

    yield from go(0, 0, 0, {})


def least_end(problem: Problem) -> int:
    return min(e for order in orders(problem) for e in ends_with_waits(problem, order))


@given(seed=st.integers(0, 10**6), size=st.integers(1, 8))
@example(seed=3570, size=7)  # a message that needs a message makes its launcher wait
@settings(max_examples=200, deadline=None)
def test_the_search_ends_when_the_best_of_all_orders_ends(seed: int, size: int) -> None:
    problem = random_problem(seed, size, is_limited=False)

    found = search(problem)

    assert found.end_ns == least_end(problem) == end_of(problem, found.order)
    assert found.is_optimal


@given(seed=st.integers(0, 10**6), size=st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_so_it_does_where_little_may_be_in_flight(seed: int, size: int) -> None:
    problem = random_problem(seed, size, is_limited=True)

    found = search(problem)

    assert found.end_ns == least_end(problem) == end_of(problem, found.order)
    assert found.is_optimal


@given(seed=st.integers(0, 10**6), size=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_an_order_takes_what_the_virtual_clock_says(seed: int, size: int) -> None:
    problem = random_problem(seed, size, is_limited=False)
    found = search(problem)
    builder = ProgramBuilder(2)
    launched: dict[int, int] = {}
    for rank in range(2):
        for task in found.order:
            own = problem.tasks[task]
            for need in own.needs:
                if problem.tasks[need].is_message:
                    builder.wait(rank, launched[need])
            if own.is_message:
                size_bytes = (own.ns - WIRE_NS) * 10
                launched[task] = builder.collective(
                    rank, "all_reduce", bytes=size_bytes
                )
                if own.is_sync:
                    builder.wait(rank, launched[task])
            else:
                builder.compute(rank, own.name, ns=own.ns)

    spans = resolve(builder.build(), "chalk").spans

    assert found.end_ns == max((span.end_ns for span in spans), default=0)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_small_budget_tells_how_far_it_may_be_from_the_best(seed: int) -> None:
    problem = random_problem(seed, 9, is_limited=False)

    small, proven = search(problem, max_states=1), search(problem)

    assert small.bound_ns <= proven.end_ns <= small.end_ns <= small.given_ns
    assert proven.is_optimal


# The theorem's conditions, each with what happens without it.


def test_launched_early_in_the_order_of_readiness_a_chain_is_optimal() -> None:
    chain = [Task("a", 3), message("ma", 3, 0), Task("b", 1, (0,))]
    chain += [message("mb", 2, 2), Task("c", 3, (2,)), message("mc", 2, 4)]

    assert best_list(Problem(tuple(chain))).given_ns == 10
    assert search(Problem(tuple(chain))).end_ns == 10


def test_another_order_of_computing_fills_the_wire_earlier() -> None:
    layer = (Task("dX", 1), Task("dW", 1), message("all_reduce", 1, 1))

    found = search(Problem(layer))

    assert (found.given_ns, found.end_ns, found.order) == (3, 2, (1, 2, 0))


def test_where_somebody_reads_the_message_with_the_longest_tail_goes_first() -> None:
    tasks = (
        Task("a", 2),
        message("m1", 4, 0),
        Task("b", 1, (0,)),  # the order of computing is given
        message("m2", 2, 2),
        Task("u1", 1, (1,)),
        Task("u2", 5, (3, 0)),
    )

    found = search(Problem(tasks))

    assert (found.given_ns, found.end_ns) == (13, 11)
    assert found.order.index(3) < found.order.index(1)


def test_under_a_limit_a_small_message_overtakes_one_that_does_not_fit() -> None:
    chain: list[Task] = []
    for layer, (ns, num_bytes) in enumerate(((9, 5), (1, 9), (1, 2), (7, 1))):
        needs = (2 * layer - 2,) if layer else ()
        chain.append(Task(f"c{layer}", ns, needs))
        chain.append(message(f"m{layer}", num_bytes, 2 * layer, num_bytes=num_bytes))
    problem = Problem(tuple(chain), limit_bytes=10)

    assert best_list(problem).end_ns > search(problem).end_ns == 26


def test_a_limit_below_one_message_names_the_least_that_is_possible() -> None:
    with pytest.raises(ValueError, match=r"limit_bytes is 4.*possible is 5"):
        Problem((Task("a", 1), message("m", 1, 0, num_bytes=5)), limit_bytes=4)


def test_a_task_cannot_need_one_that_comes_later() -> None:
    with pytest.raises(ValueError, match=r"task 0, a, needs \(1,\)"):
        Problem((Task("a", 1, (1,)), Task("b", 1)))
