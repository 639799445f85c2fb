"""8.4: two sets of weights are one model, and neither waits for the other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab08 as lab
from overlaplab_course.lab08 import broken
from overlaplab_course.lab08 import weights_checks as checks

NUMBER = 4


def diagnosis(number=NUMBER, **other):
    case = lab.two_sets(number)
    said = {"kind": "drift", "gradients": case.num_gradients}
    return {**said, "first_missing": case.first_missing, **other}


def grade(program, number=NUMBER, said=None):
    said = diagnosis(number) if said is None else said
    return judge(find_exercise("8.4"), number, said, program)


def training(update):
    """The program with another update of `back`."""

    def train(front, back, batches, gradient):
        main, updating = streams.current_stream(), streams.Stream()
        rate = lab.RATE / dist.get_world_size()
        sent = None
        for batch in batches:
            updating.wait_stream(main)
            if sent is not None:
                grad, work = sent
                with streams.stream(updating):
                    work.wait()
                    update(front, back, grad, rate)
            fresh = gradient(front, batch)
            message = dist.all_reduce(fresh, async_op=True)
            main.wait_stream(updating)
            if sent is not None:
                front, back = back, front
            sent = fresh, message
        sent[1].wait()
        return front

    return train


# Copies, so that they are a learner's and not the package's own.
as_given = training(lambda front, back, grad, rate: back.sub_(grad, alpha=rate))
in_the_front = training(lambda front, back, grad, rate: front.sub_(grad, alpha=rate))
half_of_the_sum = training(
    lambda front, back, grad, _: torch.sub(front, grad, alpha=lab.RATE / 2, out=back)
)
the_sum = training(
    lambda front, back, grad, rate: torch.sub(front, grad, alpha=lab.RATE, out=back)
)


@training
def in_both(front, back, grad, rate):
    front.sub_(grad, alpha=rate)
    back.sub_(grad, alpha=rate)


@training
def the_cpu_copies(front, back, grad, rate):
    torch.sub(front, grad, alpha=rate, out=back)
    streams.synchronize()


def synchronized_at_the_end(front, back, batches, gradient):
    """Nothing gets longer by it; the caller's CPU could have gone on."""
    weights = training(late)(front, back, batches, gradient)
    streams.synchronize()
    return weights


def undelayed(front, back, batches, gradient):
    rate = lab.RATE / dist.get_world_size()
    for batch in batches:
        grad = gradient(front, batch)
        dist.all_reduce(grad)
        torch.sub(front, grad, alpha=rate, out=back)
        front, back = back, front
    return front


def waits_before_the_gradient(front, back, batches, gradient):
    """One set, late, and the message in line."""
    rate, grad = lab.RATE / dist.get_world_size(), None
    for batch in batches:
        fresh = gradient(front, batch)
        dist.all_reduce(fresh)
        if grad is not None:
            torch.sub(front, grad, alpha=rate, out=back)
            front, back = back, front
        grad = fresh
    return front


def nobody_waits_for_the_readers(front, back, batches, gradient):
    main, updating = streams.current_stream(), streams.Stream()
    rate, sent = lab.RATE / dist.get_world_size(), None
    for batch in batches:
        fresh = gradient(front, batch)
        message = dist.all_reduce(fresh, async_op=True)
        if sent is not None:
            with streams.stream(updating):
                sent[1].wait()
                torch.sub(front, sent[0], alpha=rate, out=back)
                front, back = back, front
        sent = fresh, message
    sent[1].wait()
    main.wait_stream(updating)
    return front


def one_update_more(front, back, batches, gradient):
    return training(late)(front, back, [*batches, batches[-1]], gradient)


def late(front, back, grad, rate):
    torch.sub(front, grad, alpha=rate, out=back)


WRONG = {
    "as_given": (as_given, checks.ONE_MODEL, "rank 0 returns"),
    "in_the_front": (in_the_front, checks.SAFE, "set A"),
    "in_both": (in_both, checks.SAFE, "set A"),
    "the_sum": (the_sum, checks.ONE_MODEL, "rank 0 returns"),
    "half_of_the_sum": (half_of_the_sum, checks.ONE_MODEL, "rank 0 returns"),
    "undelayed": (undelayed, checks.ONE_MODEL, "rank 0 returns"),
    "one_update_more": (one_update_more, checks.ONE_MODEL, "rank 0 returns"),
    "the_cpu_copies": (the_cpu_copies, checks.FREE_CPU, "synchronize"),
    "synchronized": (synchronized_at_the_end, checks.FREE_CPU, "synchronize"),
    "in_line": (waits_before_the_gradient, checks.KEPT, "ms"),
    "no_edges": (nobody_waits_for_the_readers, checks.SAFE, "hazard"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_repair_is_refused_for_its_own_reason(wrong, faults):
    program, sentence, reason = WRONG[wrong]
    found = faults(grade(program))
    assert sentence in found
    assert reason in found[sentence]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, "not filled in: kind, gradients, first_missing"),
        (diagnosis(kind="race"), "kind: 'race'"),
        (diagnosis(kind="stale"), "kind: 'stale'"),
        (diagnosis(gradients=lab.two_sets(NUMBER).num_batches), "gradients"),
        (diagnosis(first_missing=5), "first_missing: 5"),
    ],
)
def test_a_wrong_diagnosis_is_refused(said, told, faults):
    found = faults(grade(training(late), said=said))
    assert told in found[checks.DIAGNOSIS]
    assert list(found) == [checks.DIAGNOSIS]


@pytest.mark.parametrize("number", range(8))
def test_the_diagnosis_is_what_the_program_does(number):
    case = lab.two_sets(number)
    lines = case.play(broken.train_two).story().splitlines()
    assert "=" not in lines[-1]  # the last gradient is never used
    written = [line.split("; ")[1].split(" =")[0] for line in lines[:-1]]
    own = [batch for batch, name in enumerate(written) if name == written[-1]]
    assert len(own) == case.num_gradients
    missing = set(range(case.num_batches - 1)) - set(own)
    assert min(missing) == case.first_missing


@training
def by_copy(front, back, grad, rate):
    """All weights are copied: right, and the cost is seen where memory is slow."""
    back.copy_(front)
    back.sub_(grad, alpha=rate)


@training
def out_of_place(front, back, grad, rate):
    back.copy_(front - rate * grad)


def each_set_gets_each_gradient(front, back, batches, gradient):
    """The back catches up with the gradient that it lacks, then takes the new one."""
    main, updating = streams.current_stream(), streams.Stream()
    rate, sent, before = lab.RATE / dist.get_world_size(), None, None
    for batch in batches:
        updating.wait_stream(main)
        if sent is not None:
            with streams.stream(updating):
                sent[1].wait()
                for grad in (before, sent[0]):
                    if grad is not None:
                        back.sub_(grad, alpha=rate)
        fresh = gradient(front, batch)
        message = dist.all_reduce(fresh, async_op=True)
        main.wait_stream(updating)
        if sent is not None:
            before, front, back = sent[0], back, front
        sent = fresh, message
    sent[1].wait()
    return front


@pytest.mark.parametrize(
    "right", [training(late), by_copy, out_of_place, each_set_gets_each_gradient]
)
def test_an_unusual_repair_passes(right):
    for number in (NUMBER, 3):
        verdict = grade(right, number)
        assert verdict.passed, str(verdict)
