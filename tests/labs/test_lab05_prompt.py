"""5.3: reducers that are wrong, hide nothing or send something else are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import reducer_checks as lab
from overlaplab_course.lab05 import reference


class Reducer:
    """A right one, of parts that the wrong ones change; not one of the package's."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.sent = []
        self.begin()
        for param in self.params:
            self.register(param)

    def begin(self):
        """A chance for the variants."""

    def register(self, param):
        param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.sent.append((param, dist.all_reduce(param.grad, async_op=True)))

    def wait(self):
        for param, work in self.sent:
            work.wait()
            param.grad /= dist.get_world_size()
        self.sent.clear()


class SumOnly(Reducer):
    def wait(self):
        for _, work in self.sent:
            work.wait()
        self.sent.clear()


class HalvedForTwoRanks(Reducer):
    """Right on two ranks."""

    def wait(self):
        for param, work in self.sent:
            work.wait()
            param.grad /= 2
        self.sent.clear()


class ArgumentTakenForTheGradient(Reducer):
    def hook(self, param):
        with torch.no_grad():
            work = dist.all_reduce(param.detach(), async_op=True)
        self.sent.append((param, work))


class SendsAClone(Reducer):
    def hook(self, param):
        work = dist.all_reduce(param.grad.clone(), async_op=True)
        self.sent.append((param, work))


class SendsTheWeights(Reducer):
    """A copy of the parameter is averaged and becomes the gradient."""

    def hook(self, param):
        param.grad = param.detach().clone()
        super().hook(param)


class AllAtTheEnd(Reducer):
    def hook(self, param):
        pass

    def wait(self):
        for param in self.params:
            if param.grad is not None:
                super().hook(param)
        super().wait()


class AllInTheLastHook(Reducer):
    def begin(self):
        self.missing = len(self.params)

    def hook(self, param):
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.params)
            for one in self.params:
                super().hook(one)


class WaitsInTheHook(Reducer):
    def hook(self, param):
        super().hook(param)
        self.sent[-1][1].wait()


class NotAsynchronous(Reducer):
    def hook(self, param):
        dist.all_reduce(param.grad)

    def wait(self):
        for param in self.params:
            if param.grad is not None:
                param.grad /= dist.get_world_size()


class NeverWaits(Reducer):
    def wait(self):
        for param, _ in self.sent:
            param.grad /= dist.get_world_size()
        self.sent.clear()


class DividesBeforeTheWait(Reducer):
    def wait(self):
        for param, work in self.sent:
            param.grad /= dist.get_world_size()
            work.wait()
        self.sent.clear()


class NeverCleared(Reducer):
    """From step 2 on each gradient is divided again, at an old work's turn."""

    def wait(self):
        for param, work in self.sent:
            work.wait()
            param.grad /= dist.get_world_size()


class BeforeAccumulation(Reducer):
    def register(self, param):
        param.register_hook(lambda grad: self.send(param, grad))

    def send(self, param, grad):
        self.sent.append((param, dist.all_reduce(grad, async_op=True)))


class ReadsANumberInTheHook(Reducer):
    def hook(self, param):
        if param.grad.abs().sum().item() >= 0:
            super().hook(param)


class StopsTheCpu(Reducer):
    def wait(self):
        super().wait()
        streams.synchronize()


class KeepsWhatItSent(Reducer):
    def begin(self):
        self.history = []

    def hook(self, param):
        self.history.append(param.grad.clone())
        super().hook(param)


class FrozenOnesToo(Reducer):
    def __init__(self, model):
        self.sent = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.hook)


class EverythingHasAGradient(Reducer):
    """Divides what the loss never used."""

    def wait(self):
        for _, work in self.sent:
            work.wait()
        for param in self.params:
            param.grad /= dist.get_world_size()
        self.sent.clear()


class FrontLayersFirst(Reducer):
    def begin(self):
        self.arrived = set()

    def hook(self, param):
        self.arrived.add(param)
        for one in self.params[len(self.sent) :]:
            if one not in self.arrived:
                return
            super().hook(one)

    def wait(self):
        super().wait()
        self.arrived.clear()


class HooksOnEachModule(Reducer):
    """A weight that two modules share is sent by both: found twice, hooked twice."""

    def __init__(self, model):
        self.sent = []
        for _, param in model.named_parameters(remove_duplicate=False):
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.hook)


class SentTwice(Reducer):
    def hook(self, param):
        dist.all_reduce(param.grad.clone(), async_op=True).wait()
        super().hook(param)


WRONG = {
    SumOnly: (lab.MEAN, "ratio to the right value is 4"),
    HalvedForTwoRanks: (lab.MEAN, "ratio to the right value is 2"),
    ArgumentTakenForTheGradient: (lab.ONCE, "rank 0 sent 0 bytes of the gradient"),
    SendsAClone: (lab.MEAN, "elements are wrong"),
    SendsTheWeights: (lab.MEAN, "elements are wrong"),
    AllAtTheEnd: (
        lab.PROMPT,
        "was ready at 10.0 ms, the wire was free",
    ),
    AllInTheLastHook: (
        lab.PROMPT,
        "was ready at 10.0 ms, the wire was free",
    ),
    WaitsInTheHook: (lab.PROMPT, "was computed only after a collective"),
    NotAsynchronous: (lab.PROMPT, "was computed only after a collective"),
    NeverWaits: (lab.WAITED, "all_reduce"),
    DividesBeforeTheWait: (lab.SAFE, "two streams"),
    NeverCleared: (lab.SAFE, "then read: div_"),
    BeforeAccumulation: (lab.SAFE, "then read: copy_"),
    ReadsANumberInTheHook: (lab.CPU, "the CPU waits in"),
    StopsTheCpu: (lab.CPU, "the CPU waits in"),
    KeepsWhatItSent: (lab.MEMORY, "bytes at the end of step 2"),
    FrontLayersFirst: (
        lab.PROMPT,
        "was ready at 10.0 ms, the wire was free",
    ),
    HooksOnEachModule: (lab.TRAPS, "net 'tied'"),
    SentTwice: (lab.ONCE, "2 collectives"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_reducer_is_refused_for_its_own_fault(wrong, faults):
    sentence, reason = WRONG[wrong]
    verdict = judge(find_exercise("5.3"), wrong)
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]


RAISES = {
    FrozenOnesToo: "doesn't require gradient",
    EverythingHasAGradient: "NoneType",
}


@pytest.mark.parametrize("wrong", RAISES, ids=lambda c: c.__name__)
def test_a_net_with_a_trap_ends_a_reducer_that_forgets_it(wrong):
    verdict = judge(find_exercise("5.3"), wrong)
    assert not verdict.passed
    assert RAISES[wrong] in verdict.error


HINTS = {
    SumOnly: "divide by dist.get_world_size()",
    SendsAClone: "whose sum is written where?",
    SendsTheWeights: "is given the parameter",
    FrontLayersFirst: "what does the wire carry first",
    WaitsInTheHook: "who calls wait() during the backward pass?",
    StopsTheCpu: "stops until the GPU is through",
}


@pytest.mark.parametrize("wrong", HINTS, ids=lambda c: c.__name__)
def test_the_hint_names_the_fault(wrong):
    assert HINTS[wrong] in judge(find_exercise("5.3"), wrong).hint


class MeanAskedFor(Reducer):
    def hook(self, param):
        mean = dist.ReduceOp.AVG
        self.sent.append((param, dist.all_reduce(param.grad, op=mean, async_op=True)))

    def wait(self):
        while self.sent:
            self.sent.pop()[1].wait()


class DividesFirst(Reducer):
    def hook(self, param):
        param.grad /= dist.get_world_size()
        super().hook(param)

    def wait(self):
        for _, work in self.sent:
            work.wait()
        self.sent.clear()


class OneStreamWaits(Reducer):
    """No async_op: the messages run in line on a stream of their own."""

    def begin(self):
        self.side = streams.Stream()

    def hook(self, param):
        self.side.wait_stream(streams.current_stream())
        with streams.stream(self.side):
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    def wait(self):
        streams.current_stream().wait_stream(self.side)


class OfACopy(Reducer):
    """The message is a flat copy; the mean is written back by foreach."""

    def hook(self, param):
        flat = param.grad.flatten().clone()
        self.sent.append((param, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self):
        for _, _, work in self.sent:
            work.wait()
        grads = [param.grad for param, *_ in self.sent]
        flats = [
            flat.view_as(grad) / dist.get_world_size()
            for grad, (_, flat, _) in zip(grads, self.sent, strict=True)
        ]
        if grads:
            torch._foreach_copy_(grads, flats)
        self.sent.clear()


def the_course_s_own(model):
    return reference.PromptReducer(model)


def that_of_the_next_exercise(model):
    """One order, and zeros for what never came: more than is asked."""
    return reference.OrderedReducer(model)


RIGHT = (
    that_of_the_next_exercise,
    the_course_s_own,
    MeanAskedFor,
    DividesFirst,
    OneStreamWaits,
    OfACopy,
)


@pytest.mark.parametrize("right", RIGHT, ids=lambda c: c.__name__)
def test_unusual_right_reducers_pass(right):
    verdict = judge(find_exercise("5.3"), right)
    assert verdict.passed, str(verdict)


def test_what_is_drawn_is_the_model_of_the_lesson():
    verdict = judge(find_exercise("5.3"), the_course_s_own)
    assert verdict.timeline is not None
    names = [s.name for s in verdict.timeline.spans if s.kind == "communication"]
    assert names == ["head", "w3", "w2", "w1", "w0", "embedding"]
    assert verdict.step_ns == pytest.approx(33e6, rel=1e-3)
