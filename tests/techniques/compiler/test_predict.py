"""The predicted timeline of a graph, as literal times."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.scheduling import plan_schedule, schedule
from tests.techniques.compiler.making import Making, aten

CHALK = find_hardware("chalk")


def messages(graph: Graph, costs: Costs) -> list[tuple[str, int, int]]:
    """The lane of each, when it leaves and when it is over."""
    spans = predict(graph, costs).spans
    found = [s for s in spans if s.kind == "communication"]
    return [(s.lane, s.start_ns, s.end_ns) for s in found]


def two_groups() -> Graph:
    """Two gradients that are there already, each averaged over a group of its own."""
    m = Making()
    one, two = (m.input(name, 100, 100) for name in ("one", "two"))
    sent = [m.launch(one, group="rows"), m.launch(two, group="columns")]
    return m.returning(*map(m.wait, sent))


def test_messages_of_two_groups_share_the_wire():
    # Alone 1 us of latency and 4 on the wire. Beside one another each gets half of it.
    assert messages(two_groups(), Costs(CHALK, 2)) == [
        ("comm", 0, 9_000),
        ("comm:columns", 0, 9_000),
    ]


def test_each_group_has_a_size_of_its_own():
    costs = Costs(CHALK, {"rows": 4, "columns": 2})

    # Four ranks send 6 us: half of the wire to 9 us, then the 2 us that are left.
    assert messages(two_groups(), costs) == [
        ("comm", 0, 11_000),
        ("comm:columns", 0, 9_000),
    ]


def test_messages_of_one_group_take_turns():
    graph = schedule(nine_operators(), plan_schedule(nine_operators(), Costs(CHALK, 2)))

    assert messages(graph, Costs(CHALK, 2)) == [
        ("comm", 2_000, 7_000),
        ("comm", 7_000, 12_000),
        ("comm", 12_000, 17_000),
    ]


def test_python_launches_a_backward_as_it_launches_anything():
    slow = replace(CHALK, launch_ns=10_000, backward_launch_ns=1_000)
    m = Making()
    x = m.input("x", 100, 100)
    graph = m.returning(m.call(aten.mm.default, x, x))

    assert predict(graph, Costs(slow, 1)).step_ns == 12_000
