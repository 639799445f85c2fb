"""What each pass does to small graphs, as literal orders."""

from __future__ import annotations

import pytest
import torch

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler.bucketing import merge, plan_merges
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.decision import decide, plan_decisions
from overlaplab.techniques.compiler.dependencies import (
    find_dependencies,
    find_windows,
)
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    launches,
    show,
    waits,
)
from overlaplab.techniques.compiler.insertion import insert_all_reduces
from overlaplab.techniques.compiler.placing import peak_in_flight
from overlaplab.techniques.compiler.scheduling import (
    plan_schedule,
    schedule,
)
from overlaplab.techniques.compiler.simplification import simplify
from tests.techniques.compiler.making import Making, aten, names, run

COSTS = Costs(find_hardware("chalk"), 2)


def scheduled(graph, **limits):
    return schedule(graph, plan_schedule(graph, COSTS, **limits), **limits)


# Simplification


def test_detach_and_two_transposes_are_read_past():
    m = Making()
    x = m.input("x", 3, 4)
    there = m.call(aten.t.default, m.call(aten.detach.default, x))
    back = m.call(aten.t.default, there)
    graph = m.returning(m.call(aten.neg.default, back, name="neg"))

    after = simplify(graph)

    assert names(after) == ["neg"]
    assert torch.equal(run(after)[0][0], run(graph)[0][0])


def test_what_is_returned_stays_a_tensor_of_its_own():
    m = Making()
    x = m.input("x", 3, 4)
    graph = m.returning(x, m.call(aten.detach.default, x, name="own"))

    assert names(simplify(graph)) == ["own"]


# Insertion


def backward():
    """A chain of two layers whose gradients are views of what was computed."""
    m = Making()
    x, w = m.input("x", 4, 4), m.input("w", 4, 4)
    dw = m.call(aten.mm.default, x, w, name="dw")
    m.call(aten.mm.default, dw, w, name="dx")
    return m, dw


def test_a_gradient_leaves_behind_the_operator_that_finishes_it():
    m, dw = backward()
    grad = m.call(aten.t.default, dw, name="grad")

    after = insert_all_reduces(m.returning(None, grad), {1: "fc.weight"}, "0")

    assert show(after).splitlines()[2:] == [
        "   dw = mm(x, w)   # (4, 4) float32",
        "   dx = mm(dw, w)   # (4, 4) float32",
        "   grad_fc_weight = t(dw)   # (4, 4) float32",
        ">> all_reduce_fc_weight = all_reduce(grad_fc_weight, avg, 0)   # 64 bytes",
        "<< average_fc_weight = wait_tensor(all_reduce_fc_weight)   # (4, 4) float32",
        "   return None, average_fc_weight",
    ]


def test_a_gradient_that_is_returned_twice_travels_once():
    m, dw = backward()

    after = insert_all_reduces(m.returning(dw, dw, None), {0: "a", 1: "b", 2: "c"}, "0")

    assert [n.name for n in launches(after)] == ["all_reduce_a"]


def test_only_gradients_travel():
    m, dw = backward()
    graph = m.returning(dw, dw)

    after = insert_all_reduces(graph, {1: "a"}, "0")

    (first, second), _ = run(after)
    (alone, _), _ = run(graph)
    assert torch.equal(first, alone)
    assert torch.equal(second, 0.5 * alone + 1)


# Dependencies


def test_a_write_through_a_view_stands_behind_every_reader_of_the_whole():
    m = Making()
    x = m.input("x", 4)
    made = m.call(aten.relu.default, x, name="made")
    read = m.call(aten.neg.default, made, name="read")
    part = m.call(aten.slice.Tensor, made, 0, 0, 2, name="part")
    write = m.call(aten.mul_.Scalar, part, 2, name="write")
    later = m.call(aten.exp.default, made, name="later")

    needs = find_dependencies(m.returning(read, later)).needs

    assert set(needs[write]) == {read, part}
    assert set(needs[later]) == {made, write}


def test_what_is_being_sent_is_written_behind_the_wait_only():
    m = Making()
    x = m.input("x", 4)
    launch = m.launch(x, name="send")
    wait = m.wait(launch, "wait")
    write = m.call(aten.mul_.Scalar, x, 2, name="write")

    needs = find_dependencies(m.returning(wait)).needs

    assert wait in needs[write]


def test_random_operators_keep_their_order():
    m = Making()
    x = m.input("x", 4)
    one = m.call(aten.rand_like.default, x, name="one")
    m.call(aten.exp.default, x)
    two = m.call(aten.rand_like.default, x, name="two")

    assert one in find_dependencies(m.returning(one, two)).needs[two]


def test_a_window_says_how_much_is_independent():
    windows = find_windows(find_dependencies(nine_operators()), COSTS)

    # A matmul takes 2 us; dX of the layers above must be over, the rest need not.
    ready = [(w.launch, w.ready_ns, w.independent_ns) for w in windows]
    assert ready == [
        ("all_reduce_dw3", 2_000, 10_000),
        ("all_reduce_dw2", 4_000, 8_000),
        ("all_reduce_dw1", 6_000, 6_000),
    ]
    assert str(windows[0]) == (
        "all_reduce_dw3: after dw3 (2 us), before the return; 10 us are independent "
        "of it"
    )


# Bucketing


def gradients(*dtypes):
    m = Making()
    return m, [m.input(f"g{i}", 4, dtype=dtype) for i, dtype in enumerate(dtypes)]


def test_a_bucket_is_one_launch_with_a_wait_for_each_tensor():  # E08
    m, (one, two, three) = gradients(*[torch.float32] * 3)
    waited = [m.reduced(g) for g in (one, two, three)]
    graph = m.returning(waited[0], waited[2])  # the second one is unused

    after = merge(graph, plan_merges(graph, 1_000))

    (bucket,) = launches(after)
    assert len(waits(bucket)) == 3
    assert names(after)[0] == "bucket_0"


def test_a_message_is_not_split_and_a_cap_is_kept():
    m, sent = gradients(*[torch.float32] * 5)
    graph = m.returning(*[m.reduced(g) for g in sent])

    merges = plan_merges(graph, 32)

    assert [b.bytes for b in merges] == [32, 32, 16]
    assert [b.closed_by for b in merges] == ["the cap", "the cap", "the end"]


def test_sum_and_max_groups_and_dtypes_do_not_share_a_bucket():  # E05
    m, (a, b, c, d) = gradients(
        torch.float32, torch.float32, torch.float32, torch.bfloat16
    )
    waited = [m.reduced(a), m.reduced(b, "max"), m.reduced(c, "sum", "1"), m.reduced(d)]
    graph = m.returning(*waited)

    assert [len(b.launches) for b in plan_merges(graph, 10**6)] == [1, 1, 1, 1]


def test_a_bucket_is_closed_when_its_first_gradient_has_waited_long_enough():
    graph = nine_operators()  # a layer takes 4 us

    merges = plan_merges(graph, 10**6, max_delay_ns=4_000, node_ns=COSTS)

    assert [b.launches for b in merges] == [
        ("all_reduce_dw3", "all_reduce_dw2"),
        ("all_reduce_dw1",),
    ]
    assert [b.delay_ns for b in merges] == [4_000, 0]
    assert ", ready within 4 us, all_reduce on" in merges[0].what


def test_a_reader_between_two_members_moves_behind_the_bucket():  # E06
    m, (one, other) = gradients(torch.float32, torch.float32)
    first = m.reduced(one)
    norm = m.call(aten.norm.Scalar, first, name="norm")
    made = m.call(aten.neg.default, other, name="made")
    graph = m.returning(first, norm, m.reduced(made))

    after = merge(graph, plan_merges(graph, 10**6))

    order = names(after)
    assert order.index("bucket_0") < order.index("norm")


def test_two_of_which_one_needs_the_other_do_not_share_a_bucket():
    m, (one,) = gradients(torch.float32)
    first = m.reduced(one)
    graph = m.returning(m.reduced(m.call(aten.neg.default, first)))

    assert [b.closed_by for b in plan_merges(graph, 10**6)] == ["a circle", "the end"]


def test_two_buckets_that_would_need_each_other_are_not_made():
    m, (a, b) = gradients(torch.float32, torch.float64)
    a2 = m.call(aten.neg.default, m.reduced(b))  # float64, behind b
    b2 = m.call(aten._to_copy.default, m.reduced(a))
    graph = m.returning(m.reduced(a2), m.reduced(b2))

    merges = plan_merges(graph, 10**6)

    assert sorted(len(each.launches) for each in merges) == [1, 1, 1, 1]
    merge(graph, merges)


# Decision


def test_what_has_nothing_to_hide_behind_is_synchronous():
    m, (one,) = gradients(torch.float32)
    graph = m.returning(m.reduced(m.call(aten.neg.default, one)))

    (decision,) = plan_decisions(graph, COSTS)

    assert not decision.is_async
    assert str(decision) == "sync: no computing can run beside its 1.002 us"


def test_a_synchronous_message_is_waited_for_where_it_is_launched():
    graph = nine_operators()
    decisions = plan_decisions(graph, COSTS, least_gain_ns=10**6)

    after = scheduled(decide(graph, decisions))

    order = names(after)
    for launch in launches(after):
        (wait,) = waits(launch)
        assert order.index(wait.name) == order.index(launch.name) + 1


# Scheduling


def test_gradients_of_weights_go_before_those_of_inputs():
    assert [n for n in names(scheduled(nine_operators())) if not n.endswith("_t")] == [
        *("dw3", "all_reduce_dw3", "dx3"),
        *("dw2", "all_reduce_dw2", "dx2"),
        *("dw1", "all_reduce_dw1", "dx1"),
        *("wait_dw3", "wait_dw2", "wait_dw1"),
    ]


def test_a_wait_sinks_below_what_does_not_need_it():  # E01
    m = Making()
    x, y = m.input("x", 100), m.input("y", 100)
    first = m.reduced(x)
    graph = m.returning(first, m.call(aten.mul.Scalar, y, 2, name="work"))

    assert names(scheduled(graph)) == ["reduce_x", "work", "wait_x"]


def test_a_view_that_is_read_inside_counts_as_its_reader():  # E01
    m = Making()
    x, y = m.input("x", 10, 10), m.input("y", 100, 100)
    view = m.call(aten.t.default, m.reduced(x), name="view")
    norm = m.call(aten.norm.Scalar, view, name="norm")
    work = m.call(aten.mm.default, y, y, name="work")
    graph = m.returning(norm, work, view)

    assert names(scheduled(graph)) == ["reduce_x", "work", "wait_x", "view", "norm"]


def test_a_division_on_the_way_out_does_not_bring_the_wait_forward():
    m = Making()
    x, y = m.input("x", 100), m.input("y", 100)
    half = m.call(aten.div.Scalar, m.reduced(x), 2, name="half")
    graph = m.returning(half, m.call(aten.mul.Scalar, y, 2, name="work"))

    assert names(scheduled(graph)) == ["reduce_x", "work", "wait_x", "half"]


def test_a_collective_that_nobody_reads_stays():  # E03
    m = Making()
    x = m.input("x", 4)
    m.reduced(x)
    graph = m.returning(m.call(aten.neg.default, x, name="work"))

    assert names(scheduled(graph)) == ["reduce_x", "work", "wait_x"]


def test_messages_that_a_person_put_behind_the_backward_leave_early():
    m = Making()
    x, w = m.input("x", 50, 50), m.input("w", 50, 50)
    one = m.call(aten.mm.default, x, w, name="one")
    two = m.call(aten.mm.default, one, w, name="two")
    graph = m.returning(m.reduced(one), m.reduced(two))

    assert names(scheduled(graph)) == [
        *("one", "reduce_one", "two", "reduce_two"),
        *("wait_one", "wait_two"),
    ]


def test_a_limit_is_kept_at_every_place():
    graph = nine_operators()

    after = scheduled(graph, limit_bytes=40_000)

    assert peak_in_flight(scheduled(graph)) == 120_000
    assert peak_in_flight(after) == 40_000


def test_a_plan_of_another_graph_is_refused():
    plan = plan_schedule(nine_operators(), COSTS)
    m, (one,) = gradients(torch.float32)

    with pytest.raises(GraphError, match="Plan the graph that you schedule"):
        schedule(m.returning(m.reduced(one)), plan)


def test_an_update_starts_when_its_own_average_is_there():
    m = Making()
    w1, w2, x = (m.input(n, 100, 100) for n in ("w1", "w2", "x"))
    one = m.call(aten.mm.default, x, w2, name="one")
    two = m.call(aten.mm.default, one, w1, name="two")
    averages = [m.reduced(one), m.reduced(two)]
    for weight, average in zip((w1, w2), averages, strict=True):
        m.call(aten.sub_.Tensor, weight, average, name=f"update_{weight.name}")

    after = scheduled(m.returning(None))

    assert names(after) == [
        *("one", "reduce_one", "two", "reduce_two"),
        *("wait_one", "update_w1", "wait_two", "update_w2"),
    ]
