"""The graphs of lab 13, and what of a graph travels between learner and grader.

A graph is written as lines, one for each node: "dw = mm grad_t x". A learner's pass
moves nodes of a graph that is made where the learner's code runs; the grader hears the
order of the names, and puts a graph of its own into that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.fx import Graph, Node

from overlaplab.operators import COLLECTIVES, node_facts
from overlaplab.techniques.compiler import find_dependencies, nine_operators, show
from overlaplab.techniques.compiler.graphs import is_launch, is_wait
from overlaplab.techniques.compiler.graphs import launches as launches

Needs = Mapping[Node, Sequence[Node]]
WIDTH = 100
_MOST_NAMES = 1000  # no graph of this lab has so many nodes
GROUP = "0"
_FUNCTIONAL: Any = getattr(torch.ops, COLLECTIVES)
_aten = torch.ops.aten
OPERATORS: dict[str, Any] = {
    "mm": _aten.mm.default,
    "t": _aten.t.default,
    "add": _aten.add.Tensor,
    "mul": _aten.mul.Tensor,
    "mul_": _aten.mul_.Tensor,
    "copy_": _aten.copy_.default,
    "relu": _aten.relu.default,
    "avg": _FUNCTIONAL.all_reduce.default,
    "max": _FUNCTIONAL.all_reduce.default,
    "wait": _FUNCTIONAL.wait_tensor.default,
}

# Each layer's dX before its dW, as autograd makes them.
_LAYERS = """
dx3 = mm grad w3
grad3_t = t grad
dw3 = mm grad3_t x3
dx2 = mm dx3 w2
grad2_t = t dx3
dw2 = mm grad2_t x2
dx1 = mm dx2 w1
grad1_t = t dx2
dw1 = mm grad1_t x1
"""
_INPUTS = "grad x3 w3 x2 w2 x1 w1"
_OUT = "dx1 wait_dw3 wait_dw2 wait_dw1"

# By name: inputs, lines, what is returned.
CASES: dict[str, tuple[str, str, str]] = {
    "all messages after the backward pass": (
        _INPUTS,
        _LAYERS
        + """
all_reduce_dw3 = avg dw3
wait_dw3 = wait all_reduce_dw3
all_reduce_dw2 = avg dw2
wait_dw2 = wait all_reduce_dw2
all_reduce_dw1 = avg dw1
wait_dw1 = wait all_reduce_dw1
""",
        _OUT,
    ),
    # Sent in another order than they are made; a forward's weight, too.
    "another order": (
        _INPUTS,
        _LAYERS
        + """
all_reduce_dw1 = avg dw1
all_reduce_dw3 = avg dw3
all_reduce_x1 = max x1
all_reduce_dw2 = avg dw2
wait_x1 = wait all_reduce_x1
wait_dw1 = wait all_reduce_dw1
wait_dw2 = wait all_reduce_dw2
wait_dw3 = wait all_reduce_dw3
""",
        _OUT + " wait_x1",
    ),
    # A gradient is halved in place before it leaves; results are read inside.
    "updates inside": (
        "grad x2 w2 x1 w1",
        """
grad2_t = t grad
dw2 = mm grad2_t x2
dx2 = mm grad w2
half2 = mul_ dw2 0.5
grad1_t = t dx2
dw1 = mm grad1_t x1
all_reduce_dw2 = avg dw2
wait_dw2 = wait all_reduce_dw2
all_reduce_dw1 = avg dw1
wait_dw1 = wait all_reduce_dw1
dx1 = mm dx2 w1
new_w2 = add w2 wait_dw2
flat_w2 = t new_w2
top = mm flat_w2 x2
new_w1 = add w1 wait_dw1
last = relu dx1
""",
        "last new_w1 top",
    ),
    # One buffer for two gradients: the second may not be copied in before the first
    # has left, though no value says so.
    "one buffer for two": (
        "grad x2 w2 x1 buffer",
        """
grad2_t = t grad
dw2 = mm grad2_t x2
fill2 = copy_ buffer dw2
dx2 = mm grad w2
grad1_t = t dx2
dw1 = mm grad1_t x1
extra = relu dw1
all_reduce_2 = avg buffer
wait_2 = wait all_reduce_2
fill1 = copy_ buffer dw1
all_reduce_1 = avg buffer
wait_1 = wait all_reduce_1
last = relu extra
""",
        "last wait_2 wait_1",
    ),
    # The second message sends what the first one brought.
    "a message of a message": (
        "grad x2 w2 x1",
        """
grad2_t = t grad
dw2 = mm grad2_t x2
dx2 = mm grad w2
all_reduce_dw2 = avg dw2
grad1_t = t dx2
dw1 = mm grad1_t x1
wait_dw2 = wait all_reduce_dw2
half = mul wait_dw2 0.5
again = relu dx2
all_reduce_half = max half
all_reduce_dw1 = avg dw1
wait_dw1 = wait all_reduce_dw1
last = relu again
wait_half = wait all_reduce_half
""",
        "last wait_half wait_dw1",
    ),
    # Two gradients of one operator's result, and two inputs: who goes first?
    "ready together": (
        "grad x w",
        """
grad_t = t grad
dw = mm grad_t x
dx = mm grad w
more = relu dx
all_reduce_grad = avg grad
all_reduce_dw = avg dw
all_reduce_x = avg x
all_reduce_dw_max = max dw
wait_x = wait all_reduce_x
wait_dw_max = wait all_reduce_dw_max
wait_dw = wait all_reduce_dw
wait_grad = wait all_reduce_grad
""",
        "more wait_grad wait_dw wait_x wait_dw_max",
    ),
}
# A layer split over the ranks: its output is a sum over them; so is, in the backward
# pass, the gradient of its input.
TENSOR_PARALLEL: dict[str, tuple[str, str, str]] = {
    "forward": (
        "x w1 w2 w3",
        """
h = mm x w1
a = relu h
y = mm a w2
all_reduce_y = avg y
wait_y = wait all_reduce_y
z = mm wait_y w3
""",
        "z",
    ),
    "backward": (
        "grad x w1 a w2",
        """
w2_t = t w2
da = mm grad w2_t
a_t = t a
dw2 = mm a_t grad
w1_t = t w1
dx = mm da w1_t
all_reduce_dx = avg dx
wait_dx = wait all_reduce_dx
x_t = t x
dw1 = mm x_t da
""",
        "wait_dx dw2 dw1",
    ),
}
SERIAL = "each message waited for at once"
AFTER = "all messages after the backward pass"


def graph_of(case: str, width: int = WIDTH) -> Graph:
    """The graph of one case; see `moves.SLOW` for its times."""
    if case == SERIAL:
        return nine_operators(width, width, GROUP)
    inputs, lines, out = (CASES | TENSOR_PARALLEL)[case]
    graph, made = Graph(), dict[str, Node]()
    value = torch.empty((width, width), device="meta")
    for name in inputs.split():
        made[name] = graph.placeholder(name)
    for line in filter(None, lines.splitlines()):
        name, _, what, *words = line.split()
        args: tuple[Any, ...] = tuple(made.get(w) or float(w) for w in words)
        if what in ("avg", "max"):
            args = (*args, what, GROUP)
        target = OPERATORS[what]
        made[name] = graph.create_node("call_function", target, args, name=name)
    for node in made.values():
        node.meta["val"] = value.clone()
    graph.output(tuple(made[name] for name in out.split()))
    return graph


# -- what the notebook asks of a graph


def waits(graph: Graph) -> list[Node]:
    """The nodes that wait for one."""
    return [node for node in graph.nodes if is_wait(node)]


def operators(graph: Graph) -> list[Node]:
    """The nodes that compute: no input, view, message or wait."""
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and not (is_launch(node) or is_wait(node))
        and node_facts(node).operator.records
    ]


def needs_of(graph: Graph) -> Needs:
    """Of each node, the nodes that must stand before it, directly."""
    return find_dependencies(graph).needs


def all_before(needs: Needs, node: Node) -> set[Node]:
    """All that must be over before `node`."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for need in needs[todo.pop()]:
            if need not in found:
                found.add(need)
                todo.append(need)
    return found


# -- what travels


def signature(graph: Graph) -> list[tuple[str, str]]:
    """(name, what it is) of each node, in the order of the graph."""
    names = [node.name for node in graph.nodes]
    return list(zip(names, show(graph).splitlines(), strict=True))


def passed(graph_pass: Callable[..., Any], case: str) -> list[tuple[str, str]]:
    """The signature of what a learner's pass makes of a case: moved, or returned."""
    graph = graph_of(case)
    returned = graph_pass(graph, needs_of(graph))
    return signature(returned if isinstance(returned, Graph) else graph)


def answered(
    ask: Callable[..., Iterable[Node]], case: str
) -> list[tuple[str, list[str]]]:
    """For each message of a case, the names that a learner's function returns."""
    graph = graph_of(case)
    needs = needs_of(graph)
    answers = []
    for launch in launches(graph):
        found = ask(graph, needs, launch)
        answers.append((launch.name, names_in(found, "beside", "a list of nodes")))
    return answers


def names_in(found: object, who: str, expected: str) -> list[str]:
    """The names of what a learner's function returned, which may never end.

    Args:
        found: nodes, or their names.
        who: returned it.
        expected: in words.

    Raises:
        TypeError: it is no such thing.
    """
    if not isinstance(found, Iterable):
        raise TypeError(f"{who} returned {found!r}; expected {expected}")
    names = [getattr(n, "name", str(n)) for n in islice(found, _MOST_NAMES)]
    if len(names) == _MOST_NAMES:
        raise TypeError(
            f"{who} returned {_MOST_NAMES} names or more; expected {expected} that ends"
        )
    return names
