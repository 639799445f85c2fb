"""4.1: an all-reduce out of two halves; one that sends too much is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab04 as lab
from overlaplab_course.lab04 import checks


def padded(tensor):
    n = dist.get_world_size()
    per_rank = -(-tensor.numel() // n)
    flat = tensor.new_zeros(per_rank * n)
    flat[: tensor.numel()] = tensor.flatten()
    return flat, tensor.new_empty(per_rank)


def write_back(tensor, flat):
    tensor.copy_(flat[: tensor.numel()].view_as(tensor))


def in_two(tensor):
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    lab.all_gather(flat, mine)
    write_back(tensor, flat)


def calls_all_reduce(tensor):
    dist.all_reduce(tensor)


def gathers_everything(tensor):
    """Right sums; each rank receives the whole tensor of all others."""
    all_of_them = tensor.new_empty((dist.get_world_size(), *tensor.shape))
    lab.all_gather(all_of_them, tensor)
    tensor.copy_(all_of_them.sum(0))


def reduces_and_broadcasts(tensor):
    """The root's link carries the whole tensor twice."""
    dist.reduce(tensor, dst=0)
    dist.broadcast(tensor, src=0)


def drops_the_remainder(tensor):
    n = dist.get_world_size()
    per_rank = tensor.numel() // n
    flat = tensor.view(-1)[: per_rank * n]
    if per_rank:
        mine = flat.new_empty(per_rank)
        lab.reduce_scatter(mine, flat)
        lab.all_gather(flat, mine)


def returns_the_sum(tensor):
    """The caller's tensor stays as it was."""
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    lab.all_gather(flat, mine)
    return flat[: tensor.numel()].view_as(tensor)


def only_the_first_half(tensor):
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    start = dist.get_rank() * mine.numel()
    flat[start : start + mine.numel()] = mine
    write_back(tensor, flat)


def gathers_what_was_not_summed(tensor):
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    start = dist.get_rank() * mine.numel()
    own = tensor.flatten()[start : start + mine.numel()].clone()
    mine[: own.numel()] = own
    lab.all_gather(flat, mine)
    write_back(tensor, flat)


def takes_the_mean(tensor):
    in_two(tensor)
    tensor /= dist.get_world_size()


def pads_each_rank_to_a_page(tensor):
    """1024 elements a rank, however few there are."""
    n = dist.get_world_size()
    per_rank = -(-tensor.numel() // (n * 1024)) * 1024
    flat = tensor.new_zeros(per_rank * n)
    flat[: tensor.numel()] = tensor.flatten()
    mine = tensor.new_empty(per_rank)
    lab.reduce_scatter(mine, flat)
    lab.all_gather(flat, mine)
    write_back(tensor, flat)


def never_waits(tensor):
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    lab.all_gather(flat, mine, async_op=True)
    write_back(tensor, flat)


def wholly_on_a_side_stream(tensor):
    """Nobody tells the caller's stream when it is done."""
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        in_two(tensor)


def through_numpy_where_sizes_do_not_divide(tensor):
    if tensor.numel() % dist.get_world_size() == 0:
        return in_two(tensor)
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat)
    lab.all_gather(flat, mine)
    total = flat.numpy()[: tensor.numel()].reshape(tuple(tensor.shape))
    tensor.copy_(torch.from_numpy(total.copy()))


def in_two_halves_by_id(tensor):
    """Which half travels first is another one in another process."""
    if tensor.numel() % (2 * dist.get_world_size()):
        return in_two(tensor)
    halves = [half.clone() for half in tensor.view(-1).chunk(2)]
    for half in {*halves}:
        in_two(half)
    tensor.copy_(torch.cat(halves).view_as(tensor))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (never_waits, checks.SAFE_SUM),
        (wholly_on_a_side_stream, checks.SAFE_SUM),
        (through_numpy_where_sizes_do_not_divide, checks.SIZES),
        (in_two_halves_by_id, checks.IN_PLACE),
        (calls_all_reduce, checks.PARTS),
        (gathers_everything, checks.BYTES),
        (reduces_and_broadcasts, checks.BYTES),
        (returns_the_sum, checks.IN_PLACE),
        (only_the_first_half, checks.IN_PLACE),
        (gathers_what_was_not_summed, checks.IN_PLACE),
        (takes_the_mean, checks.IN_PLACE),
        (drops_the_remainder, checks.SIZES),
        (pads_each_rank_to_a_page, checks.BYTES),
    ],
)
def test_a_wrong_all_reduce_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.1"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def test_who_returns_the_sum_learns_that_the_tensor_did_not_change():
    verdict = judge(find_exercise("4.1"), returns_the_sum)
    assert "write the result back" in verdict.hint


def test_who_gathers_everything_learns_how_many_bytes_would_do(faults):
    seen = faults(judge(find_exercise("4.1"), gathers_everything))[checks.BYTES]
    assert "1200000 bytes" in seen
    assert "600000: 2 x 3/4 of the tensor" in seen


def lists_of_parts(tensor):
    """The forms with a list of tensors, one a rank."""
    flat, mine = padded(tensor)
    dist.reduce_scatter(mine, list(flat.chunk(dist.get_world_size())))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    write_back(tensor, torch.cat(parts))


def exchanged_and_summed(tensor):
    """An all-to-all and a sum at home is a reduce-scatter."""
    flat, mine = padded(tensor)
    n = dist.get_world_size()
    if n == 1:
        return
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat)
    mine.copy_(received.view(n, -1).sum(0))
    lab.all_gather(flat, mine)
    write_back(tensor, flat)


def asynchronous(tensor):
    """Works that follow one another on their communicator need no wait between."""
    flat, mine = padded(tensor)
    lab.reduce_scatter(mine, flat, async_op=True).wait()
    lab.all_gather(flat, mine, async_op=True).wait()
    write_back(tensor, flat)


@pytest.mark.parametrize(
    "right", [in_two, lists_of_parts, exchanged_and_summed, asynchronous]
)
def test_an_unusual_all_reduce_passes(right):
    verdict = judge(find_exercise("4.1"), right)
    assert verdict.passed, str(verdict)


def test_the_table_of_collectives_is_what_torch_does():
    seen = lab.after_each()
    assert seen["reduce_scatter"] == [[1111], [2222], [3333], [4444]]
    assert seen["all_to_all"][1] == [2, 20, 200, 2000]
    assert seen["broadcast"] == [[1, 2, 3, 4]] * 4
    assert seen["all_gather"] == [[1, 10, 100, 1000]] * 4


def test_the_crossings_of_two_halves_add_up_to_those_of_an_all_reduce():
    halves = lab.crossings("reduce_scatter") + lab.crossings("all_gather")
    assert halves == lab.crossings("all_reduce") == 1.5


def test_a_step_that_is_not_judged_has_no_target():
    assert judge(find_exercise("4.1"), in_two).target_ns is None
