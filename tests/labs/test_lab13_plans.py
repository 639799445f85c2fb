"""13.4 and 13.5: which messages may travel together, and breaking the theorem."""

from __future__ import annotations

import itertools

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import breaking, graphs, plans
from overlaplab_course.lab13 import plan_checks as checks

# -- 13.4


def plan(graph, needs, cap_bytes, *, all_before=graphs.all_before, slack=0):
    """What the exercise asks for, with a knob for mistakes."""
    buckets, size = [], cap_bytes + 1
    for launch in lab.launches(graph):
        before = all_before(needs, launch)
        size += lab.sent_bytes(launch)
        if size > cap_bytes + slack or before & {*buckets[-1]}:
            buckets.append([])
            size = lab.sent_bytes(launch)
        buckets[-1].append(launch)
    return buckets


def recursively(graph, needs, cap_bytes):
    def cut(launches):
        if not launches:
            return []
        taken = 1
        while taken < len(launches):
            several = launches[: taken + 1]
            if sum(map(lab.sent_bytes, several)) > cap_bytes:
                break
            if {*several} & lab.all_before(needs, several[-1]):
                break
            taken += 1
        return [tuple(launches[:taken]), *cut(launches[taken:])]

    return cut(lab.launches(graph))


def one_at_a_time(graph, needs, cap_bytes):
    """A generator; readiness walks forward, as sets of what each node is behind."""
    behind = {}
    for node in graph.nodes:
        behind[node] = {node}.union(*(behind[need] for need in needs[node]))
    bucket, left = [], cap_bytes
    for launch in lab.launches(graph):
        if bucket and (left < lab.sent_bytes(launch) or behind[launch] & {*bucket}):
            yield bucket
            bucket, left = [], cap_bytes
        bucket.append(launch)
        left -= lab.sent_bytes(launch)
    yield bucket


def blind_to_circles(graph, needs, cap_bytes):
    return plan(graph, needs, cap_bytes, all_before=lambda needs, node: set())


def what_it_needs_directly(graph, needs, cap_bytes):
    def directly(needs, node):
        near = {*needs[node]}
        return near.union(*(needs[one] for one in near))

    return plan(graph, needs, cap_bytes, all_before=directly)


def one_message_too_many(graph, needs, cap_bytes):
    return plan(graph, needs, cap_bytes, slack=20_000)


def strictly_less(graph, needs, cap_bytes):
    return plan(graph, needs, cap_bytes - 1)


def one_each(graph, needs, cap_bytes):
    return [[launch] for launch in lab.launches(graph)]


def in_elements(graph, needs, cap_bytes):
    return plan(graph, needs, 4 * cap_bytes)


def the_last_bucket_is_lost(graph, needs, cap_bytes):
    return plan(graph, needs, cap_bytes)[:-1]


def an_empty_one_first(graph, needs, cap_bytes):
    return [[], *plan(graph, needs, cap_bytes)]


def packed_by_size(graph, needs, cap_bytes):
    """Fills gaps with what comes later: the first would wait for the last."""
    buckets = []
    for launch in lab.launches(graph):
        for bucket in buckets:
            size = sum(map(lab.sent_bytes, [*bucket, launch]))
            if size <= cap_bytes and not lab.all_before(needs, launch) & {*bucket}:
                bucket.append(launch)
                break
        else:
            buckets.append([launch])
    return buckets


def one_circle_ends_all(graph, needs, cap_bytes):
    """Nobody travels with others any more once a circle was met."""
    buckets = plan(graph, needs, cap_bytes)
    kept = []
    for bucket in buckets:
        met = any({*kept[-1]} & lab.all_before(needs, one) for one in bucket if kept)
        if met:
            rest = [x for b in buckets[buckets.index(bucket) :] for x in b]
            return [*kept, *([x] for x in rest)]
        kept.append(bucket)
    return kept


PLANS = {
    blind_to_circles: checks.NO_CIRCLE,
    what_it_needs_directly: checks.NO_CIRCLE,
    one_message_too_many: checks.CAP,
    in_elements: checks.CAP,
    strictly_less: checks.FULL,
    one_each: checks.FULL,
    one_circle_ends_all: checks.FULL,
    the_last_bucket_is_lost: checks.ONCE,
    an_empty_one_first: checks.ONCE,
    packed_by_size: checks.ONCE,
}


@pytest.mark.parametrize("wrong", PLANS, ids=lambda f: f.__name__)
def test_a_wrong_plan_is_refused_for_its_own_reason(wrong, faults):
    assert PLANS[wrong] in faults(judge(find_exercise("13.4"), wrong))


@pytest.mark.parametrize("function", [plan, recursively, one_at_a_time])
def test_a_right_plan_passes_however_it_is_made(function):
    verdict = judge(find_exercise("13.4"), function)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("cap", plans.CAPS)
@pytest.mark.parametrize("name", plans.PLANS)
def test_every_plan_can_be_carried_out(name, cap):
    """The pass of the compiler refuses a merge that makes a circle."""
    graph = plans.plan_graph(name)
    buckets = plan(graph, graphs.needs_of(graph), cap)
    merged = plans.merged(graph, buckets)
    assert len(lab.launches(merged)) == len(buckets)


# -- 13.5

ONES = {
    name: dict.fromkeys((row.split()[0] for row in rows), 1)
    for name, rows in lab.SHAPES.items()
}
RIGHT = {
    "order": {"dx": 9, "dw": 1, "m": 9},
    "reader": {"a": 1, "m1": 9, "b": 1, "m2": 1, "u2": 9, "u1": 1},
    "memory": {"a": 3, "ma": 9, "b": 1, "mb": 2, "c": 2, "mc": 1, "d": 9, "md": 8},
}
SMALL = {
    "order": {"dx": 3, "dw": 1, "m": 3},
    "reader": {"m1": 4, "a": 1, "b": 1, "m2": 2, "u2": 5, "u1": 1},
    "memory": {"a": 2, "ma": 9, "b": 1, "mb": 4, "c": 9, "mc": 3, "d": 7, "md": 9},
}
WRONG = {
    "equal times": ({**RIGHT, "order": ONES["order"]}, checks.BROKEN[0]),
    "dw is long": (
        {**RIGHT, "order": {"dx": 9, "dw": 9, "m": 9}},
        checks.BROKEN[0],
    ),
    "all equal": ({**RIGHT, "reader": ONES["reader"]}, checks.BROKEN[1]),
    "the first is urgent": (
        {**RIGHT, "reader": {"a": 1, "m1": 9, "b": 1, "m2": 1, "u2": 1, "u1": 9}},
        checks.BROKEN[1],
    ),
    "all fit": ({**RIGHT, "memory": ONES["memory"]}, checks.BROKEN[2]),
    "all of them large": (
        {**RIGHT, "memory": dict.fromkeys(ONES["memory"], 9)},
        checks.BROKEN[2],
    ),
    "half a millisecond": (
        {**RIGHT, "order": {"dx": 9, "dw": 0.5, "m": 9}},
        checks.TIMES,
    ),
    "ten": ({**RIGHT, "order": {"dx": 10, "dw": 1, "m": 9}}, checks.TIMES),
    "one is missing": ({**RIGHT, "order": {"dx": 9, "m": 9}}, checks.TIMES),
    "no dictionary": ({**RIGHT, "order": [9, 1, 9]}, checks.TIMES),
    "a shape is missing": ({k: RIGHT[k] for k in ("order", "reader")}, checks.TIMES),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_times_that_do_not_break_it_are_refused(wrong, faults):
    found, sentence = WRONG[wrong]
    assert set(faults(judge(find_exercise("13.5"), found))) == {sentence}


FLOATS = {name: {k: float(v) for k, v in row.items()} for name, row in RIGHT.items()}


@pytest.mark.parametrize(
    "found", [RIGHT, SMALL, FLOATS], ids=["large", "small", "floats"]
)
def test_times_that_break_it_pass(found):
    verdict = judge(find_exercise("13.5"), found)
    assert verdict.passed, str(verdict)


def test_with_all_conditions_nothing_breaks_it():
    assert lab.try_to_break(tries=60) == 0


def test_the_three_examples_are_as_they_were_counted_by_hand():
    order = lab.shape("order", dx=1, dw=1, m=1)
    assert (order.rule_ms, order.best_ms) == (3, 2)
    reader = lab.shape("reader", a=2, m1=4, b=1, m2=2, u2=5, u1=1)
    assert (reader.rule_ms, reader.best_ms) == (14, 11)
    times = {"a": 9, "ma": 5, "b": 1, "mb": 9, "c": 1, "mc": 2, "d": 7, "md": 1}
    memory = lab.shape("memory", **times)
    assert (memory.rule_ms, memory.best_ms) == (31, 26)


@pytest.mark.parametrize("name", lab.SHAPES)
def test_the_drawing_ends_when_the_schedule_does(name):
    one = breaking.shape(name, **RIGHT[name])
    ends = [t.step_ns / 1e6 for t in one.timelines.values()]
    assert ends == [one.rule_ms, one.best_ms]


@pytest.mark.parametrize(
    ("exercise", "name"),
    [("13.1", "beside"), ("13.4", "plan_buckets"), ("13.6", "order")],
)
def test_who_returns_nothing_is_told_so(exercise, name):
    verdict = judge(find_exercise(exercise), lambda *given: None)
    assert f"{name} returned None; expected a list" in verdict.error


def test_a_refusal_says_how_to_see_the_graph(faults):
    (seen,) = faults(judge(find_exercise("13.3"), lambda graph, needs: None)).values()
    assert "print(show(lab.graph_of('each message waited for at once')))" in seen


def test_the_first_shape_that_holds_is_drawn():
    verdict = judge(find_exercise("13.5"), {**RIGHT, "order": ONES["order"]})
    assert verdict.timeline_title == "order"


# -- answers that never end, or are nothing that was asked for


@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        (
            "13.1",
            lambda graph, needs, launch: itertools.cycle([launch]),
            "beside returned 1000 names or more; expected a list of nodes that ends",
        ),
        (
            "13.4",
            lambda graph, needs, cap_bytes: itertools.cycle([lab.launches(graph)]),
            "every launch is in one bucket, in the order of the graph: NO",
        ),
        (
            "13.4",
            lambda graph, needs, cap_bytes: lab.launches(graph),
            "plan_buckets returned all_reduce_0; expected a list of lists of nodes",
        ),
        (
            "13.6",
            lambda layers: itertools.cycle(lab.names_of(layers)),
            "order returned 1000 names or more; expected a list of names that ends",
        ),
        ("13.5", [1], "found is [1]"),
    ],
    ids=("endless nodes", "endless buckets", "no buckets", "endless names", "a list"),
)
def test_an_answer_of_another_kind_is_refused_at_once(number, answer, said):
    verdict = judge(find_exercise(number), answer)

    assert not verdict.passed
    assert said in " ".join(str(verdict).split())
