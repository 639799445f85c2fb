"""4.8: what hides the fault, or pays for the repair with the overlap, is refused."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab04 import broken, checks_extra, extras, reference

NUMBER = 4


@lru_cache(maxsize=2)
def diagnosis_a(number=NUMBER):
    own = extras.repair_case(number)
    return {
        "kind": "read before the wait",
        "messages": len(own.widths),
        "luck_us": extras.luck_us(own.play_blocks(broken.blocks)),
    }


DIAGNOSIS_B = {
    "kind": "sent again",
    "messages_in_flight": 3,
    "weight_of_the_first": 16,
}


def waits_at_once(x, weights):
    for w in weights:
        part = x @ w["in"]
        dist.all_reduce(part, async_op=True).wait()
        side = (x @ w["side"]).relu() @ w["back"]
        x = x + part + side
    return x


def blocks_the_cpu(x, weights):
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        while not work.is_completed():
            pass
        side = (x @ w["side"]).relu() @ w["back"]
        x = x + part + side
    return x


def waits_at_the_end_of_all(x, weights):
    works = []
    for w in weights:
        part = x @ w["in"]
        works.append(dist.all_reduce(part, async_op=True))
        x = x + part + (x @ w["side"]).relu() @ w["back"]
    for work in works:
        work.wait()
    return x


def adds_a_copy_of_the_half(x, weights):
    """The clone is read too early, too."""
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        copy = part.clone()
        side = (x @ w["side"]).relu() @ w["back"]
        work.wait()
        x = x + copy + side
    return x


def adds_what_was_not_summed(x, weights):
    for w in weights:
        part = x @ w["in"]
        own = part.clone()
        work = dist.all_reduce(part, async_op=True)
        side = (x @ w["side"]).relu() @ w["back"]
        work.wait()
        x = x + own + side
    return x


def waits_on_another_stream(x, weights):
    other = streams.Stream()
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        side = (x @ w["side"]).relu() @ w["back"]
        with streams.stream(other):
            work.wait()
        x = x + part + side
    return x


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (broken.blocks, checks_extra.SAFE),
        (waits_at_once, checks_extra.KEPT),
        (blocks_the_cpu, checks_extra.KEPT),
        (waits_at_the_end_of_all, checks_extra.SAFE),
        (adds_a_copy_of_the_half, checks_extra.SAFE),
        (adds_what_was_not_summed, checks_extra.VALUES),
        (waits_on_another_stream, checks_extra.SAFE),
    ],
)
def test_a_wrong_repair_of_the_blocks_is_refused(wrong, sentence, faults):
    def blocks(x, weights):
        return wrong(x, weights)

    verdict = judge(find_exercise("4.8a"), NUMBER, diagnosis_a(), blocks)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def adds_the_side_branch_first(x, weights):
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        x = x + (x @ w["side"]).relu() @ w["back"]
        work.wait()
        x = x + part
    return x


def branches_on_two_streams(x, weights):
    other, current = streams.Stream(), streams.current_stream()
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        other.wait_stream(current)
        with streams.stream(other):
            side = (x @ w["side"]).relu() @ w["back"]
        work.wait()
        current.wait_stream(other)
        x = x + part + side
    return x


@pytest.mark.parametrize("right", [adds_the_side_branch_first, branches_on_two_streams])
def test_an_unusual_repair_of_the_blocks_passes(right):
    verdict = judge(find_exercise("4.8a"), NUMBER, diagnosis_a(), right)
    assert verdict.passed, str(verdict)


def test_a_neighbours_diagnosis_is_refused(faults):
    def blocks(x, weights):
        return reference.blocks(x, weights)

    neighbour = next(
        n
        for n in range(20)
        if extras.repair_case(n).widths != extras.repair_case(NUMBER).widths
    )
    verdict = judge(find_exercise("4.8a"), NUMBER, diagnosis_a(neighbour), blocks)
    assert list(faults(verdict)) == [checks_extra.DIAGNOSIS]


def sends_each_micro_batch(micros):
    """Right, with a message for each: three times the bytes."""
    parts, works = [], []
    for a, b in micros:
        parts.append(a @ b)
        works.append(dist.all_reduce(parts[-1], async_op=True))
    for work in works:
        work.wait()
    return sum(parts)


def waits_after_each(micros):
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad += a @ b
        dist.all_reduce(grad, async_op=True).wait()
    return grad


def divides_by_the_ranks(micros):
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad = grad + a @ b
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grad


def sends_the_last_micro_batch_only(micros):
    grad = torch.zeros(250, 400)
    for a, b in micros:
        product = a @ b
        grad += product
    dist.all_reduce(product)
    return grad - micros[-1][0] @ micros[-1][1] + product


def blocks_the_cpu_after_each(micros):
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad += a @ b
        streams.synchronize()
    dist.all_reduce(grad)
    return grad


def reads_before_the_wait(micros):
    grad = torch.zeros(250, 400)
    for a, b in micros:
        grad += a @ b
    work = dist.all_reduce(grad, async_op=True)
    result = grad.clone()
    work.wait()
    return result


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (broken.accumulate, checks_extra.SAFE),
        (sends_each_micro_batch, checks_extra.BYTES),
        (waits_after_each, checks_extra.VALUES),
        (divides_by_the_ranks, checks_extra.VALUES),
        (sends_the_last_micro_batch_only, checks_extra.VALUES),
        (blocks_the_cpu_after_each, checks_extra.SHORT),
        (reads_before_the_wait, checks_extra.SAFE),
    ],
)
def test_a_wrong_repair_of_the_accumulation_is_refused(wrong, sentence, faults):
    def accumulate(micros):
        return wrong(micros)

    verdict = judge(find_exercise("4.8b"), NUMBER, DIAGNOSIS_B, accumulate)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def one_product_for_all(micros):
    """A sum of products is the product of what is joined."""
    left = torch.cat([a for a, _ in micros], dim=1)
    grad = left @ torch.cat([b for _, b in micros])
    dist.all_reduce(grad)
    return grad


def reduced_in_two_halves(micros):
    grad = sum(a @ b for a, b in micros)
    top, bottom = grad[:125], grad[125:]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(top)
        dist.all_reduce(bottom)
    manager.wait()
    return grad


@pytest.mark.parametrize("right", [one_product_for_all, reduced_in_two_halves])
def test_an_unusual_repair_of_the_accumulation_passes(right):
    verdict = judge(find_exercise("4.8b"), NUMBER, DIAGNOSIS_B, right)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "said",
    [
        {**DIAGNOSIS_B, "weight_of_the_first": 3},
        {**DIAGNOSIS_B, "kind": "read before the wait"},
        {**DIAGNOSIS_B, "messages_in_flight": 1},
        {"kind": None, "messages_in_flight": None, "weight_of_the_first": None},
    ],
)
def test_a_wrong_diagnosis_of_the_accumulation_is_refused(said, faults):
    def accumulate(micros):
        return reference.accumulate(micros)

    verdict = judge(find_exercise("4.8b"), NUMBER, said, accumulate)
    assert list(faults(verdict)) == [checks_extra.DIAGNOSIS]
