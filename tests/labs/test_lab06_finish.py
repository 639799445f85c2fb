"""6.3: a finish that forgets the mean, a wait, a step or a parameter is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06 import reducer_checks as lab
from overlaplab_course.lab06 import reference as lab06_reference


def send_the_rest(state):
    for bucket, work in enumerate(state.works):
        if work is None:
            for param, place in state.pairs(bucket):
                place.zero_() if param.grad is None else place.copy_(param.grad)
            state.works[bucket] = dist.all_reduce(state.buffers[bucket], async_op=True)


def arm(state):
    state.missing = [len(bucket) for bucket in state.plan]
    state.works = [None] * len(state.plan)


def write_back(state, bucket, divisor):
    for param, place in state.pairs(bucket):
        param.grad = place.clone().div_(divisor)


def without_mean(state):
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        write_back(state, bucket, 1)
    arm(state)


def mean_over_two(state):
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        write_back(state, bucket, 2)
    arm(state)


def never_written_back(state):
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        state.buffers[bucket].div_(dist.get_world_size())
    arm(state)


def written_into_a_reshaped_copy(state):
    """`reshape` copies where strides differ: the mean lands in a temporary."""
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        for param, place in state.pairs(bucket):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            flat = param.grad.reshape(-1)
            flat.copy_(place.reshape(-1)).div_(dist.get_world_size())
    arm(state)


def read_before_the_wait(state):
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        write_back(state, bucket, dist.get_world_size())
        work.wait()
    arm(state)


def waits_for_the_last_only(state):
    send_the_rest(state)
    state.works[-1].wait()
    for bucket in range(len(state.plan)):
        write_back(state, bucket, dist.get_world_size())
    arm(state)


def returns_early_on_an_unused_parameter(state):
    for bucket, work in enumerate(state.works):
        if work is None:
            arm(state)
            return
        work.wait()
        write_back(state, bucket, dist.get_world_size())
    arm(state)


def skips_what_was_not_sent(state):
    for bucket, work in enumerate(state.works):
        if work is not None:
            work.wait()
            write_back(state, bucket, dist.get_world_size())
    arm(state)


def not_armed_again(state):
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        write_back(state, bucket, dist.get_world_size())


def everything_is_sent_again(state):
    send_the_rest(state)
    for work in state.works:
        work.wait()
    for param in state.params:
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
    arm(state)


def keeps_every_mean():
    kept = []

    def finish(state):
        send_the_rest(state)
        for bucket, work in enumerate(state.works):
            work.wait()
            write_back(state, bucket, dist.get_world_size())
            kept.append([param.grad for param, _ in state.pairs(bucket)])
        arm(state)

    return finish


def stops_the_cpu(state):
    """Right, and the launches of the next step come late."""
    send_the_rest(state)
    streams.synchronize()
    for bucket, work in enumerate(state.works):
        work.wait()
        write_back(state, bucket, dist.get_world_size())
    arm(state)


WRONG = {
    "stops_the_cpu": (stops_the_cpu, lab.FREE_CPU, "in synchronize"),
    "without_mean": (without_mean, lab.MEAN, "is 2)"),
    "mean_over_two": (mean_over_two, lab.MEAN, "is 1.5)"),
    "never_written_back": (never_written_back, lab.MEAN, "rank 0, step 1"),
    "written_into_a_reshaped_copy": (
        written_into_a_reshaped_copy,
        lab.TRAPS,
        "net 'channels_last': gradient of wide.weight",
    ),
    "read_before_the_wait": (read_before_the_wait, lab.SAFE, "buffer of bucket"),
    "waits_for_the_last_only": (waits_for_the_last_only, lab.WAITED, "wait"),
    "returns_early_on_an_unused_parameter": (
        returns_early_on_an_unused_parameter,
        lab.UNUSED,
        "net 'un",
    ),
    "skips_what_was_not_sent": (skips_what_was_not_sent, lab.UNUSED, "net 'un"),
    "not_armed_again": (not_armed_again, lab.AGAIN, "step 2"),
    "everything_is_sent_again": (everything_is_sent_again, lab.AGAIN, "step 1"),
    "keeps_every_mean": (keeps_every_mean(), lab.LEAK, "at the end of step 3"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_finish_is_refused_for_its_own_fault(wrong, faults):
    finish, sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("6.3"), finish))
    assert sentence in found
    assert reason in found[sentence]


HINTS = {
    without_mean: "this is the SUM over the ranks: divide by dist.get_world_size()",
    never_written_back: "`.grad` still has this rank's own gradient: write it back",
    skips_what_was_not_sent: "send zeros for what has no gradient",
    read_before_the_wait: "",
}


@pytest.mark.parametrize("wrong", HINTS, ids=lambda f: f.__name__)
def test_the_hint_names_the_fault_of_the_finish(wrong):
    verdict = judge(find_exercise("6.3"), wrong)
    assert not verdict.passed
    assert HINTS[wrong] in verdict.hint
    assert HINTS[wrong] or "SUM" not in verdict.hint


def gradients_as_views_of_the_buffer(state):
    """No copy back: .grad is the buffer."""
    send_the_rest(state)
    for bucket, work in enumerate(state.works):
        work.wait()
        state.buffers[bucket].div_(dist.get_world_size())
        for param, place in state.pairs(bucket):
            param.grad = place
    arm(state)


def foreach_and_waits_in_reverse(state):
    send_the_rest(state)
    for work in reversed(state.works):
        work.wait()
    for bucket in range(len(state.plan)):
        pairs = state.pairs(bucket)
        for param, _ in pairs:
            if param.grad is None:
                param.grad = torch.empty_like(param)
        grads = [param.grad for param, _ in pairs]
        torch._foreach_copy_(grads, [place for _, place in pairs])
        torch._foreach_div_(grads, float(dist.get_world_size()))
    arm(state)


def none_where_no_rank_used_it(state):
    """Asks the ranks who used what, and keeps None where nobody did."""
    used = torch.tensor([float(p.grad is not None) for p in state.params])
    send_the_rest(state)
    dist.all_reduce(used, async_op=True).wait()
    for bucket, work in enumerate(state.works):
        work.wait()
        for position, (param, place) in zip(
            state.plan[bucket], state.pairs(bucket), strict=True
        ):
            if param.grad is not None or used[position] > 0:
                param.grad = place / dist.get_world_size()
    arm(state)


def the_course_s_own(state):
    lab06_reference.finish(state)


RIGHT = (
    the_course_s_own,
    gradients_as_views_of_the_buffer,
    foreach_and_waits_in_reverse,
    none_where_no_rank_used_it,
)


@pytest.mark.parametrize("right", RIGHT, ids=lambda f: f.__name__)
def test_an_unusual_right_finish_passes(right):
    verdict = judge(find_exercise("6.3"), right)
    assert verdict.passed, str(verdict)
