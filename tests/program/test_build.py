"""The builder writes what a cluster would have recorded."""

import pytest

from overlaplab.program import ProgramBuilder, WorkWait


def test_the_next_operator_of_the_waiting_stream_waits_and_only_that():
    b = ProgramBuilder(2)
    work = b.collective(0, "all_reduce")
    b.wait(0, work)
    b.compute(0, "on the side", stream="side")
    b.compute(0, "first")
    b.compute(0, "second")
    assert [op.after for op in b.build().ranks[0]] == [(), (), (0,), ()]
    assert b.build().waits == (WorkWait(0, 0, "default", before=1),)


def test_a_collective_waits_for_the_stream_of_its_launch():
    b = ProgramBuilder()
    b.compute(0, "mm")
    b.compute(0, "copy", stream="side")
    b.collective(0, "all_reduce", stream="side")
    (*_, reduce) = b.build().ranks[0]
    assert (reduce.stream, reduce.launch_stream, reduce.after) == ("comm", "side", (1,))


def test_a_wait_is_still_pending_for_its_stream_after_a_collective_inherited_it():
    b = ProgramBuilder()
    first = b.collective(0, "all_reduce", group="a")
    b.wait(0, first)
    b.collective(0, "all_reduce", group="b")
    b.compute(0, "mm")
    assert [op.after for op in b.build().ranks[0]] == [(), (0,), (0,)]


def test_collectives_of_a_group_are_numbered_from_zero():
    b = ProgramBuilder()
    for group in ("default", "other", "default"):
        b.collective(0, "all_reduce", group=group)
    numbers = [(op.stream, op.collective.sequence) for op in b.build().ranks[0]]
    assert numbers == [("comm", 0), ("comm:other", 0), ("comm", 1)]


def test_wait_stream_covers_what_the_other_stream_waits_for_itself():
    b = ProgramBuilder()
    work = b.collective(0, "all_reduce")
    b.wait(0, work, stream="side")
    b.wait_stream(0, "default", "side")
    b.compute(0, "mm")
    assert b.build().ranks[0][-1].after == (work,)


@pytest.mark.parametrize("arguments", [{"num_ranks": 0}, {"represents": 0}])
def test_fewer_than_one_rank_is_refused(arguments):
    with pytest.raises(ValueError, match="at least 1 each"):
        ProgramBuilder(**arguments)


def test_one_representative_for_several_recorded_ranks_is_refused():
    with pytest.raises(ValueError, match="one of them 1"):
        ProgramBuilder(2, represents=4)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank is {rank}.*ranks 0 to 1"):
        ProgramBuilder(2).compute(rank, "mm", ns=1)


def test_a_kernel_of_both_nanoseconds_and_flops_is_refused():
    with pytest.raises(ValueError, match="mm: give ns or flops"):
        ProgramBuilder().compute(0, "mm", ns=1, flops=1)


@pytest.mark.parametrize(
    "launch",
    [
        lambda b, number: b.compute(0, "mm", ns=number),
        lambda b, number: b.compute(0, "mm", flops=number),
        lambda b, number: b.collective(0, "all_reduce", bytes=number),
        lambda b, number: b.host(0, "load", number),
    ],
)
@pytest.mark.parametrize("number", [-1, 1.5, "2"])
def test_an_amount_below_zero_or_no_integer_is_refused(launch, number):
    with pytest.raises(ValueError, match=f"is {number!r}; expected an int, 0 or more"):
        launch(ProgramBuilder(), number)


def test_a_wait_for_what_is_no_collective_is_refused():
    b = ProgramBuilder()
    kernel = b.compute(0, "mm", ns=1)
    for work in (kernel, kernel + 1, -1):
        with pytest.raises(ValueError, match=f"waits for op {work}"):
            b.wait(0, work)
