"""Re-timing a record with other buckets and links, on `chalk` and by law."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.errors import ProgramError
from overlaplab.hardware import find_hardware, with_link
from overlaplab.program import (
    Access,
    PayloadTensor,
    Program,
    ProgramBuilder,
    buckets_of_cap,
    find_findings,
    gradient_payload,
    rebucket,
    replay,
    resolve,
)
from overlaplab.timeline import Timeline

SIZES = (10_000, 20_000, 5_000, 40_000)
TIMES = (2_000, 1_000, 3_000, 1_000)


def step_program(
    buckets: Sequence[Sequence[int]],
    *,
    steps: int = 1,
    num_ranks: int = 2,
    named: bool = False,
    sizes: Sequence[int] = SIZES,
    times: Sequence[int] = TIMES,
) -> Program:
    """Backward of one gradient an operator; a bucket leaves when its last is there,
    in the order of completion. What a bucketed reducer records."""
    b = ProgramBuilder(num_ranks)
    order = sorted(range(len(buckets)), key=lambda i: max(buckets[i]))
    for rank in range(num_ranks):
        for _ in range(steps):
            b.compute(rank, "forward", ns=500)
            ready: dict[int, int] = {}
            works, waiting = [], list(order)
            for position, ns in enumerate(times):
                grad = Access(position, 0, sizes[position])
                ready[position] = b.compute(rank, "mm", ns=ns, writes=(grad,))
                while waiting and max(buckets[waiting[0]]) <= position:
                    index = waiting.pop(0)
                    grads = tuple(Access(p, 0, sizes[p]) for p in buckets[index])
                    parts = [
                        PayloadTensor(
                            sizes[p], "float32", ready[p], f"grad {p}" if named else ""
                        )
                        for p in buckets[index]
                    ]
                    works.append(
                        b.collective(
                            rank,
                            "all_reduce",
                            payload=parts,
                            label=f"bucket {index}",
                            reads=grads,
                            writes=grads,
                        )
                    )
            for work in works:
                b.wait(rank, work)
            grads = tuple(Access(p, 0, sizes[p]) for p in range(len(sizes)))
            b.compute(rank, "step", ns=700, reads=grads)
    return b.build()


EACH = [[position] for position in range(len(SIZES))]


def events(timeline: Timeline) -> list[tuple[int, str, str, int, int, int]]:
    return [
        (s.rank, s.lane, s.name, s.start_ns, s.end_ns, s.bytes) for s in timeline.spans
    ]


def test_two_buckets_from_a_record_of_one_all_reduce_a_parameter():
    timeline = replay(step_program(EACH), hardware="chalk", buckets=[[0, 1], [2, 3]])
    assert [e[1:] for e in events(timeline) if e[0] == 0] == [
        ("default", "forward", 0, 500, 0),
        ("default", "mm", 500, 2_500, 0),
        ("default", "mm", 2_500, 3_500, 0),
        ("comm", "all_reduce", 3_500, 7_500, 30_000),
        ("default", "mm", 3_500, 6_500, 0),
        ("default", "mm", 6_500, 7_500, 0),
        ("comm", "all_reduce", 7_500, 13_000, 45_000),
        ("default", "step", 13_000, 13_700, 0),
    ]


def test_the_recorded_buckets_give_the_recorded_program():
    program = step_program([[0, 1], [2, 3]])
    assert rebucket(program, [[0, 1], [2, 3]]) == program


def sent(program: Program) -> list[tuple[PayloadTensor, ...]]:
    return [
        op.collective.payload for op in program.ranks[1] if op.collective is not None
    ]


@st.composite
def plans(draw):
    """Buckets of the positions: any partition, in any order."""
    owner = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
    groups = {o: [p for p in range(4) if owner[p] == o] for o in owner}
    return draw(st.permutations(list(groups.values())))


@given(plans(), plans(), st.integers(1, 3), st.booleans())
def test_rebucketing_any_record_gives_what_the_reducer_would_have_recorded(
    old, new, steps, named
):
    # Positions count in the order of the record, not of the model.
    in_record = [p for bucket in sorted(old, key=max) for p in bucket]
    plan = [[in_record.index(p) for p in bucket] for bucket in new]
    rebucketed = rebucket(step_program(old, steps=steps, named=named), plan)
    recorded = step_program(new, steps=steps, named=named)
    assert resolve(rebucketed, "chalk").spans == resolve(recorded, "chalk").spans
    assert sent(rebucketed) == sent(recorded)
    assert len(rebucketed.waits) == len(recorded.waits)


@given(plans(), st.integers(1, 2))
def test_rebucketing_adds_no_finding(plan, steps):
    assert find_findings(rebucket(step_program(EACH, steps=steps), plan)) == ()


def test_a_cap_fills_buckets_greedily_in_order_of_position():
    program = step_program(EACH)
    by_cap = rebucket(program, 30_000)
    assert by_cap == rebucket(program, [[0, 1], [2], [3]])


def test_a_gradient_larger_than_the_cap_travels_alone():
    parts = [PayloadTensor(n, "float32", None) for n in (3, 10, 1, 1, 1, 6)]
    assert buckets_of_cap(parts, 4) == ((0,), (1,), (2, 3, 4), (5,))


def test_one_bucket_is_open_for_each_dtype():
    parts = [
        PayloadTensor(2, dtype, None)
        for dtype in ("bf16", "fp32", "bf16", "fp32", "bf16")
    ]
    assert buckets_of_cap(parts, 4) == ((0, 2), (1, 3), (4,))


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_buckets_of_a_cap_keep_order_hold_the_cap_and_are_maximal(sizes, cap):
    buckets = buckets_of_cap([PayloadTensor(n, "float32", None) for n in sizes], cap)
    assert [p for bucket in buckets for p in bucket] == list(range(len(sizes)))
    weights = [sum(sizes[p] for p in bucket) for bucket in buckets]
    assert all(w <= cap or len(b) == 1 for w, b in zip(weights, buckets, strict=True))
    for weight, following in zip(weights, buckets[1:], strict=False):
        assert weight + sizes[following[0]] > cap


@pytest.mark.parametrize("cap", [0, -1, True, False])
def test_a_cap_that_is_no_number_of_bytes_is_refused(cap):
    with pytest.raises(ValueError, match=f"bucket cap is {cap} bytes"):
        rebucket(step_program(EACH), cap)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ([[0, 1]], r"no bucket has position 2 \(2 missing of the 4"),
        ([[0, 1], [1, 2, 3]], "position 1 is in the buckets twice"),
        ([[0, 1, 2, 3], [4]], "bucket 1 has position 4; step 0 has 4 gradients"),
        ([[0, 1, 2, 3], []], "bucket 1 is empty"),
        ([[-1, 0, 1, 2, 3]], "bucket 0 has position -1"),
    ],
)
def test_buckets_that_are_no_plan_are_refused(buckets, message):
    with pytest.raises(ValueError, match=message):
        rebucket(step_program(EACH), buckets)


def test_a_bucket_of_two_dtypes_is_refused():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        for dtype in ("float32", "bfloat16"):
            b.collective(rank, "all_reduce", payload=[PayloadTensor(8, dtype, None)])
    with pytest.raises(ValueError, match="bucket 0 mixes bfloat16, float32"):
        rebucket(b.build(), [[0, 1]])


def test_a_program_without_async_all_reduces_is_refused():
    b = ProgramBuilder(2)
    b.compute(0, "mm", ns=1)
    with pytest.raises(ProgramError, match="launches no asynchronous all_reduce"):
        rebucket(b.build(), 25)


def test_ranks_that_reduce_different_gradients_are_refused():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(
            rank, "all_reduce", payload=[PayloadTensor(8 + rank, "float32", None)]
        )
    with pytest.raises(ProgramError, match="rank 1 reduces other gradients"):
        rebucket(b.build(), 25)


def test_a_bucket_that_leaves_after_somebody_waits_for_it_is_refused():
    b = ProgramBuilder(1)
    for position in range(2):
        mm = b.compute(0, "mm", ns=5)
        work = b.collective(
            0, "all_reduce", payload=[PayloadTensor(8, "float32", mm, f"{position}")]
        )
        b.wait(0, work)
        b.compute(0, "update", ns=5)
    with pytest.raises(
        ProgramError, match=r"bucket 0 cannot leave before op 2 of rank 0"
    ):
        rebucket(b.build(), [[0, 1]])


def test_each_step_has_its_own_positions():
    parts = gradient_payload(step_program(EACH, steps=3))
    assert [[part.bytes for part in step] for step in parts] == [list(SIZES)] * 3


def test_what_has_no_name_in_a_named_bucket_rides_with_the_last_gradient():
    def program(buckets: list[list[int]]) -> Program:
        b = ProgramBuilder(1)
        written = {}
        for position in range(3):
            written[position] = b.compute(0, "mm", ns=1_000)
            for bucket in buckets:
                if max(bucket) != position:
                    continue
                parts = [
                    PayloadTensor(8, "float32", written[p], f"grad {p}") for p in bucket
                ]
                if position == 2:
                    flags = b.compute(0, "ones", ns=10)
                    parts.append(PayloadTensor(12, "float32", flags))
                b.collective(
                    0, "all_reduce", payload=parts, label=f"bucket {len(parts)}"
                )
        return b.build()

    each = program([[0], [1], [2]])
    assert [len(step) for step in gradient_payload(each)] == [3]
    one = resolve(rebucket(each, [[0, 1, 2]]), "chalk")
    assert events(one) == events(resolve(program([[0, 1, 2]]), "chalk"))
    assert one.spans[-1].bytes == 3 * 8 + 12


def test_other_collectives_keep_their_place_and_are_renumbered():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.collective(rank, "broadcast", bytes=8, async_op=False)
        for position in range(2):
            mm = b.compute(rank, "mm", ns=5)
            b.collective(
                rank,
                "all_reduce",
                payload=[PayloadTensor(8, "float32", mm, f"{position}")],
            )
        b.collective(rank, "barrier", async_op=False)
    program = rebucket(b.build(), [[0, 1]])
    assert [
        (op.name, op.collective.sequence)
        for op in program.ranks[1]
        if op.collective is not None
    ] == [("broadcast", 0), ("all_reduce", 1), ("barrier", 2)]


def test_storages_and_names_move_with_the_operators():
    b = ProgramBuilder(1)
    for position in range(2):
        grad = b.storage(0, bytes=8, name=f"grad {position}")
        mm = b.compute(0, "mm", ns=5, writes=(grad,))
        b.collective(
            0, "all_reduce", payload=[PayloadTensor(8, "float32", mm, f"{position}")]
        )
    b.compute(0, "step", ns=1)
    b.free(0, grad)
    program = rebucket(b.build(), [[0, 1]])
    assert [op.name for op in program.ranks[0]] == ["mm", "mm", "all_reduce", "step"]
    assert [(s.born, s.freed) for s in program.storages] == [(0, None), (1, 4)]


def test_a_storage_that_moves_keeps_all_that_is_known_of_it():
    b = ProgramBuilder(1)
    for position in range(2):
        mm = b.compute(0, "mm", ns=5)
        b.collective(
            0, "all_reduce", payload=[PayloadTensor(8, "float32", mm, f"{position}")]
        )
    late = b.storage(0, bytes=8, name="late")
    b.compute(0, "step", ns=1, writes=(late,))
    b.record_stream(0, late, "side")
    b.free(0, late)
    program = b.build()
    pinned = replace(program.storages[0], host=True, pinned=True)
    program = replace(program, storages=(pinned,))
    (moved,) = rebucket(program, [[0, 1]]).storages
    # Two collectives have become one: everything behind them is one place earlier.
    assert (pinned.born, pinned.freed, pinned.recorded) == (4, 5, (("side", 5),))
    assert moved == replace(pinned, born=3, freed=4, recorded=(("side", 4),))


def test_replay_without_buckets_only_changes_the_hardware():
    program = step_program([[0, 1, 2, 3]])
    slow = with_link("chalk", bytes_per_s=5 * 10**9)
    assert replay(program, hardware=slow) == resolve(program, slow)
    fast_end = resolve(program, find_hardware("chalk")).spans[-1].end_ns
    assert replay(program, hardware=slow).spans[-1].end_ns == fast_end + 7_500


def test_a_rule_of_ones_own_says_what_reduces_gradients():
    b = ProgramBuilder(1)
    for name in ("loss", "grad", "grad"):
        b.collective(
            0, "all_reduce", payload=[PayloadTensor(8, "float32", None)], label=name
        )
    program = rebucket(b.build(), [[0, 1]], is_gradient=lambda op: op.label == "grad")
    assert [op.label for op in program.ranks[0]] == ["loss", "bucket 0"]


def test_a_blocking_all_reduce_has_its_place_in_its_stream_and_stays_there():
    b = ProgramBuilder(1)
    payload = [PayloadTensor(8, "float32", None)]
    b.collective(0, "all_reduce", payload=payload, async_op=False, stream="side")
    with pytest.raises(ProgramError, match=r"all_reduce #0 of rank 0 .* stream 'side'"):
        rebucket(b.build(), [[0]], is_gradient=lambda op: True)


def test_buckets_leave_in_one_order_on_all_ranks_though_readiness_differs():
    b = ProgramBuilder(2)
    for rank in (0, 1):
        written = {p: b.compute(rank, f"mm {p}", ns=5) for p in ((0, 1), (1, 0))[rank]}
        parts = [
            PayloadTensor(8 + p, "float32", written[p], f"grad {p}") for p in (0, 1)
        ]
        b.collective(rank, "all_reduce", payload=parts)
    program = rebucket(b.build(), [[0], [1]])
    for rank, after in ((0, [(0,), (2,)]), (1, [(1,), (1,)])):
        reduces = [op for op in program.ranks[rank] if op.collective is not None]
        assert [op.label for op in reduces] == ["bucket 0", "bucket 1"]
        assert [op.after for op in reduces] == after
        assert [op.collective.bytes for op in reduces] == [8, 9]
