"""Answers that numpy made are refused in every exercise that grades a run's values.

They are right, and on the virtual clock they cost nothing: each was accepted, or might
have been, before results had to come from operators of the record.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab04
from overlaplab_course.lab00 import checks_runs as lab00
from overlaplab_course.lab00 import reference as lab00_reference
from overlaplab_course.lab03 import feed_checks as lab03
from overlaplab_course.lab04 import checks as lab04_checks
from overlaplab_course.lab06 import reducer_checks as lab06
from overlaplab_course.lab08 import feed_checks as lab08
from overlaplab_course.lab08 import late_checks as lab08_late

NOT_RECORDED = "bytes that no operator of the record wrote"


def on_host(array):
    return torch.from_numpy(np.ascontiguousarray(array))


def summed(array):
    """Over the ranks; the message itself is real."""
    tensor = on_host(array)
    dist.all_reduce(tensor)
    return tensor.numpy()


def two_sums(x, w):
    x, w = x.numpy(), {name: matrix.numpy() for name, matrix in w.items()}
    a, b = summed(x @ w["a"]), summed(x @ w["b"])
    return on_host(a @ w["d"] + b @ w["e"] + x @ w["c"])


def experts(x, w):
    x, w = x.numpy(), {name: matrix.numpy() for name, matrix in w.items()}
    routed, gate = summed(x @ w["routed_in"]), summed(x @ w["gate"])
    shared = np.maximum(x @ w["shared_in"], 0) @ w["shared_out"]
    return on_host((routed @ w["routed_out"] + shared) * gate)


def average_gradients(layers, k):
    grads = []
    for layer in layers:
        message = lab04.backward(layer).float()
        dist.all_reduce(message)
        mean = message.numpy() / dist.get_world_size()
        del message
        grads.append(on_host(mean).bfloat16())
    return grads


def sum_all(tensors):
    for dtype in (torch.float32, torch.int64):
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = summed(np.concatenate([t.numpy().reshape(-1) for t in chosen]))
        start = 0
        for tensor in chosen:
            part = flat[start : start + tensor.numel()]
            tensor.copy_(on_host(part).view_as(tensor))
            start += tensor.numel()


def all_reduce_in_two(tensor):
    flat = tensor.reshape(-1)
    size = -(-flat.numel() // dist.get_world_size())
    padded = np.zeros(size * dist.get_world_size(), dtype=np.float32)
    padded[: flat.numel()] = flat.numpy()
    whole, part = on_host(padded), tensor.new_empty(size)
    lab04.reduce_scatter(part, whole)
    lab04.all_gather(whole, part)
    tensor.copy_(on_host(whole.numpy()[: flat.numel()]).view_as(tensor))


def step_of_two_ranks(x, a):
    a = a.numpy()
    work = dist.all_reduce(x, async_op=True)
    product = a @ a
    work.wait()
    return on_host(product + x.numpy())


def feed(samples, step):
    """A sample becomes the device's without a copy."""
    for sample in samples:
        step(torch.from_numpy(sample.numpy()))


def finish(state):
    for bucket, work in enumerate(state.works):
        if work is None:
            for param, place in state.pairs(bucket):
                place.zero_() if param.grad is None else place.copy_(param.grad)
            buffer = state.buffers[bucket]
            state.works[bucket] = dist.all_reduce(buffer, async_op=True)
    for bucket, work in enumerate(state.works):
        work.wait()
        for param, place in state.pairs(bucket):
            mean = place.numpy() / np.float32(dist.get_world_size())
            param.grad = on_host(mean).view_as(param)
    state.missing = [len(bucket) for bucket in state.plan]
    state.works = [None] * len(state.plan)


def prefetch(loader, *slots):
    for batch in loader:
        yield tuple(torch.from_numpy(tensor.numpy()) for tensor in batch)


class LateReducer:
    """One step late; the mean is numpy's."""

    def __init__(self, model):
        self.parameters, self.travelling = list(model.parameters()), None

    def wait(self):
        grads = [p.grad for p in self.parameters]
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        self.flush()
        self.travelling = grads, works

    def flush(self):
        there_was_one = self.travelling is not None
        for i, parameter in enumerate(self.parameters):
            parameter.grad = None
            if self.travelling is not None:
                self.travelling[1][i].wait()
                total = self.travelling[0][i].numpy()
                parameter.grad = on_host(total / np.float32(dist.get_world_size()))
        self.travelling = None
        return there_was_one


@pytest.mark.parametrize(
    ("number", "solution", "sentence"),
    [
        ("0.4", step_of_two_ranks, lab00.VALUES),
        ("3.4", feed, lab03.OWN_BATCH),
        ("4.1", all_reduce_in_two, lab04_checks.IN_PLACE),
        ("4.2", two_sums, lab04_checks.VALUES),
        ("4.3", experts, lab04_checks.VALUES),
        ("4.4", average_gradients, lab04_checks.MEANS),
        ("4.5", sum_all, lab04_checks.SUMS),
        ("6.3", finish, lab06.MEAN),
        ("8.1", prefetch, lab08.OWN),
        ("8.2", prefetch, lab08.OWN_SLOT),
        ("8.3", LateReducer, lab08_late.LATE),
    ],
)
def test_numpy_is_not_the_record(number, solution, sentence, faults):
    wrong = faults(judge(find_exercise(number), solution))
    assert sentence in wrong and NOT_RECORDED in wrong[sentence], wrong


def train(model, batches):
    """The given loop's weights, computed somewhere else."""
    losses, worst = lab00_reference.train(model, batches)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(on_host(param.detach().numpy()))
    return losses, worst


def test_weights_brought_from_the_host_are_refused(faults):
    wrong = faults(judge(find_exercise("0.3"), train))
    assert NOT_RECORDED in wrong[lab00.WEIGHTS]
