"""Hazards, unwaited and unmatched collectives; no false alarms."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab.program import (
    Access,
    Finding,
    Op,
    Program,
    ProgramBuilder,
    TensorName,
    find_findings,
)
from overlaplab.program.access import overlap

GRAD = Access(storage=1, offset_bytes=0, run_bytes=64)


def hazards(b: ProgramBuilder) -> list[tuple[int, ...]]:
    return [f.ops for f in find_findings(b.build()) if f.kind == "hazard"]


def reduced_gradient(*, waits: bool) -> ProgramBuilder:
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, "backward", ns=5, writes=(GRAD,))
        work = b.collective(
            rank,
            "all_reduce",
            bytes=64,
            reads=(GRAD,),
            writes=(GRAD,),
            label="bucket 0",
        )
        if waits:
            b.wait(rank, work)
        b.compute(rank, "step", ns=5, reads=(GRAD,), source="lab.py:12 in train")
    return b


def test_a_gradient_that_is_waited_for_is_no_hazard():
    assert find_findings(reduced_gradient(waits=True).build()) == ()


def test_a_gradient_that_is_not_waited_for_is_a_hazard_and_an_unwaited_work():
    found = find_findings(reduced_gradient(waits=False).build())
    assert [(f.kind, f.rank, f.ops) for f in found] == [
        ("unwaited", 0, (1,)),
        ("unwaited", 1, (1,)),
        ("hazard", 0, (1, 2)),
        ("hazard", 1, (1, 2)),
    ]


def test_a_hazard_names_both_accesses_the_missing_edge_and_the_repair():
    b = reduced_gradient(waits=False)
    finding = next(f for f in find_findings(b.build()) if f.kind == "hazard")
    assert str(finding).splitlines() == [
        "hazard: on rank 0 two streams use the result of backward (op 0), and nothing "
        "orders them.",
        "  first written: all_reduce #0 (bucket 0) on stream 'comm', op 1",
        "  then read: step on stream 'default', op 2 [lab.py:12 in train]",
        "  Missing: step (op 2) does not wait for all_reduce #0 (bucket 0).",
        "  Repair: call wait() on the work of all_reduce #0 (bucket 0) while stream "
        "'default' is current, before step (op 2) is launched.",
    ]


def test_a_blocking_collective_has_no_work_so_the_repair_is_a_wait_for_its_stream():
    b = ProgramBuilder(1)
    b.collective(
        0, "all_reduce", bytes=64, writes=(GRAD,), async_op=False, stream="side"
    )
    b.compute(0, "step", ns=5, reads=(GRAD,))
    (finding,) = find_findings(b.build())
    assert str(finding).splitlines()[-1] == (
        "  Repair: let stream 'default' wait (wait_stream, or wait_event with an event "
        "recorded on 'side' after all_reduce #0) before step (op 1) is launched."
    )


def test_a_wait_on_another_stream_does_not_help():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        work = b.collective(rank, "all_reduce", bytes=64, writes=(GRAD,))
        b.wait(rank, work, stream="stream 1")
        b.compute(rank, "copy", ns=1, stream="stream 1")
        b.compute(rank, "step", ns=5, reads=(GRAD,))
    assert hazards(b) == [(0, 2), (0, 2)]


def test_a_buffer_filled_on_one_stream_and_sent_from_another_is_a_race():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, "pack", ns=5, writes=(GRAD,), stream="stream 1")
        work = b.collective(rank, "all_reduce", bytes=64, reads=(GRAD,))
        b.wait(rank, work)
    found = [f for f in find_findings(b.build()) if f.kind == "hazard"]
    assert [f.ops for f in found] == [(0, 1), (0, 1)]
    assert "let stream 'default' wait" in str(found[0])


def test_an_event_from_before_the_write_does_not_order_it():
    b = ProgramBuilder()
    b.compute(0, "mm", ns=5, stream="stream 1")
    b.wait_stream(0, "default", "stream 1")
    b.compute(0, "pack", ns=5, writes=(GRAD,), stream="stream 1")
    b.compute(0, "read", ns=5, reads=(GRAD,))
    assert hazards(b) == [(1, 2)]


def test_two_reads_are_no_hazard():
    b = ProgramBuilder()
    b.compute(0, "one", reads=(GRAD,))
    b.compute(0, "two", reads=(GRAD,), stream="stream 1")
    assert hazards(b) == []


def test_a_write_after_an_unordered_read_is_a_hazard():
    b = ProgramBuilder()
    b.compute(0, "one", reads=(GRAD,))
    b.compute(0, "two", writes=(GRAD,), stream="stream 1")
    assert hazards(b) == [(0, 1)]


def test_a_chain_over_three_streams_orders():
    b = ProgramBuilder()
    b.compute(0, "write", writes=(GRAD,), stream="a")
    b.wait_stream(0, "b", "a")
    b.compute(0, "between", stream="b")
    b.wait_stream(0, "c", "b")
    b.compute(0, "read", reads=(GRAD,), stream="c")
    assert hazards(b) == []


def test_a_host_wait_orders_all_later_launches():
    b = ProgramBuilder()
    write = b.compute(0, "write", writes=(GRAD,), stream="a")
    b.host_wait(0, [write])
    b.host(0, "think", 5)
    b.compute(0, "read", reads=(GRAD,), stream="b")
    assert hazards(b) == []


def test_two_host_waits_add_up():
    b = ProgramBuilder()
    write = b.compute(0, "write", writes=(GRAD,), stream="a")
    other = b.compute(0, "other", stream="c")
    b.host_wait(0, [write])
    b.host_wait(0, [other])
    b.compute(0, "read", reads=(GRAD,), stream="b")
    assert hazards(b) == []


@pytest.mark.parametrize(("waited_for", "expected"), [((), [(0, 1)]), ((0,), [])])
def test_the_cpu_may_read_only_what_it_waited_for(waited_for, expected):
    b = ProgramBuilder()
    b.compute(0, "write", writes=(GRAD,))
    read = Op(1, 0, "host_wait", "item", "cpu", "cpu", waited_for, reads=(GRAD,))
    program = replace(b.build(), ranks=((*b.build().ranks[0], read),))
    assert [f.ops for f in find_findings(program)] == expected


def test_a_chain_over_another_rank_orders():
    # Rank 0: the collective of group "b" is entered by rank 1 only after it left that
    # of group "a", which rank 0 entered after its write.
    b = ProgramBuilder(2)
    b.compute(0, "write", writes=(GRAD,))
    b.collective(0, "barrier", group="a")
    on_other = b.collective(0, "barrier", group="b", stream="stream 1")
    b.wait(0, on_other, stream="stream 1")
    b.compute(0, "read", reads=(GRAD,), stream="stream 1")
    first = b.collective(1, "barrier", group="a")
    b.wait(1, first)
    b.collective(1, "barrier", group="b")
    assert hazards(b) == []


def test_without_the_chain_on_the_other_rank_it_is_a_hazard():
    b = ProgramBuilder(2)
    b.compute(0, "write", writes=(GRAD,))
    b.collective(0, "barrier", group="a")
    on_other = b.collective(0, "barrier", group="b", stream="stream 1")
    b.wait(0, on_other, stream="stream 1")
    b.compute(0, "read", reads=(GRAD,), stream="stream 1")
    b.collective(1, "barrier", group="a")
    b.collective(1, "barrier", group="b")
    assert hazards(b) == [(0, 3)]


def test_a_collective_reads_from_its_own_start_on_not_from_the_last_arrival():
    # Rank 1 enters only after rank 0's second write, yet rank 0 may read before.
    b = ProgramBuilder(2)
    b.collective(0, "all_reduce", reads=(GRAD,), group="a")
    b.compute(0, "write", writes=(GRAD,))
    b.collective(0, "barrier", group="b")
    entered = b.collective(1, "barrier", group="b")
    b.wait(1, entered)
    b.collective(1, "all_reduce", group="a")
    assert hazards(b) == [(0, 1)]


def test_collectives_of_one_communicator_are_ordered():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", writes=(GRAD,))
        b.collective(rank, "all_reduce", writes=(GRAD,))
    assert hazards(b) == []


def test_collectives_of_two_communicators_are_not():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", writes=(GRAD,), group="a")
        b.collective(rank, "all_reduce", writes=(GRAD,), group="b")
    assert hazards(b) == [(0, 1), (0, 1)]


def test_a_coalesced_collective_is_one_hazard_that_counts_its_tensors():
    b = ProgramBuilder()
    grads = [Access(storage, 0, 8) for storage in range(3)]
    b.collective(0, "all_reduce", writes=tuple(grads))
    for grad in grads:
        b.compute(0, "step", reads=(grad,))
    found = [f for f in find_findings(b.build()) if f.kind == "hazard"]
    assert len(found) == 1
    assert "(and 2 more tensors)" in str(found[0])


def test_column_slices_of_one_matrix_do_not_overlap():
    left = Access(1, 0, 8, ((4, 16),))
    right = Access(1, 8, 8, ((4, 16),))
    b = ProgramBuilder()
    b.compute(0, "left", writes=(left,))
    b.compute(0, "right", writes=(right,), stream="stream 1")
    assert hazards(b) == []


def test_the_name_of_a_hazard_is_the_tensors_at_that_time():
    b = reduced_gradient(waits=False)
    names = (
        TensorName(0, GRAD, "grad fc.weight", 0),
        TensorName(0, Access(1, 64, 8), "another", 0),
        TensorName(0, GRAD, "later", 7),
    )
    found = find_findings(replace(b.build(), names=names))
    hazard = next(f for f in found if f.kind == "hazard")
    assert hazard.name == "grad fc.weight"
    assert "two streams use 'grad fc.weight'," in str(hazard)


# -- unwaited and unmatched


def test_a_work_is_waited_for_if_the_cpu_synchronized_with_its_stream():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce")
        b.collective(rank, "all_reduce")
        b.host_wait(rank)
    assert find_findings(b.build()) == ()


def test_a_synchronous_collective_needs_no_wait():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "all_reduce", async_op=False)
    assert find_findings(b.build()) == ()


def test_several_unwaited_works_are_one_finding_a_rank():
    b = ProgramBuilder(1)
    for bucket in range(3):
        b.collective(0, "all_reduce", label=f"bucket {bucket}", source="lab.py:3")
    (finding,) = find_findings(b.build())
    assert (finding.kind, finding.ops) == ("unwaited", (0, 1, 2))
    assert "all_reduce #0 (bucket 0)" in str(finding)
    assert "and 2 more" in str(finding) and "lab.py:3" in str(finding)


def test_a_collective_that_a_rank_never_launched_is_unmatched():
    b = ProgramBuilder(3)
    for rank in (0, 2):
        b.collective(rank, "all_reduce", label="bucket 0")
    (finding,) = find_findings(b.build())
    assert (finding.kind, finding.rank, finding.ops) == ("unmatched", 0, (0,))
    assert "launched by ranks 0, 2 and never by rank 1" in str(finding)


# -- laws

STREAMS = ("default", "a", "b")


@st.composite
def scripts(draw):
    """Operators on three streams, each with an access and stream waits before it."""
    script = []
    for _ in range(draw(st.integers(2, 10))):
        stream = draw(st.sampled_from(STREAMS))
        waits = draw(st.sets(st.sampled_from(STREAMS), max_size=2)) - {stream}
        storage = draw(st.integers(0, 1))
        script.append((stream, sorted(waits), storage, draw(st.booleans())))
    return script


def build(script) -> ProgramBuilder:
    b = ProgramBuilder()
    for stream, waits, storage, writes in script:
        for waited in waits:
            b.wait_stream(0, stream, waited)
        access = (Access(storage, 0, 8),)
        b.compute(0, "op", stream=stream, **{"writes" if writes else "reads": access})
    return b


def reachable(program: Program) -> set[tuple[int, int]]:
    """All (earlier, later) pairs with a chain: by transitive closure, slowly."""
    before: dict[int, set[int]] = {}
    last: dict[str, int] = {}
    for op in program.ranks[0]:
        direct = {*op.after, *([last[op.stream]] if op.stream in last else [])}
        before[op.index] = direct.union(*(before[d] for d in direct))
        last[op.stream] = op.index
    return {(a, b) for b, known in before.items() for a in known}


@given(scripts())
def test_hazards_are_exactly_the_conflicting_pairs_without_a_chain(script):
    program = build(script).build()
    ordered = reachable(program)
    expected = set()
    for i, j in itertools.combinations(range(len(script)), 2):
        (one, _, storage, writes), (other, _, storage_2, writes_2) = (
            script[i],
            script[j],
        )
        if storage == storage_2 and (writes or writes_2) and (i, j) not in ordered:
            expected.add((storage, *sorted((one, other))))
    found = find_findings(program)
    told = {
        (f.storage, *sorted(program.ranks[0][index].stream for index in f.ops))
        for f in found
    }
    assert told == expected
    assert all(f.ops not in ordered for f in found)


@settings(max_examples=30)
@given(scripts())
def test_a_program_that_synchronizes_before_each_launch_has_no_hazard(script):
    b = ProgramBuilder()
    for stream, _, storage, writes in script:
        b.host_wait(0)
        access = (Access(storage, 0, 8),)
        b.compute(0, "op", stream=stream, **{"writes" if writes else "reads": access})
    assert find_findings(b.build()) == ()


accesses = st.builds(
    Access,
    storage=st.just(0),
    offset_bytes=st.integers(0, 40),
    run_bytes=st.integers(0, 6),
    dims=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=3).map(
        tuple
    ),
)


def listed(access: Access) -> set[int]:
    starts = {access.offset_bytes}
    for size, stride in access.dims:
        starts = {s + k * stride for s in starts for k in range(size)}
    return {s + k for s in starts for k in range(access.run_bytes)}


@given(accesses, accesses)
def test_overlap_agrees_with_listing_every_byte(one, other):
    assert overlap(one, other) == bool(listed(one) & listed(other))


def test_overlap_does_not_list_the_bytes_of_large_tensors():
    # A transposed view of 8192 x 8192 floats, even columns against odd ones.
    size, item = 8192, 4
    even = Access(0, 0, item, ((size // 2, 2 * item), (size, size * item)))
    odd = Access(0, item, item, ((size // 2, 2 * item), (size, size * item)))
    assert not overlap(even, odd)
    assert overlap(even, Access(0, size * size * item - 2 * item, item))


@pytest.mark.parametrize("storage", [0, 1])
def test_different_storages_never_overlap(storage):
    assert overlap(Access(0, 0, 8), Access(storage, 0, 8)) == (storage == 0)


def test_a_finding_prints_its_report():
    assert str(Finding("hazard", 0, "what and where")) == "what and where"
