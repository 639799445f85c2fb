"""6.2: hooks that do not overlap, send twice or send something else are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06 import reducer_checks as lab
from overlaplab_course.lab06 import reference as lab06_reference


def register(state, hook):
    for param in state.params:
        state.handles.append(param.register_post_accumulate_grad_hook(hook))


def pack(state, bucket):
    for param, place in state.pairs(bucket):
        place.copy_(param.grad)


def send(state, bucket):
    state.works[bucket] = dist.all_reduce(state.buffers[bucket], async_op=True)


def launch_in_order(state, send_bucket):
    for bucket, work in enumerate(state.works):
        if work is None and state.missing[bucket] > 0:
            return
        if work is None:
            send_bucket(state, bucket)


def pending_never_cleared(state):
    """Full for ever: from step 2 on every gradient sends its whole bucket again."""
    ready = set()

    def hook(param):
        ready.add(param)
        bucket = state.bucket_of(param)
        if all(state.params[i] in ready for i in state.plan[bucket]):
            for p, place in state.pairs(bucket):
                if p.grad is not None:
                    place.copy_(p.grad)
            send(state, bucket)

    register(state, hook)


def argument_taken_for_the_gradient(state):
    def hook(grad):
        bucket = state.bucket_of(grad)
        for param, place in state.pairs(bucket):
            if param is grad:
                place.copy_(grad)
        state.missing[bucket] -= 1
        launch_in_order(state, send)

    register(state, hook)


def launched_at_first_fill(state):
    """One gradient is there, the bucket is sent, the second is packed after that."""

    def hook(param):
        bucket = state.bucket_of(param)
        for p, place in state.pairs(bucket):
            if p is param:
                place.copy_(param.grad)
        if state.works[bucket] is None:
            send(state, bucket)

    register(state, hook)


def waits_in_the_hook(state):
    def send_and_wait(state, bucket):
        pack(state, bucket)
        send(state, bucket)
        state.works[bucket].wait()

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, send_and_wait)

    register(state, hook)


def all_launched_in_the_last_hook(state):
    def pack_and_send(state, bucket):
        pack(state, bucket)
        send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        if not any(state.missing):
            launch_in_order(state, pack_and_send)

    register(state, hook)


def in_the_order_of_arrival(state):
    def hook(param):
        bucket = state.bucket_of(param)
        state.missing[bucket] -= 1
        if state.missing[bucket] == 0:
            pack(state, bucket)
            send(state, bucket)

    register(state, hook)


def synchronous(state):
    """async_op=False: the collective runs on the backward pass's own stream."""

    def send_now(state, bucket):
        pack(state, bucket)
        dist.all_reduce(state.buffers[bucket])
        state.works[bucket] = Done()

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, send_now)

    register(state, hook)


class Done:
    def wait(self):
        pass


def one_message_a_gradient_and_the_bucket_too(state):
    def hook(param):
        dist.all_reduce(param.grad.clone(), async_op=True).wait()
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, lambda s, b: (pack(s, b), send(s, b)))

    register(state, hook)


def no_hooks(state):
    """Everything is left to the finish: the serial reducer."""


def packed_on_a_side_stream(state):
    side = streams.Stream()

    def pack_and_send(state, bucket):
        with streams.stream(side):
            pack(state, bucket)
        send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, pack_and_send)

    register(state, hook)


def reads_a_value_in_the_hook(state):
    """The CPU has nothing to do meanwhile, on a clock with free launches."""

    def hook(param):
        if param.grad.abs().max().item() > 1e9:
            print("large")
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, lambda s, b: (pack(s, b), send(s, b)))

    register(state, hook)


def waits_for_the_work_before(state):
    """Where the wire is fast the message before has ended already."""

    def send_next(state, bucket):
        if bucket:
            state.works[bucket - 1].wait()
        pack(state, bucket)
        send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, send_next)

    register(state, hook)


def takes_half_for_the_mean(state):
    """Where two ranks meet it is."""

    def send_half(state, bucket):
        pack(state, bucket)
        state.buffers[bucket] /= 2
        send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, send_half)

    register(state, hook)


WRONG = {
    reads_a_value_in_the_hook: (lab.FREE_CPU, "in hook]"),
    waits_for_the_work_before: (lab.PROMPT, "was computed only after a collective"),
    takes_half_for_the_mean: (lab.SENT, "ratio to the right value is"),
    pending_never_cleared: (lab.ONCE, "of the gradient of layers.7.weight"),
    argument_taken_for_the_gradient: (lab.ONCE, "rank 0 sent 0 bytes of the gradient"),
    launched_at_first_fill: (lab.SAFE, "buffer of bucket 0"),
    waits_in_the_hook: (lab.PROMPT, "was computed only after a collective"),
    all_launched_in_the_last_hook: (
        lab.PROMPT,
        "right gradients, no overlap: bucket 0",
    ),
    in_the_order_of_arrival: (lab.ORDER, "rank 1 in collective #"),
    synchronous: (lab.PROMPT, "was computed only after a collective"),
    one_message_a_gradient_and_the_bucket_too: (lab.ONCE, "32768 bytes"),
    no_hooks: (lab.PROMPT, "your hooks launched 0 of 4 buckets"),
    packed_on_a_side_stream: (lab.SAFE, "buffer of bucket 0"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_hooks_are_refused_for_their_own_fault(wrong, faults):
    sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("6.2"), wrong))
    assert sentence in found
    assert reason in found[sentence]


def async_op_forgotten(state):
    """all_reduce waits by itself; what it returns, None, is stored."""

    def send_now(state, bucket):
        pack(state, bucket)
        state.works[bucket] = dist.all_reduce(state.buffers[bucket])

    def hook(param):
        bucket = state.bucket_of(param)
        state.missing[bucket] -= 1
        if state.missing[bucket] == 0:
            send_now(state, bucket)

    register(state, hook)


def parameter_sent(state):
    def pack_and_send(state, bucket):
        for param, place in state.pairs(bucket):
            place.copy_(param.detach())
        send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, pack_and_send)

    register(state, hook)


def packed_before_arrival(state):
    """Each hook packs the whole bucket, of which some gradients are still None."""

    def hook(param):
        pack(state, state.bucket_of(param))

    register(state, hook)


HINTS = {
    async_op_forgotten: "without async_op=True all_reduce waits by itself",
    parameter_sent: "you sent the parameter; its gradient is `.grad`",
    packed_before_arrival: "its gradient has not arrived (.grad is None)",
    pending_never_cleared: "what tells the reducer that a bucket was launched already?",
}


@pytest.mark.parametrize("wrong", HINTS, ids=lambda f: f.__name__)
def test_the_hint_names_the_fault_of_the_hooks(wrong):
    verdict = judge(find_exercise("6.2"), wrong)
    assert not verdict.passed
    assert HINTS[wrong] in f"{verdict.hint} {verdict.error}"


def test_the_run_that_fails_is_drawn_and_its_net_explained():
    verdict = judge(find_exercise("6.2"), in_the_order_of_arrival)
    assert verdict.timeline_title == "your run on 'branches', step 1"
    assert verdict.timeline is not None
    assert verdict.timeline.step_ns != verdict.target_ns
    assert "'branches': ranks use the layers in different orders" in verdict.ran


def test_who_asks_for_the_mean_is_told_not_to_divide_again():
    asked = judge(find_exercise("6.2"), bit_masks)
    assert "you ask for the mean: do not divide again in 6.3" in str(asked)
    assert judge(find_exercise("6.2"), packed_on_arrival).note == ""


def coalesced_without_buffer(state):
    """No copy: the gradients themselves, in one grouped call."""

    def send_gradients(state, bucket):
        with dist._coalescing_manager(async_ops=True) as work:
            for position in state.plan[bucket]:
                dist.all_reduce(state.params[position].grad)
        state.buffers[bucket] = None
        state.works[bucket] = work

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, send_gradients)

    register(state, hook)


def bit_masks(state):
    """Its own bookkeeping, not state.missing; the mean asked for at the launch."""
    full = [(1 << len(bucket)) - 1 for bucket in state.plan]
    seen = [0] * len(state.plan)
    turn = [0]

    def hook(param):
        bucket = state.bucket_of(param)
        if turn[0] == len(full):
            turn[0], seen[:] = 0, [0] * len(full)
        place = [state.params[i] is param for i in state.plan[bucket]].index(True)
        seen[bucket] |= 1 << place
        while turn[0] < len(full) and seen[turn[0]] == full[turn[0]]:
            buffer = torch.cat(
                [state.params[i].grad.flatten() for i in state.plan[turn[0]]]
            )
            state.buffers[turn[0]] = buffer
            work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, async_op=True)
            state.works[turn[0]] = work
            turn[0] += 1

    register(state, hook)


def one_closure_a_bucket(state):
    """A closure for each bucket counts; the tensors are packed by a foreach."""

    def watch_bucket(bucket):

        def count(param):
            state.missing[bucket] -= 1
            if state.missing[bucket] == 0:
                launch_in_order(state, pack_and_send)

        for position in state.plan[bucket]:
            param = state.params[position]
            state.handles.append(param.register_post_accumulate_grad_hook(count))

    def pack_and_send(state, bucket):
        places, grads = zip(
            *((place, p.grad) for p, place in state.pairs(bucket)), strict=True
        )
        torch._foreach_copy_(places, grads)
        send(state, bucket)

    for bucket in range(len(state.plan)):
        watch_bucket(bucket)


def packed_on_arrival(state):
    """Each gradient is copied when it comes, the bucket sent when it is full."""

    def hook(param):
        bucket = state.bucket_of(param)
        for p, place in state.pairs(bucket):
            if p is param:
                place.copy_(param.grad)
        state.missing[bucket] -= 1
        launch_in_order(state, send)

    register(state, hook)


def packed_on_an_ordered_side_stream(state):
    side = streams.Stream()

    def pack_and_send(state, bucket):
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            pack(state, bucket)
            send(state, bucket)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        launch_in_order(state, pack_and_send)

    register(state, hook)


def the_course_s_own(state):
    lab06_reference.install_hooks(state)


RIGHT = (
    the_course_s_own,
    coalesced_without_buffer,
    bit_masks,
    one_closure_a_bucket,
    packed_on_arrival,
    packed_on_an_ordered_side_stream,
)


@pytest.mark.parametrize("right", RIGHT, ids=lambda f: f.__name__)
def test_unusual_right_hooks_pass(right):
    verdict = judge(find_exercise("6.2"), right)
    assert verdict.passed, str(verdict)
