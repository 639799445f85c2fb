"""6.2a: three lines that send a full bucket, where all ranks fill them in one order."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06 import reducer_checks as lab
from tests.labs.test_lab06_hook import (
    coalesced_without_buffer,
    in_the_order_of_arrival,
    no_hooks,
    pack,
    register,
    send,
)


def hooks(full):
    """The lesson's hook, and `full(state, bucket)` in the place of the three lines."""

    def install_simple_hooks(state):
        def hook(param):
            bucket = state.bucket_of(param)
            state.missing[bucket] -= 1
            if state.missing[bucket] == 0:
                full(state, bucket)

        register(state, hook)

    return install_simple_hooks


def never_packed(state, bucket):
    send(state, bucket)


def sent_before_it_is_packed(state, bucket):
    send(state, bucket)
    pack(state, bucket)


def sent_twice(state, bucket):
    pack(state, bucket)
    dist.all_reduce(state.buffers[bucket].clone())
    send(state, bucket)


def packed_aside(state, bucket):
    with streams.stream(streams.Stream()):
        pack(state, bucket)
    send(state, bucket)


def halved(state, bucket):
    """The mean where two ranks meet, but no other number of them."""
    pack(state, bucket)
    state.buffers[bucket] /= 2
    send(state, bucket)


def work_not_kept(state, bucket):
    pack(state, bucket)
    dist.all_reduce(state.buffers[bucket], async_op=True)


def blocking(state, bucket):
    pack(state, bucket)
    work = dist.all_reduce(state.buffers[bucket], async_op=True)
    work.wait()
    state.works[bucket] = work


def the_cpu_waits(state, bucket):
    pack(state, bucket)
    send(state, bucket)
    streams.current_stream().synchronize()


WRONG = {
    never_packed: (lab.SENT, "gradient of layers.0.weight on rank 0, step 1"),
    halved: (lab.SENT, "ratio to the right value is"),
    packed_aside: (lab.SAFE, "buffer of bucket 0"),
    sent_before_it_is_packed: (lab.SAFE, "buffer of bucket 0"),
    sent_twice: (lab.ONCE, "bytes of the gradient of"),
    work_not_kept: (lab.ONCE, "works[b] is None after your launch"),
    blocking: (lab.PROMPT, "was computed only after a collective"),
    the_cpu_waits: (lab.FREE_CPU, "synchronize"),
}


@pytest.mark.parametrize("full", WRONG, ids=lambda f: f.__name__)
def test_wrong_lines_are_refused_for_their_own_fault(full, faults):
    sentence, reason = WRONG[full]
    found = faults(judge(find_exercise("6.2a"), hooks(full)))
    assert reason in found[sentence]


def test_a_reducer_that_leaves_all_to_the_finish_is_refused(faults):
    assert list(faults(judge(find_exercise("6.2a"), no_hooks))) == [lab.PROMPT]


def asks_for_the_mean(state, bucket):
    pack(state, bucket)
    buffer = state.buffers[bucket]
    state.works[bucket] = dist.all_reduce(buffer, dist.ReduceOp.AVG, async_op=True)


@pytest.mark.parametrize(
    "right",
    [in_the_order_of_arrival, coalesced_without_buffer, hooks(asks_for_the_mean)],
    ids=lambda f: f.__name__,
)
def test_a_right_hook_passes_however_it_is_written(right):
    verdict = judge(find_exercise("6.2a"), right)
    assert verdict.passed, str(verdict)
