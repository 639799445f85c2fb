"""A freed block is judged at its next owner, by the record alone."""

from dataclasses import replace

import pytest

from overlaplab.program import ProgramBuilder, find_findings

MIB = 2**20


def hazards(b: ProgramBuilder) -> list[tuple[str, tuple[int, ...]]]:
    found = [f for f in find_findings(b.build()) if f.kind == "hazard"]
    return [(f.name, f.ops) for f in found]


def batch_read_on_the_side(b: ProgramBuilder, bytes: int = 4096):
    """A tensor of the default stream, written there and read on "side"."""
    batch = b.storage(0, bytes=bytes, name="batch")
    b.compute(0, "fill", writes=(batch,))
    b.wait_stream(0, "side", "default")
    b.compute(0, "mm", reads=(batch,), stream="side")
    return batch


def write_new(b: ProgramBuilder, bytes: int = 4096, **where):
    new = b.storage(0, bytes=bytes, name="new", **where)
    return b.compute(0, "zeros", writes=(new,), **where)


def test_memory_that_another_stream_still_reads_is_handed_out_to_a_writer():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    write_new(b)
    assert hazards(b) == [("batch", (1, 2))]


def test_the_report_names_both_owners_the_missing_edge_and_the_repair():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    write_new(b)
    (finding,) = find_findings(b.build())
    assert str(finding).splitlines() == [
        "hazard: on rank 0 the memory of 'batch' is handed out again while it may "
        "still be used.",
        "  first read: mm on stream 'side', op 1",
        "  then written: zeros on stream 'default', op 2, now memory of 'new'",
        "  Missing: zeros (op 2) does not wait for mm (op 1).",
        "  Repair: keep a reference until stream 'default', which allocated it, waits "
        "for mm (op 1); or call record_stream on the tensor, with stream 'side', "
        "before you drop it.",
    ]


def test_memory_of_the_stream_that_uses_it_goes_from_owner_to_owner():
    b = ProgramBuilder()
    old = b.storage(0, bytes=64)
    b.compute(0, "fill", writes=(old,))
    b.free(0, old)
    write_new(b)
    assert hazards(b) == []


def test_record_stream_keeps_the_block_back():
    b = ProgramBuilder()
    batch = batch_read_on_the_side(b)
    b.record_stream(0, batch, "side")
    b.free(0, batch)
    write_new(b)
    assert hazards(b) == []


def test_record_stream_of_another_stream_does_not():
    b = ProgramBuilder()
    batch = batch_read_on_the_side(b)
    b.compute(0, "other", stream="other")
    b.record_stream(0, batch, "other")
    b.free(0, batch)
    write_new(b)
    assert hazards(b) == [("batch", (1, 3))]


def test_record_stream_of_a_stream_that_is_behind_the_reader_does():
    b = ProgramBuilder()
    batch = batch_read_on_the_side(b)
    b.wait_stream(0, "other", "side")
    b.compute(0, "other", stream="other")
    b.record_stream(0, batch, "other")
    b.free(0, batch)
    write_new(b)
    assert hazards(b) == []


def test_a_wait_between_the_release_and_the_next_owners_first_use_is_in_time():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    b.wait_stream(0, "default", "side")
    write_new(b)
    assert hazards(b) == []


def test_a_synchronize_of_the_cpu_before_the_next_owner_is_in_time():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    b.host_wait(0)
    write_new(b)
    assert hazards(b) == []


@pytest.mark.parametrize(
    ("bytes", "expected"),
    [(4096, [("batch", (1, 2))]), (3585, [("batch", (1, 2))]), (4097, [])],
)
def test_only_an_allocation_that_fits_gets_the_block(bytes, expected):
    # The batch has 3,700 bytes: eight blocks of 512.
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b, 3700))
    write_new(b, bytes)
    assert hazards(b) == expected


def test_small_allocations_do_not_come_from_large_blocks():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b, 4 * MIB))
    write_new(b, 4096)
    assert hazards(b) == []
    write_new(b, 2 * MIB)
    assert hazards(b) == [("batch", (1, 3))]


def test_the_rest_of_a_block_is_handed_out_later():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b, 1024))
    b.storage(0, bytes=512)  # nobody uses it
    write_new(b, 512)
    assert hazards(b) == [("batch", (1, 2))]


def test_a_block_has_one_next_owner():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    b.storage(0, bytes=4096)  # takes it, for good
    write_new(b)
    assert hazards(b) == []


def test_an_owner_that_never_used_the_block_hands_the_danger_on():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    b.free(0, b.storage(0, bytes=4096))
    write_new(b)
    assert hazards(b) == [("batch", (1, 2))]


def test_another_streams_allocation_does_not_get_the_block():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    write_new(b, stream="other")
    assert hazards(b) == []


def test_new_memory_used_at_once_on_another_stream_may_still_be_in_use_on_its_own():
    b = ProgramBuilder()
    old = b.storage(0, bytes=64, name="old")
    b.compute(0, "fill", writes=(old,))
    b.free(0, old)
    new = b.storage(0, bytes=64)
    b.compute(0, "copy", writes=(new,), stream="side")
    assert hazards(b) == [("old", (0, 1))]
    assert "let stream 'side' wait for 'default'" in str(find_findings(b.build())[0])


def test_an_allocation_before_the_release_gets_another_block():
    b = ProgramBuilder()
    batch = batch_read_on_the_side(b)
    new = b.storage(0, bytes=4096)
    b.free(0, batch)
    b.compute(0, "zeros", writes=(new,))
    assert hazards(b) == []
    lives = tuple(replace(s, freed_before=None) for s in b.build().storages)
    program = replace(b.build(), storages=lives)
    assert [f.ops for f in find_findings(program)] == [(1, 2)]


def reduced_on_the_side(b: ProgramBuilder, *, waits: str, drops: str):
    """B01: allocated on the default stream, sent from "side", waited for on `waits`."""
    grad = b.storage(0, bytes=4096, name="grad")
    b.compute(0, "fill", writes=(grad,))
    b.wait_stream(0, "side", "default")
    work = b.collective(
        0, "all_reduce", bytes=4096, reads=(grad,), writes=(grad,), stream="side"
    )
    if drops == "before the wait":
        b.free(0, grad)
    if waits:
        b.wait(0, work, stream=waits)
    if drops == "after the wait":
        b.free(0, grad)


@pytest.mark.parametrize("drops", ["before the wait", "after the wait"])
@pytest.mark.parametrize(
    ("waits", "expected"), [("side", [("grad", (1, 2))]), ("default", [])]
)
def test_after_the_wait_only_the_waiting_stream_is_ordered(drops, waits, expected):
    b = ProgramBuilder()
    reduced_on_the_side(b, waits=waits, drops=drops)
    write_new(b)
    assert hazards(b) == expected


def test_a_work_that_nobody_waited_for_holds_its_tensors():
    b = ProgramBuilder()
    reduced_on_the_side(b, waits="", drops="after the wait")
    write_new(b)
    assert hazards(b) == []
    lives = tuple(replace(s, freed=2) for s in b.build().storages[:1])
    program = replace(b.build(), storages=(*lives, *b.build().storages[1:]))
    assert [f.kind for f in find_findings(program)] == ["unwaited"]


def test_record_stream_with_the_stream_that_waited_for_the_work_is_enough():
    b = ProgramBuilder()
    grad = b.storage(0, bytes=4096)
    b.compute(0, "fill", writes=(grad,))
    work = b.collective(0, "all_reduce", bytes=4096, writes=(grad,))
    b.wait(0, work, stream="side")
    b.record_stream(0, grad, "side")
    b.free(0, grad)
    write_new(b)
    assert hazards(b) == []


def test_gradients_that_cross_streams_in_the_backward_pass_are_recorded_by_autograd():
    b = ProgramBuilder()
    grad = b.storage(0, bytes=64)
    b.compute(0, "made", writes=(grad,), phase="backward")
    b.wait_stream(0, "side", "default")
    b.compute(0, "used", reads=(grad,), stream="side", phase="backward")
    b.free(0, grad)
    write_new(b, 64)
    assert hazards(b) == []


def test_a_tensor_that_was_there_before_its_first_reader_took_no_freed_block():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    old = b.storage(0, bytes=4096, name="from outside")
    b.compute(0, "mm", reads=(old,))
    b.compute(0, "mul_", reads=(old,), writes=(old,))
    assert hazards(b) == []
    write_new(b)
    assert hazards(b) == [("batch", (1, 4))]


def test_memory_of_the_host_is_not_judged():
    b = ProgramBuilder()
    b.free(0, batch_read_on_the_side(b))
    write_new(b)
    lives = tuple(replace(s, host=True) for s in b.build().storages)
    assert find_findings(replace(b.build(), storages=lives)) == ()


def test_a_loop_that_makes_the_same_mistake_is_told_once():
    b = ProgramBuilder()
    for _ in range(4):
        b.free(0, batch_read_on_the_side(b))
    (finding,) = find_findings(b.build())
    assert "(and 2 more tensors)" in str(finding)


def test_a_work_that_nobody_waited_for_does_not_hold_memory_that_is_given_back():
    def hazards_of(drop):
        b = ProgramBuilder()
        grad = b.storage(0, bytes=4096, name="grad")
        b.compute(0, "mm", writes=(grad,))
        b.collective(0, "all_reduce", bytes=4096, reads=(grad,), writes=(grad,))
        drop(b, grad)
        write_new(b)
        return hazards(b)

    assert hazards_of(lambda b, grad: b.free(0, grad)) == []
    given_back = hazards_of(lambda b, grad: b.resize(0, grad, bytes=0))
    assert given_back == [("grad", (1, 2))]


def test_memory_that_is_taken_anew_is_a_new_owners():
    """The same tensor may get the block that it had, and its stream may differ."""
    b = ProgramBuilder()
    batch = batch_read_on_the_side(b)
    again = b.resize(0, b.resize(0, batch, bytes=0), bytes=4096)
    b.compute(0, "fill", writes=(again,))
    assert hazards(b) == [("batch", (1, 2))]
