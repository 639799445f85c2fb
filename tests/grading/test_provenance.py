"""What a collective covers, whatever way the learner's copies take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlaplab.grading.provenance import Ledger
from overlaplab.program import Access, Op
from overlaplab.program.access import byte_runs, num_bytes
from tests.grading.handmade import GRADIENT_BYTES as SIZE
from tests.grading.handmade import Script, on_every_rank, part


def covers(write) -> dict[str, int]:
    evidence = on_every_rank(write)
    return dict(evidence.sends_of(0, 1)[0].covers)


def test_a_collective_on_the_gradient_itself_covers_it():
    def write(s: Script, r: int) -> None:
        s.send(r, s.gradient(r, "w"))

    assert covers(write) == {"w": SIZE}


def test_one_coalesced_collective_covers_all_its_gradients():
    def write(s: Script, r: int) -> None:
        a, b = s.gradient(r, "a"), s.gradient(r, "b")
        s.send(r, a, b)

    assert covers(write) == {"a": SIZE, "b": SIZE}


def test_a_flat_buffer_covers_what_was_copied_into_it():
    def write(s: Script, r: int) -> None:
        flat = s.builder.storage(r, bytes=2 * SIZE)
        for slot, name in enumerate("ab"):
            grad = s.gradient(r, name)
            s.compute(
                r,
                "copy_",
                ns=10,
                reads=(grad,),
                writes=(part(flat, slot * SIZE, SIZE),),
            )
        s.send(r, flat)

    assert covers(write) == {"a": SIZE, "b": SIZE}


def test_half_a_flat_buffer_covers_half_of_a_gradient():
    def write(s: Script, r: int) -> None:
        flat = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "copy_", ns=1, reads=(s.gradient(r, "a"),), writes=(flat,))
        s.send(r, part(flat, 0, SIZE // 2))

    assert covers(write) == {"a": SIZE // 2}


def test_a_concatenation_covers_its_inputs():
    def write(s: Script, r: int) -> None:
        a, b = s.gradient(r, "a"), s.gradient(r, "b", bytes=SIZE // 2)
        flat = s.builder.storage(r, bytes=3 * SIZE // 2)
        s.compute(r, "cat", ns=10, reads=(a, b), writes=(flat,))
        s.send(r, part(flat, SIZE, SIZE // 2))

    assert covers(write) == {"b": SIZE // 2}


def test_a_foreach_copy_moves_each_to_its_own_place():
    def write(s: Script, r: int) -> None:
        a, b = s.gradient(r, "a"), s.gradient(r, "b")
        flat = s.builder.storage(r, bytes=2 * SIZE)
        slots = (part(flat, SIZE, SIZE), part(flat, 0, SIZE))
        s.compute(r, "_foreach_copy_", ns=10, reads=(*slots, a, b), writes=slots)
        s.send(r, part(flat, 0, SIZE))

    assert covers(write) == {"b": SIZE}


def test_a_cast_to_half_the_width_covers_the_whole_gradient():
    def write(s: Script, r: int) -> None:
        half = s.builder.storage(r, bytes=SIZE // 2)
        s.compute(r, "_to_copy", ns=10, reads=(s.gradient(r, "a"),), writes=(half,))
        s.send(r, half)

    assert covers(write) == {"a": SIZE}


def test_scaling_before_and_in_place_keeps_the_cover():
    def write(s: Script, r: int) -> None:
        grad = s.gradient(r, "a")
        scaled = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "div", ns=10, reads=(grad,), writes=(scaled,))
        s.compute(r, "mul_", ns=10, reads=(scaled,), writes=(scaled,))
        s.send(r, scaled)

    assert covers(write) == {"a": SIZE}


def test_clipping_in_place_keeps_the_cover():
    def write(s: Script, r: int) -> None:
        grad = s.gradient(r, "a")
        s.compute(r, "clamp_", ns=10, reads=(grad,), writes=(grad,))
        s.send(r, grad)

    assert covers(write) == {"a": SIZE}


def test_a_parameter_that_a_gradient_was_added_to_is_no_gradient():
    def write(s: Script, r: int) -> None:
        parameter = s.builder.storage(r, bytes=SIZE)
        s.name(r, parameter, "param a")
        s.compute(r, "add_", reads=(parameter, s.gradient(r, "a")), writes=(parameter,))
        s.send(r, parameter)

    assert covers(write) == {}


def test_a_buffer_that_was_zeroed_after_the_copy_covers_nothing():
    def write(s: Script, r: int) -> None:
        flat = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "copy_", ns=10, reads=(s.gradient(r, "a"),), writes=(flat,))
        s.compute(r, "zero_", ns=10, writes=(flat,))
        s.send(r, flat)

    assert covers(write) == {}


def test_the_parameter_sent_instead_of_its_gradient_covers_nothing():
    def write(s: Script, r: int) -> None:
        parameter = s.builder.storage(r, bytes=SIZE)
        s.gradient(r, "a")
        s.send(r, parameter)

    evidence = on_every_rank(write)
    assert evidence.sends_of(0, 1)[0].other_bytes == SIZE
    assert evidence.gradients_of(0, 1)[0].sent_bytes == 0


def test_a_matmul_of_gradients_is_no_gradient():
    def write(s: Script, r: int) -> None:
        other = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "mm", ns=10, reads=(s.gradient(r, "a"),), writes=(other,))
        s.send(r, other)

    assert covers(write) == {}


def test_what_was_sent_before_is_stale_the_second_time():
    def write(s: Script, r: int) -> None:
        grad = s.gradient(r, "a")
        s.send(r, grad)
        s.send(r, grad)

    evidence = on_every_rank(write)
    first, second = evidence.sends_of(0, 1)
    assert (first.stale_bytes, second.stale_bytes) == (0, SIZE)
    assert evidence.gradients_of(0, 1)[0].sent_bytes == 2 * SIZE


def test_gathering_what_a_reduce_scatter_left_is_no_second_time():
    def write(s: Script, r: int) -> None:
        grad = s.gradient(r, "a")
        shard = part(grad, r * SIZE // 2, SIZE // 2)
        s.send(r, grad, into=[shard], operation="reduce_scatter")
        s.send(r, shard, into=[grad], operation="all_gather")

    evidence = on_every_rank(write)
    assert [s.stale_bytes for s in evidence.sends_of(0, 1)] == [0, 0]
    assert evidence.gradients_of(0, 1)[0].sent_bytes == SIZE


def test_a_gradient_sent_before_autograd_clones_it_is_covered():
    def write(s: Script, r: int) -> None:
        original = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "mm", ns=1_000, writes=(original,))
        s.send(r, original)
        grad = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "clone", ns=10, reads=(original,), writes=(grad,))
        s.name(r, grad, "grad a")

    assert covers(write) == {"a": SIZE}


def test_two_gradients_with_one_upstream_tensor_are_two():
    def write(s: Script, r: int) -> None:
        original = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "sum", ns=1_000, writes=(original,))
        s.name(r, original, "grad a")
        copy = s.builder.storage(r, bytes=SIZE)
        s.compute(r, "clone", ns=10, reads=(original,), writes=(copy,))
        s.name(r, copy, "grad b")
        s.send(r, copy)

    assert covers(write) == {"b": SIZE}


def test_only_the_copies_of_a_gradient_count_as_its_pack():
    def write(s: Script, r: int) -> None:
        flat = s.builder.storage(r, bytes=SIZE)
        grad = s.gradient(r, "a")
        s.compute(r, "mm", ns=70)
        s.compute(r, "copy_", ns=10, reads=(grad,), writes=(flat,))
        s.compute(r, "div_", ns=5, reads=(flat,), writes=(flat,))
        s.send(r, flat)

    evidence = on_every_rank(write)
    ops = evidence.program.ranks[0]
    send = evidence.sends_of(0, 1)[0]
    assert [ops[i].name for i in send.pack] == ["copy_", "div_"]
    bucket = evidence.bucket(["a"], 1)
    assert bucket is not None and bucket.pack_ns == 15


accesses = st.builds(
    Access,
    storage=st.just(0),
    offset_bytes=st.integers(0, 20),
    run_bytes=st.integers(1, 4),
    dims=st.lists(st.tuples(st.integers(1, 3), st.integers(4, 30)), max_size=2).map(
        tuple
    ),
)


@given(accesses)
def test_runs_lie_inside_their_hull_and_have_the_length_of_the_access(access):
    found = byte_runs(access)
    last = sum((n - 1) * stride for n, stride in access.dims) + access.run_bytes
    assert all(access.offset_bytes <= a < b for a, b in found)
    assert max(b for _, b in found) == access.offset_bytes + last
    assert sum(b - a for a, b in found) == num_bytes(access)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_no_byte_is_lost_or_doubled_on_the_way_through_a_flat_buffer(sizes, scale):
    """Every gradient that was copied, and no other, is covered by exactly its bytes."""
    ledger = Ledger()
    position, copied = 0, {}
    for number, (numel, copy) in enumerate(sizes):
        size = numel * 4
        grad = Access(number + 1, 0, size)
        ledger.name(grad, number)
        slot = Access(0, position, numel * scale)
        position += numel * scale
        if copy:
            ledger.step(
                Op(0, 0, "compute", "copy_", "s", "s", reads=(grad,), writes=(slot,))
            )
            copied[number] = size
    send = Op(1, 0, "communication", "all_reduce", "c", "s")
    whole = (Access(0, 0, position),)
    from dataclasses import replace

    cargo = ledger.send(replace(send, reads=whole, writes=whole))
    seen: dict[int, int] = {}
    for mark in cargo.fresh:
        seen[mark.gradient] = seen.get(mark.gradient, 0) + mark.high - mark.low
    assert seen == copied
    again = ledger.send(replace(send, reads=whole, writes=whole))
    assert not again.fresh
    assert sum(m.high - m.low for m in again.stale) == sum(copied.values())
