"""Whom a node of the backward pass waits for: its own gradients' nodes, no others."""

from types import SimpleNamespace

import torch

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.cluster.virtual.lanes import GraphTask
from overlaplab.streams import current_stream, stream


class Node(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def node(*below):
    return Node(next_functions=tuple((n, 0) for n in below))


def begin_all(*steps):
    """The waits of each (node, lane); a lane's point is how many nodes ran before."""
    task = GraphTask("start", "default")
    return [task.begin(node, lane, number) for number, (node, lane) in enumerate(steps)]


def test_a_node_waits_for_the_one_above_it_on_another_lane():
    below = node()
    above = node(below)
    assert begin_all((above, "default"), (below, "side")) == [[], ["start", 1]]


def test_branches_that_do_not_meet_do_not_wait_for_one_another():
    left, right = node(node()), node(node())
    (left_end, _), (right_end, _) = left.next_functions[0], right.next_functions[0]
    top = node(left, right)
    waits = begin_all(
        (top, "default"),
        (right, "default"),
        (left, "side"),
        (right_end, "default"),
        (left_end, "side"),
    )
    # The left branch waits for the top alone, which had brought its lane to 1.
    assert waits == [[], [], ["start", 1], [], [1]]


def test_a_way_through_nodes_that_launch_nothing_counts():
    end = node()
    silent = node(end)
    top = node(silent)
    assert begin_all((top, "default"), (end, "side")) == [[], ["start", 1]]


def test_a_second_root_waits_for_nobody_but_the_caller():
    one, two = node(), node()
    assert begin_all((one, "default"), (two, "side")) == [[], ["start"]]


def test_branches_run_backward_side_by_side_on_the_virtual_cluster():
    def step():
        side, x = streams.Stream(), torch.ones(4)
        left = torch.ones(4, requires_grad=True)
        right = torch.ones(4, requires_grad=True)
        side.wait_stream(current_stream())
        with stream(side):
            one = (left * x).exp()
        two = (right * x).exp()
        current_stream().wait_stream(side)
        (one * two).sum().backward()
        return left.grad + right.grad

    _, program = run_virtual(step, world_size=1)
    ops = [op for op in program.ranks[0] if op.phase == "backward"]
    on_side = [op for op in ops if op.stream == "stream 1"]
    before = [
        op for op in ops if op.stream == "default" and op.index < on_side[0].index
    ]
    # Two products for the branches, then two operators of the right branch.
    assert [op.name for op in before] == ["mul", "mul", "mul", "mul"]
    assert on_side[0].after == (before[1].index,)
    assert all(op.after == () for op in on_side[1:])


def test_gradients_of_one_leaf_from_two_streams_are_added_after_both():
    def step():
        side, weight = streams.Stream(), torch.ones(4, requires_grad=True)
        side.wait_stream(current_stream())
        with stream(side):
            one = weight.exp()
        two = weight.exp()
        current_stream().wait_stream(side)
        (one * two).sum().backward()
        return weight.grad

    _, program = run_virtual(step, world_size=1)
    ops = program.ranks[0]
    (add,) = [op for op in ops if op.name == "add"]
    summands = [op.index for op in ops if set(op.writes) & set(add.reads)]
    assert {ops[index].stream for index in summands} == {"default", "stream 1"}
    assert set(add.after) == {i for i in summands if ops[i].stream != add.stream}
