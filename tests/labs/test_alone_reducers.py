"""Mutants of right reducers that make one promised sentence false, and no other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import broken as lab05_broken
from overlaplab_course.lab05 import reference as lab05_reference
from overlaplab_course.lab05 import repairs as lab05
from overlaplab_course.lab06 import reference as lab06_reference
from tests.labs.repairs import Reducer, first_diagnosis, second_diagnosis
from tests.labs.test_alone import NUMBER, Alone, unwaited


def mutant(make, more, hook=None):
    """What `make(model)` makes; `more(params)` comes after each of its waits."""

    class Mutant:
        def __init__(self, model):
            self.own = make(model)
            params = getattr(model, "params", None) or model.parameters()
            self.params = [p for p in params if p.requires_grad]
            for param in self.params if hook else ():
                param.register_post_accumulate_grad_hook(hook)

        def wait(self):
            self.own.wait()
            more(self.params)

    return Mutant


def nothing(params):
    pass


def scaled(params):
    for param in params:
        if param.grad is not None:
            param.grad.mul_(2)


def scaled_in_float64(params):
    scaled([p for p in params if p.dtype is torch.float64])


def sent_again(params):
    """A copy of what has been sent; nothing uses it."""
    dist.all_reduce(params[0].grad.clone())


def not_waited_for(params):
    unwaited()


def cpu_waits(params):
    streams.synchronize()


def slow(params):
    torch.ones(100, 200) @ torch.ones(200, 200)


def keeper():
    kept = []

    def keeps(params):
        kept.extend(p.grad.clone() for p in params)

    return keeps


def read_in_a_hook(param):
    param.grad.sum()


def repaired_05(place, more, said=None, hook=None):
    """The arguments of 5.6a or 5.6b with a mutant of the right repair."""
    names = ("Alder", "Birch", "Cedar", "Elm", "Fir")
    own = lab05.repair_cases(NUMBER)[place]
    classes = [getattr(lab05_broken, name) for name in names]
    right = getattr(lab05_reference, own.name)
    classes[names.index(own.name)] = mutant(right, more, hook)
    given = [(lambda model, c=c: c(model)) for c in classes]
    return (NUMBER, own.truth() if said is None else said, *given)


SAID_06 = {"6.5a": first_diagnosis, "6.5b": second_diagnosis}
ONCE_06 = "each gradient is sent once a step, in steps 1, 2 and 3"


def repaired_06(exercise, more):
    make = mutant(Reducer, more)
    return (NUMBER, SAID_06[exercise](NUMBER), make)


def one_element_more(state):
    lab06_reference.install_hooks(state)

    def hook(param):
        if param is state.params[0]:
            dist.all_reduce(torch.zeros(1, dtype=param.dtype))

    state.params[0].register_post_accumulate_grad_hook(hook)


def each_rank_in_its_own_order(state):
    """Where there are two dtypes; the ranks do not meet."""
    if len({param.dtype for param in state.params}) == 1:
        return lab06_reference.install_hooks(state)

    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        if any(state.missing):
            return
        order = list(range(len(state.plan)))
        for bucket in order[:: 1 if dist.get_rank() == 0 else -1]:
            for p, place in state.pairs(bucket):
                place.copy_(p.grad)
            work = dist.all_reduce(state.buffers[bucket], async_op=True)
            state.works[bucket] = work

    for param in state.params:
        param.register_post_accumulate_grad_hook(hook)


def reads_a_buffer_that_travels(state):
    state.buffers[0].sum()
    lab06_reference.finish(state)


def lets_the_next_pass_wait(state):
    """From its first call on, hooks wait for what travels."""
    if not hasattr(state, "stalled"):
        state.stalled = True

        def hook(param):
            for work in state.works:
                if work is not None:
                    work.wait()

        for param in state.params:
            param.register_post_accumulate_grad_hook(hook)
    lab06_reference.finish(state)


def prompt(model):
    return lab05_reference.PromptReducer(model)


def ordered(model):
    return lab05_reference.OrderedReducer(model)


OF_56 = {
    scaled: "gradients are the mean over the ranks, in every step",
    sent_again: "each gradient is sent once a step, in the same message on all ranks",
    not_waited_for: (
        "no bytes are touched by two streams at once, every message is waited for"
    ),
    cpu_waits: "the CPU waits for nothing",
    keeper(): "memory does not grow from step to step",
    slow: (
        "the step is as short as with one message per gradient, sent when it is ready"
    ),
}
REDUCERS = {
    "5.3 one is not waited for": Alone(
        "5.3", "every message is waited for", (mutant(prompt, not_waited_for),)
    ),
    "5.3 twice the mean in float64": Alone(
        "5.3",
        "also for shared, frozen and unused weights, other dtypes, gradients zeroed "
        "in place",
        (mutant(prompt, scaled_in_float64),),
    ),
    "5.4 one is not waited for": Alone(
        "5.4", "every message is waited for", (mutant(ordered, not_waited_for),)
    ),
    "5.4 read in a hook": Alone(
        "5.4",
        "no bytes are touched by two streams at once",
        (mutant(ordered, nothing, read_in_a_hook),),
    ),
    **{
        f"{exercise} {getattr(more, '__name__', '')}": Alone(
            exercise, sentence, repaired_05(place, more)
        )
        for place, exercise in enumerate(("5.6a", "5.6b"))
        for more, sentence in OF_56.items()
        if place or more is not_waited_for
    },
    "5.6b no diagnosis": Alone(
        "5.6b", "the diagnosis is right", repaired_05(1, nothing, {})
    ),
    "6.2 a byte too many": Alone(
        "6.2",
        "the bytes on the wire are those of the gradients, no more",
        (one_element_more,),
    ),
    "6.2 each rank in its own order": Alone(
        "6.2",
        "all ranks launch the same buckets in one order, whatever arrives first",
        (each_rank_in_its_own_order,),
    ),
    "6.3 read while it travels": Alone(
        "6.3",
        "no bytes are touched by two streams at once",
        (reads_a_buffer_that_travels,),
    ),
    "6.3 the next pass waits": Alone(
        "6.3", "the overlap that the hooks made is kept", (lets_the_next_pass_wait,)
    ),
    "6.5a twice the mean": Alone(
        "6.5a",
        "gradients are right on every rank, in every step",
        repaired_06("6.5a", scaled),
    ),
    "6.5a sent again": Alone("6.5a", ONCE_06, repaired_06("6.5a", sent_again)),
    "6.5a one is not waited for": Alone(
        "6.5a",
        "no bytes are touched by two streams at once",
        repaired_06("6.5a", not_waited_for),
    ),
    "6.5b sent again": Alone("6.5b", ONCE_06, repaired_06("6.5b", sent_again)),
}


@pytest.mark.parametrize("name", REDUCERS)
def test_one_sentence_is_false_and_no_other(name, faults):
    alone = REDUCERS[name]
    verdict = judge(find_exercise(alone.exercise), *alone.solution)
    assert {*faults(verdict)} == {alone.sentence}, str(verdict)
