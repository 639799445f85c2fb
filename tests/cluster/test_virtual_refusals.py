"""What collectives refuse, and how they say what differs."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist

from overlaplab.cluster.virtual import run_virtual
from overlaplab.errors import MismatchError, RankError
from overlaplab.torch_versions import all_gather_single, reduce_scatter_single


def run(fn, world_size):
    values, _ = run_virtual(fn, world_size=world_size)
    return values


MISMATCHES = {
    "shapes": (lambda r: dist.all_reduce(torch.ones(2 + r)), r"\[\(2,\)\].*\[\(3,\)\]"),
    "dtypes": (
        lambda r: dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.half][r])),
        "float32.*float16",
    ),
    "reduce op": (
        lambda r: dist.all_reduce(
            torch.ones(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r]
        ),
        "sum.*max",
    ),
    "root": (lambda r: dist.broadcast(torch.ones(2), src=r), "rank 0 has 0.*has 1"),
    "operation": (
        lambda r: (
            dist.broadcast(torch.ones(2), 0) if r else dist.all_reduce(torch.ones(2))
        ),
        "all_reduce.*broadcast",
    ),
    "strides": (
        lambda r: dist.all_reduce(torch.ones(2, 3).t() if r else torch.ones(3, 2)),
        r"\[\(2, 1\)\].*\[\(1, 3\)\]",
    ),
    "number of tensors": (
        lambda r: dist.all_reduce_coalesced([torch.ones(2)] * (r + 1)),
        "rank 0 has 1.*rank 1 has 2",
    ),
}


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced.*:FutureWarning")
@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_do_not_fit_together_are_told_what_differs(what):
    launch, facts = MISMATCHES[what]

    def step():
        dist.all_reduce(torch.ones(1))
        launch(dist.get_rank())

    with pytest.raises(MismatchError) as refused:
        run_virtual(step, world_size=2)
    message = " ".join(str(refused.value).split())
    assert f"{what}: rank 0 has" in message and "collective #1" in message
    assert re.search(facts, message), message


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_collective_that_fails_fails_on_every_rank(num_ranks):
    # The last rank caught its error, and the others had nobody to wait for.
    def step():
        seen = []
        small = torch.ones(2).to(torch.float8_e4m3fn)  # not to be added
        for async_op in (False, True):
            try:
                work = dist.all_reduce(small, async_op=async_op)
                if async_op:
                    work.wait()
                small.float()
            except NotImplementedError as error:
                seen.append("add" in str(error))
        right = torch.ones(1)
        dist.all_reduce(right)
        return seen, right.item()

    assert run(step, num_ranks) == (([True, True], num_ranks),) * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_mismatch_that_one_rank_catches_is_reported(num_ranks):
    def step():
        with contextlib.suppress(MismatchError):
            dist.all_reduce(torch.ones(1 + dist.get_rank()))

    with pytest.raises(MismatchError, match="shapes: rank 0 has"):
        run(step, num_ranks)


def test_a_tensor_that_does_not_divide_by_the_ranks_is_refused():
    def step():
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(5))

    with pytest.raises((RankError, MismatchError), match="5"):
        run_virtual(step, world_size=2)


def scatter_into(output, input):
    return reduce_scatter_single(torch.empty(output), torch.ones(input))


def gather_into(output, input):
    return all_gather_single(torch.empty(output), torch.ones(input))


PARTS = {
    (scatter_into, 8, 2): "an input of 2 elements and an output of 8",
    (scatter_into, 1, 4): "an input of 4 elements and an output of 1",
    (gather_into, 2, 8): "an output of 2 elements and an input of 8",
    (gather_into, 8, 2): "an output of 8 elements and an input of 2",
}


@pytest.mark.parametrize(("call", "output", "input"), PARTS)
def test_a_whole_that_is_not_one_part_per_rank_is_refused_where_it_is_launched(
    call, output, input
):
    # It used to fail at a later line, where the lengths met.
    with pytest.raises(RankError, match=PARTS[call, output, input]):
        run(lambda: call(output, input) and None, 2)


def test_a_tensor_that_is_not_one_block_of_memory_is_refused():
    def step():
        dist.all_reduce(torch.ones(4, 6)[:, :3])

    with pytest.raises(RankError, match=r"all_reduce got .*\(4, 3\) and .*\(6, 1\)"):
        run_virtual(step)


def test_what_the_group_cannot_do_is_named():
    def step():
        dist.recv(torch.empty(1))  # from anybody

    with pytest.raises(RankError, match="name the rank with src="):
        run_virtual(step, world_size=2)


def test_messages_with_tags_that_cross_are_refused():
    def step():
        if dist.get_rank() == 0:
            for tag in (1, 2):
                dist.isend(torch.ones(1), 1, tag=tag).wait()
        else:
            dist.recv(torch.ones(1), 0, tag=2)

    with pytest.raises(MismatchError, match="tag: rank 0 has 1"):
        run(step, 2)


LISTS_OF_ONE = {
    "all_gather got 1 outputs": lambda one: dist.all_gather([one], one),
    "reduce_scatter got 1 inputs": lambda one: dist.reduce_scatter(one, [one]),
    "gather got 1 outputs": lambda one: dist.gather(
        one, [one] if dist.get_rank() == 0 else None
    ),
    "scatter got 1 inputs": lambda one: dist.scatter(
        one, [one] if dist.get_rank() == 0 else None
    ),
    "all_to_all got 1 outputs": lambda one: dist.all_to_all([one], [one]),
}


@pytest.mark.parametrize("message", LISTS_OF_ONE)
def test_a_list_that_has_not_one_tensor_a_rank_is_refused(message):
    with pytest.raises(RankError, match=f"{message}; expected 2"):
        run(lambda: LISTS_OF_ONE[message](torch.ones(2)), 2)


def test_a_sparse_tensor_is_refused_by_its_layout():
    with pytest.raises(RankError, match=r"layout .*sparse_coo"):
        run(lambda: dist.all_reduce(torch.eye(2).to_sparse()), 2)
