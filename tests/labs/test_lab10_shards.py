"""10.1: shards that keep the whole, are cut elsewhere or copied are refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab10 import checks


def row_of(weights):
    flat = torch.cat([weight.flatten() for weight in weights])
    size = -(-flat.numel() // dist.get_world_size())
    row = flat.new_zeros(size * dist.get_world_size())
    row[: flat.numel()] = flat
    return row


def shard(weights):
    return row_of(weights).chunk(dist.get_world_size())[dist.get_rank()].clone()


def unshard(slot, shapes):
    views, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(slot[begin:end].view(shape))
        begin = end
    return views


# -- wrong shards


def a_slice_of_the_row(weights):
    return row_of(weights).chunk(dist.get_world_size())[dist.get_rank()]


def each_weight_cut_alone(weights):
    """As the documents do: every weight has padding of its own."""
    n, rank = dist.get_world_size(), dist.get_rank()
    parts = []
    for weight in weights:
        size = -(-weight.numel() // n)
        row = weight.new_zeros(size * n)
        row[: weight.numel()] = weight.flatten()
        parts.append(row.view(n, size)[rank])
    return torch.cat(parts)


def cut_by_chunk_of_the_first_dimension(weights):
    """shard * world_size is taken for the full shape; what is left over is lost."""
    n, rank = dist.get_world_size(), dist.get_rank()
    flat = torch.cat([weight.flatten() for weight in weights])
    size = flat.numel() // n
    return flat[rank * size : (rank + 1) * size].clone()


def the_last_rank_has_less(weights):
    flat = torch.cat([weight.flatten() for weight in weights])
    size = -(-flat.numel() // dist.get_world_size())
    return flat[dist.get_rank() * size :][:size].clone()


def interleaved(weights):
    n = dist.get_world_size()
    return row_of(weights)[dist.get_rank() :: n].clone()


def padded_to_eight_elements(weights):
    flat = torch.cat([weight.flatten() for weight in weights])
    size = -(-flat.numel() // dist.get_world_size() // 8) * 8
    row = flat.new_zeros(size * dist.get_world_size())
    row[: flat.numel()] = flat
    return row.view(-1, size)[dist.get_rank()].clone()


def padded_with_the_beginning(weights):
    """A row that wraps around: no zeros."""
    flat = torch.cat([weight.flatten() for weight in weights])
    size = -(-flat.numel() // dist.get_world_size())
    row = torch.cat([flat, flat])[: size * dist.get_world_size()]
    return row.view(-1, size)[dist.get_rank()].clone()


def the_first_rank_has_all(weights):
    return row_of(weights).chunk(dist.get_world_size())[0].clone()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (a_slice_of_the_row, checks.ALONE),
        (each_weight_cut_alone, checks.SIZE),
        (cut_by_chunk_of_the_first_dimension, checks.SIZE),
        (the_last_rank_has_less, checks.SIZE),
        (interleaved, checks.PART),
        (padded_to_eight_elements, checks.SIZE),
        (padded_with_the_beginning, checks.PART),
        (the_first_rank_has_all, checks.PART),
    ],
)
def test_a_wrong_shard_is_refused_for_its_own_reason(wrong, sentence, faults):
    found = faults(judge(find_exercise("10.1"), wrong, unshard))
    assert set(found) == {sentence}, found


def test_values_of_a_shard_of_another_size_are_not_judged():
    verdict = judge(find_exercise("10.1"), each_weight_cut_alone, unshard)
    assert checks.PART in verdict.unjudged


# -- wrong weights


def copies(slot, shapes):
    return [view.clone() for view in unshard(slot, shapes)]


def only_the_first_is_a_view(slot, shapes):
    first, *others = unshard(slot, shapes)
    return [first, *(view.clone() for view in others)]


def transposed(slot, shapes):
    return [
        view.t().reshape(view.shape) if view.dim() == 2 else view
        for view in unshard(slot, shapes)
    ]


def the_whole_slot_belongs_to_the_last(slot, shapes):
    *most, last = unshard(slot, shapes)
    return [*most, slot[slot.numel() - math.prod(last.shape) :].view(last.shape)]


def a_list_without_empty_weights(slot, shapes):
    return unshard(slot, [shape for shape in shapes if math.prod(shape)])


def flat_views(slot, shapes):
    return [view.flatten() for view in unshard(slot, shapes)]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (copies, checks.VIEWS),
        (only_the_first_is_a_view, checks.VIEWS),
        (transposed, checks.WHOLE),
        (the_whole_slot_belongs_to_the_last, checks.WHOLE),
        (a_list_without_empty_weights, checks.WHOLE),
        (flat_views, checks.WHOLE),
    ],
)
def test_wrong_weights_are_refused_for_their_own_reason(wrong, sentence, faults):
    found = faults(judge(find_exercise("10.1"), shard, wrong))
    assert sentence in found and not set(found) & {checks.PART, checks.SIZE}, found


# -- unusual and right


def from_slices_that_meet_the_shard(weights):
    """Never makes the whole row: copies what falls into this rank's part."""
    n, rank = dist.get_world_size(), dist.get_rank()
    size = -(-sum(weight.numel() for weight in weights) // n)
    mine, begin = weights[0].new_zeros(size), 0
    for weight in weights:
        low = max(begin, rank * size)
        high = min(begin + weight.numel(), (rank + 1) * size)
        if low < high:
            part = weight.flatten()[low - begin : high - begin]
            mine[low - rank * size : high - rank * size] = part
        begin += weight.numel()
    return mine


def padded_by_torch(weights):
    flat = torch.cat([weight.reshape(-1) for weight in weights])
    n = dist.get_world_size()
    row = torch.nn.functional.pad(flat, (0, -flat.numel() % n))
    return row.unflatten(0, (n, -1))[dist.get_rank()].contiguous().clone()


def by_split(slot, shapes):
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.split(slot[: sum(sizes)], sizes)
    return tuple(p.reshape(s) for p, s in zip(parts, shapes, strict=True))


def by_strides(slot, shapes):
    views, begin = [], 0
    for shape in shapes:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        views.append(slot.as_strided(shape, strides, begin))
        begin += math.prod(shape)
    return views


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (shard, unshard),
        (from_slices_that_meet_the_shard, by_split),
        (padded_by_torch, by_strides),
    ],
)
def test_any_right_way_passes(ours, theirs):
    verdict = judge(find_exercise("10.1"), ours, theirs)
    assert verdict.passed, str(verdict)
