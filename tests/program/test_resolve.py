"""The resolver: order and exact times on `chalk`, where 1000 FLOP take 1 ns.

On `chalk` two ranks all-reduce n bytes in 1000 + n/10 ns.
"""

from dataclasses import replace

import pytest

from overlaplab.errors import MismatchError, ProgramError
from overlaplab.hardware import find_hardware
from overlaplab.program import Op, Program, ProgramBuilder, resolve
from overlaplab.timeline import Span, Timeline

CHALK = find_hardware("chalk")
LAUNCHING = replace(CHALK, name="launching", launch_ns=10, collective_launch_ns=100)
CONTENDED = replace(
    CHALK, name="contended", compute_rate_permille=500, wire_rate_permille=250
)


def rows(timeline: Timeline, rank: int = 0) -> list[tuple[str, str, int, int]]:
    return [
        (s.lane, s.name, s.start_ns, s.end_ns) for s in timeline.spans if s.rank == rank
    ]


def span(timeline: Timeline, name: str, rank: int = 0) -> Span:
    return next(s for s in timeline.spans if s.name == name and s.rank == rank)


def cause_names(timeline: Timeline, rank: int = 0) -> list[tuple[str, str | None]]:
    return [
        (s.name, None if c is None else timeline.spans[c].name)
        for s, c in zip(timeline.spans, timeline.causes, strict=True)
        if s.rank == rank
    ]


def test_operators_of_one_stream_follow_one_another():
    b = ProgramBuilder()
    b.compute(0, "mm", ns=5)
    b.compute(0, "add", ns=3)
    assert rows(resolve(b.build(), CHALK)) == [
        ("default", "mm", 0, 5),
        ("default", "add", 5, 8),
    ]


def test_an_async_all_reduce_hides_behind_the_rest_of_the_backward_pass():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, "backward 1", ns=2_000)
        work = b.collective(rank, "all_reduce", bytes=10_000)
        b.compute(rank, "backward 0", ns=3_000)
        b.wait(rank, work)
        b.compute(rank, "step", ns=500)
    timeline = resolve(b.build(), "chalk")
    expected = [
        ("default", "backward 1", 0, 2_000),
        ("comm", "all_reduce", 2_000, 4_000),
        ("default", "backward 0", 2_000, 5_000),
        ("default", "step", 5_000, 5_500),
    ]
    assert rows(timeline, 0) == expected
    assert rows(timeline, 1) == expected
    assert (timeline.num_ranks, timeline.hardware) == (2, "chalk")


def test_a_blocking_all_reduce_runs_in_its_stream():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000, async_op=False)
        b.compute(rank, "step", ns=500)
    assert rows(resolve(b.build(), CHALK)) == [
        ("default", "all_reduce", 0, 2_000),
        ("default", "step", 2_000, 2_500),
    ]


def test_the_wire_begins_when_the_last_rank_arrives_and_the_early_one_spins():
    b = ProgramBuilder(2)
    for rank, ns in ((0, 1_000), (1, 4_000)):
        b.compute(rank, "backward", ns=ns)
        b.collective(rank, "all_reduce", bytes=10_000)
    timeline = resolve(b.build(), CHALK)
    early, late = (span(timeline, "all_reduce", rank) for rank in (0, 1))
    assert (early.start_ns, early.end_ns) == (1_000, 6_000)
    assert (late.start_ns, late.end_ns) == (4_000, 6_000)
    assert dict(early.attributes) == {
        "op": 1,
        "label": "",
        "ready_ns": 4_000,
        "latency_ns": 1_000,
        "wire_ns": 1_000,
        "alone_ns": 2_000,
    }


def test_the_cause_of_a_collective_is_what_held_up_the_last_rank():
    b = ProgramBuilder(2)
    for rank, ns in ((0, 1_000), (1, 4_000)):
        b.compute(rank, f"backward of {rank}", ns=ns)
        b.collective(rank, "all_reduce", bytes=10_000)
    timeline = resolve(b.build(), CHALK)
    assert cause_names(timeline, 0)[-1] == ("all_reduce", "backward of 1")
    assert cause_names(timeline, 1)[-1] == ("all_reduce", "backward of 1")


def test_ranks_that_arrive_together_keep_their_own_cause():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, f"backward of {rank}", ns=1_000)
        b.collective(rank, "all_reduce", bytes=10_000)
    timeline = resolve(b.build(), CHALK)
    for rank in (0, 1):
        assert cause_names(timeline, rank)[-1] == ("all_reduce", f"backward of {rank}")


def test_collectives_of_one_communicator_run_one_after_the_other():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
        b.collective(rank, "all_reduce", bytes=20_000)
    assert rows(resolve(b.build(), CHALK)) == [
        ("comm", "all_reduce", 0, 2_000),
        ("comm", "all_reduce", 2_000, 5_000),
    ]


def test_two_communicators_share_the_link_while_both_are_on_the_wire():
    # Both wires begin at 1000; at half the rate each, the short one (1000 ns alone)
    # ends at 3000, the other has 1000 of its 2000 left and then the link for itself.
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000, group="a")
        b.collective(rank, "all_gather", bytes=40_000, group="b")
    timeline = resolve(b.build(), CHALK)
    assert rows(timeline) == [
        ("comm:a", "all_reduce", 0, 3_000),
        ("comm:b", "all_gather", 0, 4_000),
    ]
    assert span(timeline, "all_gather").attributes["wire_ns"] == 3_000
    assert span(timeline, "all_gather").attributes["alone_ns"] == 3_000


def test_communicators_without_a_rank_in_common_do_not_share_a_link():
    b = ProgramBuilder(4)
    for rank in range(4):
        pair = (0, 1) if rank < 2 else (2, 3)
        b.collective(rank, "all_reduce", bytes=10_000, group=f"{pair}", ranks=pair)
    timeline = resolve(b.build(), CHALK)
    assert {s.end_ns for s in timeline.spans} == {2_000}


def test_a_kernel_beside_the_wire_slows_and_slows_it():
    # Latency 0..1000: the kernel does 1000 of 3000. From 1000 on, kernel at 1/2 and
    # wire at 1/4: the kernel needs 4000 (until 5000), the wire does 1000 of its 2000
    # in them, then the rest alone: 6000.
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=20_000)
        b.compute(rank, "mm", ns=3_000)
    timeline = resolve(b.build(), CONTENDED)
    assert rows(timeline) == [
        ("comm", "all_reduce", 0, 6_000),
        ("default", "mm", 0, 5_000),
    ]
    assert span(timeline, "mm").attributes["alone_ns"] == 3_000
    reduce = span(timeline, "all_reduce").attributes
    assert (reduce["latency_ns"], reduce["wire_ns"]) == (1_000, 5_000)
    assert reduce["alone_ns"] == 3_000


def test_a_kernel_on_one_rank_slows_the_wire_for_all():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
    b.compute(1, "mm", ns=100_000)
    timeline = resolve(b.build(), CONTENDED)
    assert rows(timeline) == [("comm", "all_reduce", 0, 5_000)]
    # 1000 alone, 4000 at half speed, 97000 alone.
    assert span(timeline, "mm", rank=1).end_ns == 102_000


def test_kernels_on_two_streams_share_the_gpu():
    # Each at 1/2: the short one ends at 2000, the long one has 2000 left.
    b = ProgramBuilder()
    b.compute(0, "long", ns=3_000)
    b.compute(0, "short", ns=1_000, stream="stream 1")
    assert rows(resolve(b.build(), CHALK)) == [
        ("default", "long", 0, 4_000),
        ("stream 1", "short", 0, 2_000),
    ]


def test_three_kernels_share_exactly():
    b = ProgramBuilder()
    for stream in ("a", "b", "c"):
        b.compute(0, stream, ns=1_000, stream=stream)
    assert {s.end_ns for s in resolve(b.build(), CHALK).spans} == {3_000}


def test_a_copy_from_the_host_runs_beside_kernels_without_slowing_them():
    copy = Op(0, 0, "memcpy", "copy", "stream 1", "stream 1", write_bytes=10_000)
    kernel = Op(1, 0, "compute", "mm", "default", "default", flops=1_000_000)
    program = Program(ranks=((copy, kernel),), world_size=1)
    assert rows(resolve(program, CHALK)) == [
        ("default", "mm", 0, 1_000),
        ("stream 1", "copy", 0, 1_000),
    ]


def test_a_launch_is_not_a_start():
    b = ProgramBuilder()
    b.compute(0, "mm", ns=50)
    b.compute(0, "add", ns=5)
    timeline = resolve(b.build(), LAUNCHING)
    assert rows(timeline) == [
        ("cpu", "launch mm", 0, 10),
        ("cpu", "launch add", 10, 20),
        ("default", "mm", 10, 60),
        ("default", "add", 60, 65),
    ]
    assert cause_names(timeline) == [
        ("launch mm", None),
        ("launch add", "launch mm"),
        ("mm", "launch mm"),
        ("add", "mm"),
    ]


def test_a_launch_bound_step_shows_as_one():
    b = ProgramBuilder()
    for _ in range(3):
        b.compute(0, "add", ns=4)
    timeline = resolve(b.build(), LAUNCHING)
    kernels = [r for r in rows(timeline) if r[0] == "default"]
    assert kernels == [
        ("default", "add", 10, 14),
        ("default", "add", 20, 24),
        ("default", "add", 30, 34),
    ]
    assert cause_names(timeline)[-1] == ("add", "launch add")


def test_a_collective_costs_its_own_launch():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "barrier")
    assert rows(resolve(b.build(), LAUNCHING)) == [
        ("cpu", "launch barrier", 0, 100),
        ("comm", "barrier", 100, 1_100),
    ]


def test_a_host_wait_blocks_the_cpu_and_what_is_launched_behind_it():
    b = ProgramBuilder()
    loss = b.compute(0, "loss", ns=100)
    b.host_wait(0, [loss], name="item")
    b.compute(0, "next", ns=20)
    timeline = resolve(b.build(), LAUNCHING)
    assert rows(timeline) == [
        ("cpu", "launch loss", 0, 10),
        ("cpu", "wait item", 10, 110),
        ("default", "loss", 10, 110),
        ("cpu", "launch next", 110, 120),
        ("default", "next", 120, 140),
    ]
    assert cause_names(timeline)[1:4] == [
        ("wait item", "loss"),
        ("loss", "launch loss"),
        ("launch next", "wait item"),
    ]


def test_where_launching_is_free_the_wait_itself_is_the_cause():
    b = ProgramBuilder()
    loss = b.compute(0, "loss", ns=100)
    b.host_wait(0, [loss])
    b.compute(0, "next", ns=20, stream="stream 1")
    timeline = resolve(b.build(), CHALK)
    assert cause_names(timeline)[-1] == ("next", "wait")


def test_a_wait_for_what_has_ended_takes_no_time_and_has_no_span():
    b = ProgramBuilder()
    loss = b.compute(0, "loss", ns=1)
    b.host(0, "think", 50)
    b.host_wait(0, [loss])
    b.compute(0, "next", ns=1)
    assert rows(resolve(b.build(), CHALK)) == [
        ("cpu", "think", 0, 50),
        ("default", "loss", 0, 1),
        ("default", "next", 50, 51),
    ]


def test_a_wait_for_a_collective_on_the_cpu_ends_with_the_collective():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        work = b.collective(rank, "all_reduce", bytes=10_000)
        b.host_wait(rank, [work])
        b.collective(rank, "all_reduce", bytes=10_000)
    assert rows(resolve(b.build(), CHALK)) == [
        ("comm", "all_reduce", 0, 2_000),
        ("cpu", "wait", 0, 2_000),
        ("comm", "all_reduce", 2_000, 4_000),
    ]


def test_a_representative_rank_pays_for_all_that_it_stands_for():
    b = ProgramBuilder(represents=4)
    b.collective(0, "all_reduce", bytes=10_000)
    timeline = resolve(b.build(), CHALK)
    assert rows(timeline) == [("comm", "all_reduce", 0, 2_500)]
    assert (timeline.num_ranks, timeline.represents) == (1, 4)


def test_a_collective_of_one_rank_takes_no_time_but_has_its_span():
    b = ProgramBuilder(1)
    b.collective(0, "all_reduce", bytes=10_000)
    assert rows(resolve(b.build(), CHALK)) == [("comm", "all_reduce", 0, 0)]


def test_a_send_meets_its_receive():
    b = ProgramBuilder(2)
    b.compute(0, "forward", ns=3_000)
    b.collective(0, "send", bytes=10_000, group="0-1")
    received = b.collective(1, "recv", bytes=10_000, group="0-1")
    b.wait(1, received)
    b.compute(1, "forward", ns=3_000)
    timeline = resolve(b.build(), CHALK)
    assert rows(timeline, 1) == [
        ("comm:0-1", "recv", 0, 5_000),
        ("default", "forward", 5_000, 8_000),
    ]


def test_a_collective_that_others_never_launch_and_nobody_waits_for_has_no_span():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, "mm", ns=10)
    b.collective(0, "all_reduce", bytes=10)
    b.collective(0, "all_reduce", bytes=10)
    timeline = resolve(b.build(), CHALK)
    assert [s.name for s in timeline.spans] == ["mm", "mm"]


def test_two_groups_in_opposite_order_finish_where_the_launches_are_async():
    b = ProgramBuilder(2)
    for rank, order in ((0, "ab"), (1, "ba")):
        works = [b.collective(rank, "barrier", group=group) for group in order]
        for work in works:
            b.wait(rank, work)
        b.compute(rank, "step", ns=1)
    assert {s.end_ns for s in resolve(b.build(), CHALK).spans} == {1_000, 1_001}


def test_equal_programs_give_equal_timelines():
    def program() -> Program:
        b = ProgramBuilder(3)
        for layer in range(20):
            for rank in range(3):
                b.compute(rank, "mm", ns=100 + 7 * layer + 31 * rank)
                b.collective(
                    rank, "all_reduce", bytes=999 + layer, group="ab"[layer % 2]
                )
        return b.build()

    first = resolve(program(), CONTENDED)
    assert all(resolve(program(), CONTENDED) == first for _ in range(5))


def test_spans_are_ordered_as_the_timeline_promises():
    b = ProgramBuilder(2)
    for rank in (1, 0):
        b.compute(rank, "mm", ns=5)
        b.collective(rank, "barrier")
        b.compute(rank, "mm", ns=5)
    spans = resolve(b.build(), LAUNCHING).spans
    keys = [(s.start_ns, s.rank, s.lane, s.end_ns) for s in spans]
    assert keys == sorted(keys)


def test_ranks_that_meet_with_different_operations_are_refused():
    b = ProgramBuilder(2)
    b.collective(0, "all_reduce", bytes=8)
    b.collective(1, "broadcast", bytes=8)
    with pytest.raises(
        MismatchError,
        match=r"#0 of process group 'default' rank 0 launches all_reduce.*rank 1 broad",
    ):
        resolve(b.build(), CHALK)


@pytest.mark.parametrize("after", [(1,), (5,), (-1,)])
def test_an_operator_that_waits_for_its_own_future_is_refused(after):
    ops = (
        Op(0, 0, "compute", "mm", "default", "default"),
        Op(1, 0, "compute", "add", "default", "default", after=after),
    )
    with pytest.raises(ProgramError, match=r"op 1 \(add\) of rank 0 waits for ops"):
        resolve(Program(ranks=(ops,), world_size=1), CHALK)


def test_a_rank_outside_the_communicator_is_refused():
    b = ProgramBuilder(3)
    b.collective(2, "all_reduce", bytes=8, ranks=(0, 1))
    with pytest.raises(
        ProgramError, match=r"rank 2 .* ranks of process group 'default' are \[0, 1\]"
    ):
        resolve(b.build(), CHALK)


def test_an_operator_in_the_wrong_place_is_refused():
    op = Op(1, 0, "compute", "mm", "default", "default")
    with pytest.raises(ProgramError, match="op 0 of rank 0 says that it is op 1"):
        resolve(Program(ranks=((op,),), world_size=1), CHALK)


def test_an_unknown_hardware_name_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="unknown hardware 'h42'"):
        resolve(ProgramBuilder().build(), "h42")


def test_a_slowed_kernel_ends_at_the_next_whole_nanosecond():
    # 1000 of 1100 ns pass during the latency; 100 at 3/10 take 333.3.
    slow = replace(CHALK, name="slow", compute_rate_permille=300)
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=50_000)
        b.compute(rank, "mm", ns=1_100)
    assert span(resolve(b.build(), slow), "mm").end_ns == 1_334


def test_a_communicator_is_in_order_also_over_two_lanes():
    # What is launched synchronously may run on the stream of its launch.
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", bytes=10_000)
        b.collective(rank, "all_reduce", bytes=20_000, lane="side", stream="side")
    assert rows(resolve(b.build(), CHALK)) == [
        ("comm", "all_reduce", 0, 2_000),
        ("side", "all_reduce", 2_000, 5_000),
    ]
