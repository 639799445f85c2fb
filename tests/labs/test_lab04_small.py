"""4.5: many messages, casts and padding are refused; any way of joining passes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab04 import checks


def by_dtype(tensors):
    for dtype in (torch.float32, torch.int64):
        yield [t for t in tensors if t.dtype is dtype]


def cut(tensors, flat):
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def joined(tensors, dtype=None, pad=0):
    flat = torch.cat([t.reshape(-1) for t in tensors]).to(dtype or tensors[0].dtype)
    return torch.cat([flat, flat.new_zeros(pad)]) if pad else flat


def one_by_one(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)


def all_at_once_and_asynchronous(tensors):
    """In flight together; they follow one another on the wire."""
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def cast_to_float32(tensors):
    flat = joined([t.float() for t in tensors])
    dist.all_reduce(flat)
    cut(tensors, flat)


def cast_to_float64(tensors):
    """Exact, and twice as many bytes."""
    flat = joined([t.double() for t in tensors])
    dist.all_reduce(flat)
    cut(tensors, flat)


def padded_to_a_megabyte(tensors):
    for chosen in by_dtype(tensors):
        flat = joined(chosen, pad=2**18)
        dist.all_reduce(flat)
        cut(chosen, flat)


def never_cut(tensors):
    for chosen in by_dtype(tensors):
        dist.all_reduce(joined(chosen))


def one_group_of_two_dtypes(tensors):
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()


def forgets_to_wait(tensors):
    for chosen in by_dtype(tensors):
        with dist._coalescing_manager(async_ops=True):
            for tensor in chosen:
                dist.all_reduce(tensor)


def cut_before_the_wait(tensors):
    for chosen in by_dtype(tensors):
        flat = joined(chosen)
        work = dist.all_reduce(flat, async_op=True)
        cut(chosen, flat)
        work.wait()


def gathered_and_summed(tensors):
    """One message a dtype, and all of everybody's bytes to everybody."""
    for chosen in by_dtype(tensors):
        flat = joined(chosen)
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)
        cut(chosen, torch.stack(parts).sum(0))


def over_a_set_of_dtypes(tensors):
    """In another process a set has another order."""
    for dtype in {tensor.dtype for tensor in tensors}:
        chosen = [t for t in tensors if t.dtype is dtype]
        together = joined(chosen)
        dist.all_reduce(together)
        cut(chosen, together)


def reads_a_value_on_the_cpu(tensors):
    flat(tensors)
    if tensors[0].sum().item() > 1e9:
        print("large")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (over_a_set_of_dtypes, checks.DTYPES),
        (reads_a_value_on_the_cpu, checks.FREE_CPU),
        (one_by_one, checks.LATENCY),
        (all_at_once_and_asynchronous, checks.LATENCY),
        (cast_to_float32, checks.SUMS),
        (cast_to_float64, checks.NO_MORE_BYTES),
        (padded_to_a_megabyte, checks.NO_MORE_BYTES),
        (gathered_and_summed, checks.NO_MORE_BYTES),
        (never_cut, checks.SUMS),
        (one_group_of_two_dtypes, checks.DTYPES),
        (forgets_to_wait, checks.NO_EARLY_READ),
        (cut_before_the_wait, checks.NO_EARLY_READ),
    ],
)
def test_a_wrong_sum_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.5"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def flat(tensors):
    for chosen in by_dtype(tensors):
        together = joined(chosen)
        dist.all_reduce(together)
        cut(chosen, together)


def over_sorted_dtypes(tensors):
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        chosen = [t for t in tensors if t.dtype is dtype]
        together = joined(chosen)
        dist.all_reduce(together)
        cut(chosen, together)


def group_calls_without_copies(tensors):
    for chosen in by_dtype(tensors):
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in chosen:
                dist.all_reduce(tensor)
        manager.wait()


def both_dtypes_in_flight(tensors):
    sent = []
    for chosen in by_dtype(tensors):
        together = joined(chosen)
        work = dist.all_reduce(together, async_op=True)
        sent.append((chosen, together, work))
    for chosen, together, work in reversed(sent):
        work.wait()
        cut(chosen, together)


def on_a_stream_of_its_own(tensors):
    current, side = streams.current_stream(), streams.Stream()
    side.wait_stream(current)
    with streams.stream(side):
        flat(tensors)
    current.wait_stream(side)


@pytest.mark.parametrize(
    "right",
    [
        flat,
        over_sorted_dtypes,
        group_calls_without_copies,
        both_dtypes_in_flight,
        on_a_stream_of_its_own,
    ],
)
def test_an_unusual_sum_passes(right):
    verdict = judge(find_exercise("4.5"), right)
    assert verdict.passed, str(verdict)
