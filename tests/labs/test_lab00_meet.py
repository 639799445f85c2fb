"""0.4: a message beside a product; whatever runs one after the other is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import checks_runs as lab00
from overlaplab_course.lab00.given import run_step

# Right


def in_four_lines(x, a):
    work = dist.all_reduce(x, async_op=True)
    product = a @ a
    work.wait()
    return product + x


def sums_a_copy(x, a):
    total = x.clone()
    work = dist.all_reduce(total, async_op=True)
    product = torch.mm(a, a)
    work.wait()
    return total.add_(product)


def product_on_another_stream(x, a):
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        product = a @ a
    dist.all_reduce(x)
    streams.current_stream().wait_stream(side)
    return product + x


def in_two_halves(x, a):
    works = [dist.all_reduce(half, async_op=True) for half in x.chunk(2)]
    product = a @ a
    for work in reversed(works):
        work.wait()
    return product + x


RIGHT = (
    in_four_lines,
    sums_a_copy,
    product_on_another_stream,
    in_two_halves,
)


@pytest.mark.parametrize("step", RIGHT, ids=lambda f: f.__name__)
def test_a_message_beside_the_product_passes(step):
    verdict = judge(find_exercise("0.4"), step)
    assert verdict.passed, str(verdict)
    assert verdict.timeline is not None and verdict.target_ns is not None


# Wrong


def blocking(x, a):
    dist.all_reduce(x)
    return a @ a + x


def waits_at_once(x, a):
    dist.all_reduce(x, async_op=True).wait()
    return a @ a + x


def product_first(x, a):
    product = a @ a
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return product + x


def never_waits(x, a):
    dist.all_reduce(x, async_op=True)
    return a @ a + x


def waits_too_late(x, a):
    work = dist.all_reduce(x, async_op=True)
    answer = a @ a + x
    work.wait()
    return answer


def sums_the_answer(x, a):
    answer = a @ a + x
    dist.all_reduce(answer)
    return answer


def takes_the_mean(x, a):
    work = dist.all_reduce(x, async_op=True)
    product = a @ a
    work.wait()
    return product + x / dist.get_world_size()


def adds_its_own(x, a):
    total = x.clone()
    work = dist.all_reduce(total, async_op=True)
    product = a @ a
    work.wait()
    return product + x


def sends_everything(x, a):
    both = torch.cat([x, a])
    work = dist.all_reduce(both, async_op=True)
    product = a @ a
    work.wait()
    return product + both[: x.shape[0]]


def for_two_ranks_only(x, a):
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    product = a @ a
    work.wait()
    return product + 2 * x


WRONG = {
    blocking: (lab00.BESIDE, "0 of 125 us", "waits too"),
    waits_at_once: (lab00.BESIDE, "0 of 125 us", "waits too"),
    product_first: (lab00.BESIDE, "0 of 125 us", "which line should come first"),
    never_waits: (lab00.WAITED, "nobody waits for all_reduce", ""),
    waits_too_late: (lab00.WAITED, "hazard", ""),
    sums_the_answer: (lab00.VALUES, "wrong", ""),
    takes_the_mean: (lab00.VALUES, "wrong", "the mean"),
    adds_its_own: (lab00.VALUES, "wrong", "own x in there"),
    sends_everything: (lab00.ONE_SUM, "2097152 bytes", ""),
    for_two_ranks_only: (lab00.VALUES, "on 3 ranks", ""),
}


@pytest.mark.parametrize("step", WRONG, ids=lambda f: f.__name__)
def test_another_step_is_refused_for_its_reason(step, faults):
    sentence, words, hint = WRONG[step]
    verdict = judge(find_exercise("0.4"), step)
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert words in found[sentence]
    assert hint in verdict.hint


def test_a_sum_that_is_used_too_early_is_described_once_and_without_luck(faults):
    verdict = judge(find_exercise("0.4"), waits_too_late)
    described = faults(verdict)[lab00.WAITED]
    assert "the x that is not summed" in described
    assert "us before it is used, but nothing makes it so" in described
    assert "by luck" not in described
    assert "element" not in str(verdict)


def test_a_result_of_another_shape_is_reported():
    verdict = judge(find_exercise("0.4"), lambda x, a: in_four_lines(x, a)[:3])
    assert "the shape is (3, 512), not (512, 512)" in verdict.hint


def test_what_was_not_reached_is_not_called_right():
    described = str(judge(find_exercise("0.4"), adds_its_own))
    assert f"? {lab00.BESIDE}: not judged yet" in described
    assert f"+ {lab00.BESIDE}" not in described


def test_a_rank_that_stays_away_is_named():
    def only_rank_zero(x, a):
        if dist.get_rank() == 0:
            dist.all_reduce(x)
        return a @ a + x

    verdict = judge(find_exercise("0.4"), only_rank_zero)
    assert "rank 0 waits in all_reduce" in verdict.error


def test_what_returns_no_tensor_is_reported():
    verdict = judge(find_exercise("0.4"), lambda x, a: None)
    assert "step returned NoneType; expected a tensor" in str(verdict)


def test_the_slack_lets_a_copy_pass_and_nothing_serial():
    beside = run_step(in_four_lines).timeline.end_ns
    copied = run_step(sums_a_copy).timeline.end_ns
    serial = run_step(product_first).timeline.end_ns
    assert beside < copied < lab00.SLACK * beside < 0.9 * serial
