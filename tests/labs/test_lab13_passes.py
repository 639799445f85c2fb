"""13.1 to 13.3: what could run beside a message, launch early, wait late."""

from __future__ import annotations

import pytest
import torch

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import graphs
from overlaplab_course.lab13 import pass_checks as checks


def before(needs, node):
    found = set(needs[node])
    return found.union(*(before(needs, need) for need in found))


# -- 13.1


def right(graph, needs, launch):
    made = before(needs, launch)
    return [
        n
        for n in lab.operators(graph)
        if n not in made and launch not in before(needs, n)
    ]


def with_views(graph, needs, launch):
    """A set, and views, which take no time."""
    views = {n for n in graph.nodes if n.name.endswith("_t")}
    return {*right(graph, needs, launch), *views}


def by_reaching_forward(graph, needs, launch):
    """Down from the message over what was found so far, and up likewise."""
    readers, makers = {launch}, {launch}
    for node in graph.nodes:
        if readers & {*needs[node]}:
            readers.add(node)
    for node in reversed(graph.nodes):
        if any(node in needs[maker] for maker in makers):
            makers.add(node)
    yield from (n for n in lab.operators(graph) if n not in readers | makers)


def direct_makers_only(graph, needs, launch):
    made = {*needs[launch]}
    return [
        n
        for n in lab.operators(graph)
        if n not in made and launch not in before(needs, n)
    ]


def readers_of_the_wait_only(graph, needs, launch):
    made, near = before(needs, launch), {launch}
    for node in graph.nodes:
        if node in lab.waits(graph) and launch in needs[node]:
            near.add(node)
    return [n for n in lab.operators(graph) if n not in made and not near & {*needs[n]}]


def values_alone(graph, needs, launch):
    values = {node: tuple(node.all_input_nodes) for node in graph.nodes}
    return right(graph, values, launch)


def what_stands_behind(graph, needs, launch):
    """Leaves out what could be moved behind the message."""
    order = list(graph.nodes)
    return [
        n for n in right(graph, needs, launch) if order.index(n) > order.index(launch)
    ]


def messages_too(graph, needs, launch):
    others = [n for n in lab.launches(graph) if n is not launch]
    made = before(needs, launch)
    return [
        *right(graph, needs, launch),
        *(n for n in others if n not in made and launch not in before(needs, n)),
    ]


def everything(graph, needs, launch):
    return lab.operators(graph)


def nothing(graph, needs, launch):
    return []


BESIDE = {
    direct_makers_only: checks.MAKERS,
    readers_of_the_wait_only: checks.READERS,
    values_alone: checks.READERS,
    what_stands_behind: checks.COMPLETE,
    nothing: checks.COMPLETE,
    messages_too: checks.OPERATORS,
    everything: checks.MAKERS,
}


@pytest.mark.parametrize("wrong", BESIDE, ids=lambda f: f.__name__)
def test_a_wrong_answer_is_refused_for_its_own_reason(wrong, faults):
    assert BESIDE[wrong] in faults(judge(find_exercise("13.1"), wrong))


@pytest.mark.parametrize("function", [right, with_views, by_reaching_forward])
def test_a_right_answer_passes_however_it_is_found(function):
    verdict = judge(find_exercise("13.1"), function)
    assert verdict.passed, str(verdict)


# -- 13.2


def place_of(graph):
    return {node: i for i, node in enumerate(graph.nodes)}


def early(graph, needs):
    for launch in lab.launches(graph):
        max(needs[launch], key=place_of(graph).get).append(launch)


def early_walking_back(graph, needs):
    """From its place towards the front, as long as nothing stands in the way."""
    for launch in lab.launches(graph):
        while launch.prev not in needs[launch]:
            launch.prev.prepend(launch)


def early_in_a_new_graph(graph, needs):
    """Returns another graph, as passes of other compilers do."""
    early(graph, needs)
    made = type(graph)()
    copies = {}
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def behind_the_inputs(graph, needs):
    """What sends an input stands behind the last of them."""
    early(graph, needs)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for launch in reversed(lab.launches(graph)):
        if all(need in inputs for need in needs[launch]):
            inputs[-1].append(launch)


def behind_its_tensor(graph, needs):
    """Who writes the tensor later in place is forgotten."""
    for launch in lab.launches(graph):
        last = max(launch.all_input_nodes, key=place_of(graph).get)
        last.append(launch)


def behind_the_first_need(graph, needs):
    for launch in lab.launches(graph):
        min(needs[launch], key=place_of(graph).get).append(launch)


def not_before_a_wait(graph, needs):
    """Stops at whatever waits: no message is launched while another travels."""
    waits = lab.waits(graph)
    for launch in lab.launches(graph):
        while launch.prev not in needs[launch] and launch.prev not in waits:
            launch.prev.prepend(launch)


def as_it_is(graph, needs):
    pass


def out_of_a_set(graph, needs):
    for launch in set(lab.launches(graph)):
        max(needs[launch], key=place_of(graph).get).append(launch)


def by_hash(graph, needs):
    for launch in sorted(lab.launches(graph), key=hash):
        max(needs[launch], key=place_of(graph).get).append(launch)


def gradients_first(graph, needs):
    """Moves computing, too."""
    early(graph, needs)
    for node in list(graph.nodes):
        if node.name == "dw3":
            node.args[0].append(node)
            node.prev.prev.prepend(node.args[0])
            node.args[0].append(node)
    early(graph, needs)


def without_waits(graph, needs):
    """Drops the waits: shorter, and wrong."""
    early(graph, needs)
    for wait in lab.waits(graph):
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)


EARLY = {
    behind_its_tensor: checks.EARLY,
    behind_the_first_need: checks.EARLY,
    not_before_a_wait: checks.AT_ONCE,
    as_it_is: checks.AT_ONCE,
    out_of_a_set: checks.SAME_ORDER,
    by_hash: checks.SAME_ORDER,
    gradients_first: checks.MOVES_ONLY,
    without_waits: checks.MOVES_ONLY,
}


@pytest.mark.parametrize("wrong", EARLY, ids=lambda f: f.__name__)
def test_a_wrong_launch_is_refused_for_its_own_reason(wrong, faults):
    assert EARLY[wrong] in faults(judge(find_exercise("13.2"), wrong))


@pytest.mark.parametrize(
    "function", [early, early_walking_back, early_in_a_new_graph, behind_the_inputs]
)
def test_a_right_launch_passes_however_it_is_moved(function):
    verdict = judge(find_exercise("13.2"), function)
    assert verdict.passed, str(verdict)
    assert verdict.step_ns == verdict.target_ns == 19_000_000


# -- 13.3


def late(graph, needs):
    for wait in lab.waits(graph):
        next(n for n in graph.nodes if wait in needs[n]).prepend(wait)


def late_walking_on(graph, needs):
    for wait in reversed(lab.waits(graph)):
        while wait not in needs[wait.next]:
            wait.next.append(wait)


def late_in_reverse(graph, needs):
    """One walk from the end; the waits of the output stand in the other order."""
    missing = set(lab.waits(graph))
    first = {}
    for node in reversed(graph.nodes):
        first.update({need: node for need in needs[node] if need in missing})
    for wait in sorted(missing, key=lambda w: w.name):
        first[wait].prepend(wait)


def before_its_users(graph, needs):
    """Who writes what was sent is no user."""
    for wait in lab.waits(graph):
        next(n for n in graph.nodes if n in wait.users).prepend(wait)


def all_at_the_end(graph, needs):
    output = list(graph.nodes)[-1]
    for wait in lab.waits(graph):
        output.prepend(wait)


def before_the_last_reader(graph, needs):
    for wait in lab.waits(graph):
        [n for n in graph.nodes if wait in needs[n]][-1].prepend(wait)


def before_the_next_launch(graph, needs):
    """One message at a time."""
    order = list(graph.nodes)
    for wait in lab.waits(graph):
        ends = [n for n in order if wait in needs[n]] + lab.launches(graph)
        ends = [n for n in ends if order.index(n) > order.index(wait)]
        min(ends, key=order.index).prepend(wait)


def one_operator_too_early(graph, needs):
    late(graph, needs)
    for wait in lab.waits(graph):
        place = place_of(graph)
        earlier = [n for n in lab.operators(graph) if place[n] < place[wait]]
        if earlier and earlier[-1] not in before(needs, wait):
            earlier[-1].prepend(wait)


def readers_move_too(graph, needs):
    late(graph, needs)
    output = list(graph.nodes)[-1]
    for node in list(graph.nodes):
        if node.name == "new_w1":
            output.prepend(node.all_input_nodes[1])
            output.prepend(node)


def reads_behind_the_output(graph, needs):
    """A pass of FX's may put a node wherever it likes."""
    late(graph, needs)
    graph.placeholder("more")


LATE = {
    reads_behind_the_output: checks.WAITS_ONLY,
    before_its_users: checks.WAITED,
    all_at_the_end: checks.WAITED,
    before_the_last_reader: checks.WAITED,
    before_the_next_launch: checks.LATE,
    one_operator_too_early: checks.LATE,
    as_it_is: checks.LATE,
    readers_move_too: checks.WAITS_ONLY,
    without_waits: checks.WAITS_ONLY,
}


@pytest.mark.parametrize("wrong", LATE, ids=lambda f: f.__name__)
def test_a_wrong_wait_is_refused_for_its_own_reason(wrong, faults):
    assert LATE[wrong] in faults(judge(find_exercise("13.3"), wrong))


@pytest.mark.parametrize("function", [late, late_walking_on, late_in_reverse])
def test_a_right_wait_passes_however_it_is_moved(function):
    verdict = judge(find_exercise("13.3"), function)
    assert verdict.passed, str(verdict)
    assert verdict.step_ns == verdict.target_ns == 19_000_000


@pytest.mark.parametrize("case", [graphs.SERIAL, graphs.AFTER])
def test_nothing_overlaps_as_the_graphs_are_handed_out(case):
    report = lab.timed(lab.graph_of(case)).report()
    assert (report.step_ns, report.hidden_ns) == (27_000_000, 0)


def test_a_wrong_value_names_the_rank_that_has_it():
    right, wrong = [torch.zeros(2)], [torch.ones(2)]
    (one,) = checks._wrong([right, wrong], [right, right])
    assert one.rank == 1
    assert "rank 1" in one.message
    assert "rank 0" not in one.message
