"""Passes made wrong on purpose are refused by the check that every pass ends with."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from overlaplab.techniques.compiler.bucketing import Merge, kind_of, merge
from overlaplab.techniques.compiler.checks import check_same, graph_pass
from overlaplab.techniques.compiler.graphs import GraphError, copied, launches
from tests.techniques.compiler.making import Making, aten


def graph_of_everything() -> Graph:
    """A write in place, two draws, two collectives of which one is read inside."""
    m = Making()
    x, y = m.input("x", 4), m.input("y", 4)
    a = m.call(aten.relu.default, x, name="a")
    b = m.call(aten.neg.default, a, name="b")
    m.call(aten.mul_.Scalar, a, 2, name="double_a")
    first, second = (m.call(aten.rand_like.default, y, name=n) for n in ("r1", "r2"))
    one = m.reduced(b)
    two = m.reduced(a)
    norm = m.call(aten.norm.Scalar, one, name="norm")
    return m.returning(one, two, norm, first, second)


def move(graph: Graph, name: str, before: str) -> None:
    named = {node.name: node for node in graph.nodes}
    named[before].prepend(named[name])


def drop_an_edge(graph: Graph) -> None:
    move(graph, "double_a", "b")  # b reads a before that


def read_too_early(graph: Graph) -> None:
    named = {node.name: node for node in graph.nodes}
    named["norm"].replace_input_with(named["wait_b"], named["reduce_b"])
    move(graph, "norm", "wait_b")


def move_a_reader_before_its_input(graph: Graph) -> None:
    move(graph, "norm", "wait_b")


def forget_a_wait(graph: Graph) -> None:
    named = {node.name: node for node in graph.nodes}
    named["wait_a"].replace_all_uses_with(named["a"])
    graph.erase_node(named["wait_a"])


def skip_a_collective(graph: Graph) -> None:
    named = {node.name: node for node in graph.nodes}
    named["wait_a"].replace_all_uses_with(named["a"])
    graph.erase_node(named["wait_a"])
    graph.erase_node(named["reduce_a"])


def send_twice(graph: Graph) -> None:
    named = {node.name: node for node in graph.nodes}
    with graph.inserting_after(named["wait_a"]):
        again = graph.node_copy(named["reduce_a"], lambda n: n)
    with graph.inserting_after(again):
        graph.node_copy(named["wait_a"], lambda n: again)


def swap_two_results(graph: Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    one, two, *rest = output.args[0]
    output.args = ((two, one, *rest),)


def send_another_tensor(graph: Graph) -> None:
    named = {node.name: node for node in graph.nodes}
    named["reduce_a"].replace_input_with(named["a"], named["b"])


def reduce_by_another_operation(graph: Graph) -> None:
    launch = launches(graph)[0]
    launch.args = (launch.args[0], "max", launch.args[2])


def write_what_is_being_sent(graph: Graph) -> None:
    move(graph, "reduce_a", "double_a")


def swap_two_draws(graph: Graph) -> None:
    move(graph, "r2", "r1")


def return_less(graph: Graph) -> None:
    output = next(iter(reversed(graph.nodes)))
    output.args = (output.args[0][:-1],)


WRONG = {
    drop_an_edge: "of 2 tensors 1 are not sent any more, 1 are new",
    read_too_early: "norm reads reduce_b, which reduce_b has not finished",
    move_a_reader_before_its_input: "left a graph that is no graph",
    forget_a_wait: "reduce_a is launched and never waited for",
    skip_a_collective: "of 2 tensors 1 are not sent any more, 0 are new",
    send_twice: "of 2 tensors 0 are not sent any more, 1 are new",
    swap_two_results: "result 0, wait_a, is not what it was",
    send_another_tensor: "of 2 tensors 1 are not sent any more, 1 are new",
    reduce_by_another_operation: "of 2 tensors 1 are not sent any more, 1 are new",
    write_what_is_being_sent: "double_a writes a while reduce_a still sends it",
    swap_two_draws: "result 3, r1, is not what it was",
    return_less: "returns 4 values; expected 5",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.__name__)
def test_a_wrong_pass_is_refused(wrong) -> None:
    with pytest.raises(GraphError) as refusal:
        graph_pass(wrong)(graph_of_everything())

    assert WRONG[wrong] in str(refusal.value)


def test_a_pass_that_does_nothing_is_not_refused() -> None:
    check_same(graph_of_everything(), copied(graph_of_everything()))


def test_a_bucket_across_a_circle_is_refused() -> None:
    m = Making()
    first = m.reduced(m.input("x", 4))
    graph = m.returning(m.reduced(m.call(aten.neg.default, first, name="y")))
    one, two = launches(graph)
    both = Merge((one.name, two.name), 32, kind_of(one))

    with pytest.raises(GraphError, match=r"makes a circle.*needs the result"):
        merge(graph, [both])


def test_a_bucket_of_two_kinds_is_refused() -> None:
    m = Making()
    x = m.input("x", 4)
    graph = m.returning(m.reduced(x), m.wait(m.launch(x, "max")))
    one, two = launches(graph)

    with pytest.raises(GraphError, match="of 2 kinds"):
        merge(graph, [Merge((one.name, two.name), 32, kind_of(one))])
