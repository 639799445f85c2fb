"""13.6, the order of computing, and what lab 13 prints and draws."""

from __future__ import annotations

import itertools

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import graphs, lists, ordering, shipped, thesis
from overlaplab_course.lab13 import plan_checks as checks
from overlaplab_course.lab13.reference import launch_early, wait_late


def layer_of(layers, name):
    return layers[len(layers) - int(name[2:])]


def by_key(layers, key):
    """Of the operators that are ready the one with the least key."""
    done = []
    while len(done) < 2 * len(layers):
        ready = [
            name
            for name in lab.names_of(layers)
            if name not in done
            and (int(name[2:]) == len(layers) or f"dx{int(name[2:]) + 1}" in done)
        ]
        done.append(min(ready, key=key))
    return done


def as_autograd_does(layers):
    return lab.names_of(layers)


def dw_first(layers):
    return by_key(layers, lambda name: (-int(name[2:]), name[1] == "x"))


def all_dx_first(layers):
    return by_key(layers, lambda name: (name[1] == "w", -int(name[2:])))


def shortest_first(layers):
    return by_key(layers, lambda name: layer_of(layers, name)[name[1] == "w"])


def largest_message_first(layers):
    return by_key(layers, lambda name: -layer_of(layers, name)[2] * (name[1] == "w"))


def johnson(layers):
    """dw if it is no longer than its message, else dx, then the largest message."""

    def key(name):
        _, dw, message = layer_of(layers, name)
        if name[1] == "x":
            return (1, 0)
        return (0, dw) if dw <= message else (2, -message)

    return by_key(layers, key)


def dw_without_its_dx(layers):
    return sorted(lab.names_of(layers))


def one_is_missing(layers):
    return dw_first(layers)[:-1]


def one_twice(layers):
    return [*dw_first(layers), "dw1"]


ORDERS = {
    as_autograd_does: checks.SHORTEST,
    dw_first: checks.SHORTEST,
    all_dx_first: checks.SHORTEST,
    shortest_first: checks.SHORTEST,
    largest_message_first: checks.SHORTEST,
    johnson: checks.SHORTEST,
    dw_without_its_dx: checks.POSSIBLE,
    one_is_missing: checks.POSSIBLE,
    one_twice: checks.POSSIBLE,
}


@pytest.mark.parametrize("wrong", ORDERS, ids=lambda f: f.__name__)
def test_a_wrong_order_is_refused_for_its_own_reason(wrong, faults):
    assert set(faults(judge(find_exercise("13.6"), wrong))) == {ORDERS[wrong]}


def try_all(layers):
    every = itertools.permutations(lab.names_of(layers))
    possible = []
    for names in every:
        place = {name: i for i, name in enumerate(names)}
        above = {n: f"dx{int(n[2:]) + 1}" for n in names}
        if all(place.get(above[n], -1) < place[n] for n in names):
            possible.append(names)
    return min(possible, key=lambda names: lab.end_ms(layers, names))


def grow(layers):
    """Depth first, as a generator of names."""

    def more(begun):
        rest = [n for n in lab.names_of(layers) if n not in begun]
        if not rest:
            return lab.end_ms(layers, begun), begun
        return min(
            more((*begun, n))
            for n in rest
            if int(n[2:]) == len(layers) or f"dx{int(n[2:]) + 1}" in begun
        )

    yield from more(())[1]


@pytest.mark.parametrize("function", [try_all, grow])
def test_a_right_order_passes_however_it_is_found(function):
    verdict = judge(find_exercise("13.6"), function)
    assert verdict.passed, str(verdict)


def test_a_problem_of_the_lesson_is_the_graph_of_the_lesson():
    """dx first 19 ms, dw first 17: as the nine operators are timed."""
    assert lab.end_ms(lab.NINE, lab.names_of(lab.NINE)) == 19
    assert lab.end_ms(lab.NINE, dw_first(lab.NINE)) == ordering.best_ms(lab.NINE) == 17


# -- what is printed and drawn


def test_a_list_by_type_allows_too_much_and_one_by_layer_too_little():
    told = lab.wrong_of({"by type": lists.by_type, "by layer": lists.by_layer})
    assert told.splitlines() == [
        "by type: of 18 answers 6 allow what cannot be, 0 miss what could",
        "by layer: of 18 answers 0 allow what cannot be, 6 miss what could",
    ]


def test_hooks_and_the_code_of_the_graph_launch_the_same_messages():
    graph = lab.graph_of(lab.AFTER)
    launch_early(graph, lab.needs_of(graph))
    wait_late(graph, lab.needs_of(graph))
    code, hooks = lab.run_graph(graph), lab.with_hooks()
    starts = [
        [s.start_ns / 1e6 for s in timeline.spans if s.kind == "communication"]
        for timeline in (code, hooks)
    ]
    assert starts[0] == [4, 9, 14]
    assert starts[1] == pytest.approx([4.08, 9.08, 14.08])  # a copy of 0.08 ms
    names = [s.name for s in code.spans if s.kind == "compute"]
    assert names == ["dx3", "dw3", "dx2", "dw2", "dx1", "dw1"]
    assert code.step_ns == lab.timed(graph).step_ns  # predicted as it ran


@pytest.mark.parametrize(("way", "independent"), [("forward", 0), ("backward", 4)])
def test_only_a_backward_pass_has_work_beside_a_split_layers_message(way, independent):
    graph = graphs.graph_of(way)
    needs = graphs.needs_of(graph)
    (launch,) = lab.launches(graph)
    free = [
        n
        for n in lab.operators(graph)
        if n not in lab.all_before(needs, launch)
        and launch not in lab.all_before(needs, n)
    ]
    assert sum(map(lab.COSTS, free)) == independent * 10**6


def test_who_decides_matters_less_than_link_and_batch():
    """Between hooks and compiler there is next to nothing; both range widely."""
    hooks_least, hooks_most, least, most, lead = lab.spread()
    assert 0 <= lead < 5
    assert hooks_most - hooks_least > 20
    assert most - least > 20


def test_no_way_is_shorter_than_the_least_there_is():
    for link in thesis.LINKS:
        for batch in thesis.BATCHES:
            found = thesis.ways(link, batch)
            assert found.least_ns <= found.compiler.step_ns <= found.hooks.step_ns
            assert found.hooks.step_ns < found.serial.step_ns


def test_the_installed_torch_has_every_pass_and_setting_that_is_named():
    tables = f"{shipped.passes_table()}\n{shipped.settings_table()}"
    assert "not in this version" not in tables
    assert max(map(len, tables.splitlines())) <= 100  # one screen of 1280 pixels


def test_what_is_stored_is_what_the_benchmark_stored():
    assert lab.ms("A, batch 2", "ours 400") == pytest.approx(29.71)
    assert lab.ms("B, batch 8", "compute") == pytest.approx(65.644, abs=1e-3)
    assert "2 x NVIDIA H200, torch 2.11.0" in lab.gpu_table()
