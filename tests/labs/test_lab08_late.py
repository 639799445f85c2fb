"""8.3: gradients come exactly one step late, beside the next step, in two sets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab08 as lab
from overlaplab_course.lab08 import late_checks as checks


class Late:
    """Sent in place and swapped, with seams."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.travelling = None

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not self.flush():
            self.nothing_yet()
        self.travelling = sent

    def send(self, grads):
        return [dist.all_reduce(grad, async_op=True) for grad in grads]

    def nothing_yet(self):
        for parameter in self.parameters:
            parameter.grad = None

    def flush(self):
        if self.travelling is None:
            return False
        for parameter, grad, work in zip(
            self.parameters, *self.travelling, strict=True
        ):
            self.arrive(work)
            parameter.grad = self.mean(grad)
        self.travelling = None
        return True

    def arrive(self, work):
        work.wait()

    def mean(self, grad):
        return grad.div_(dist.get_world_size())


class Undelayed(Late):
    def wait(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            self.mean(parameter.grad)


class WaitsAtOnce(Late):
    """The right weights, and the messages in line: they are only used late."""

    def send(self, grads):
        works = super().send(grads)
        for work in works:
            work.wait()
        return works


class SendsInTheNextStep(Late):
    """Keeps its gradients for a step and sends them when they are wanted."""

    def wait(self):
        grads = [p.grad for p in self.parameters]
        if self.travelling is not None:
            self.travelling = self.travelling[0], super().send(self.travelling[0])
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = grads, None

    def flush(self):
        if self.travelling is not None:
            self.travelling = self.travelling[0], super().send(self.travelling[0])
        return super().flush()


class TheSum(Late):
    def mean(self, grad):
        return grad


class HalfOfTheSum(Late):
    def mean(self, grad):
        return grad.div_(2)


class ItsOwnFirst(Late):
    """Step 1 uses this rank's own gradient, of which a copy is sent."""

    def wait(self):
        if self.travelling is None:
            grads = [p.grad.clone() for p in self.parameters]
            self.travelling = grads, self.send(grads)
        else:
            super().wait()


class ZerosFirst(Late):
    def nothing_yet(self):
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)


class TwoStepsLate(Late):
    """A queue of two."""

    def __init__(self, model):
        super().__init__(model)
        self.queue = []

    def wait(self):
        grads = [p.grad for p in self.parameters]
        self.queue.append((grads, self.send(grads)))
        self.nothing_yet()
        if len(self.queue) > 2:
            self.travelling = self.queue.pop(0)
            Late.flush(self)

    def flush(self):
        any_given = False
        while self.queue:
            self.travelling = self.queue.pop(0)
            any_given = super().flush()
        return any_given


class NeverWaits(Late):
    def arrive(self, work):
        pass


class SendsWhatTheOptimizerUses(Late):
    """One set: the tensors that travel stay in .grad."""

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        self.flush()
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if parameter.grad is not None and self.travelling is None:
                parameter.grad = grad
        self.travelling = sent


class AThirdSetForTheMean(Late):
    def mean(self, grad):
        return grad / dist.get_world_size()


class AThirdSetForTheWire(Late):
    """Everything is copied into one flat tensor."""

    def wait(self):
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        sent = flat, dist.all_reduce(flat, async_op=True)
        if not self.flush():
            self.nothing_yet()
        self.travelling = sent

    def flush(self):
        if self.travelling is None:
            return False
        flat, work = self.travelling
        work.wait()
        flat /= dist.get_world_size()
        sizes = [p.numel() for p in self.parameters]
        parts = zip(self.parameters, flat.split(sizes), strict=True)
        for parameter, part in parts:
            parameter.grad = part.view_as(parameter)
        self.travelling = None
        return True


class KeepsWhatItGave(Late):
    def flush(self):
        self.given = self.travelling
        return super().flush()


class ForgetsToFlush(Late):
    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = sent

    def flush(self):
        return False


class FlushesAgainAndAgain(Late):
    def flush(self):
        kept = self.travelling
        said = super().flush()
        self.travelling = kept
        return said

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = sent


class SaysTrueForNothing(Late):
    def flush(self):
        super().flush()
        return True

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = sent


class SaysNothing(Late):
    def flush(self):
        super().flush()

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = sent


class FromAStreamThatWaitsForNobody(Late):
    """Right values here: the messages leave before their gradients are there."""

    def __init__(self, model):
        super().__init__(model)
        self.side = streams.Stream()

    def send(self, grads):
        with streams.stream(self.side):
            return super().send(grads)


class FlushesTwiceTheAverage(Late):
    def flush(self):
        said = super().flush()
        if said and self.travelling is None:
            for parameter in self.parameters:
                parameter.grad.mul_(2)
        return said

    def wait(self):
        grads = [p.grad for p in self.parameters]
        sent = grads, self.send(grads)
        if not Late.flush(self):
            self.nothing_yet()
        self.travelling = sent


class TheCpuWaits(Late):
    def flush(self):
        streams.synchronize()
        return super().flush()


class SendsTwice(Late):
    def send(self, grads):
        for work in super().send([grad.clone() for grad in grads]):
            work.wait()
        return super().send(grads)


class InAnotherOrderOnEachRank(Late):
    def send(self, grads):
        if dist.get_rank() == 0:
            return super().send(grads)
        return super().send(grads[::-1])[::-1]


WRONG = {
    Undelayed: (checks.LATE, "step 1"),
    TheSum: (checks.LATE, "step 2"),
    HalfOfTheSum: (checks.LATE, "step 2"),
    ItsOwnFirst: (checks.LATE, "step 1"),
    ZerosFirst: (checks.LATE, "step 1"),
    TwoStepsLate: (checks.LATE, "step 2"),
    SendsWhatTheOptimizerUses: (checks.SAFE, "all_reduce"),
    NeverWaits: (checks.SAFE, "all_reduce"),
    FromAStreamThatWaitsForNobody: (checks.SAFE, "all_reduce"),
    FlushesTwiceTheAverage: (checks.FLUSH, "what flush() left in .grad"),
    AThirdSetForTheMean: (checks.TWO_SETS, "sets of gradients more"),
    AThirdSetForTheWire: (checks.TWO_SETS, "sets of gradients more"),
    KeepsWhatItGave: (checks.TWO_SETS, "sets of gradients more"),
    ForgetsToFlush: (checks.FLUSH, "what flush() left in .grad of layers.0.weight"),
    FlushesAgainAndAgain: (checks.FLUSH, "step 4"),
    SaysNothing: (checks.FLUSH, "the value of layers.0.weight"),
    SaysTrueForNothing: (checks.FLUSH, "before any step returned True"),
    TheCpuWaits: (checks.CPU, "the CPU waits in synchronize"),
    SendsTwice: (checks.ONCE, "bytes"),
    InAnotherOrderOnEachRank: (checks.ONCE, ""),
    WaitsAtOnce: (checks.BESIDE, "ms"),
    SendsInTheNextStep: (checks.ONCE, "step 1"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_reducer_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("8.3"), wrong))
    assert sentence in found
    assert reason in found[sentence]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Undelayed, "this step's averages"),
        (TheSum, "SUM over the ranks"),
        (ZerosFirst, "momentum and weight decay"),
        (ItsOwnFirst, "no average yet"),
        (TwoStepsLate, "two steps late"),
        (AThirdSetForTheMean, "divide them in place"),
        (WaitsAtOnce, "at the end of the next"),
    ],
)
def test_the_hint_knows_the_slip(wrong, told):
    assert told in judge(find_exercise("8.3"), wrong).hint


class FromHooks(Late):
    """Messages leave during the backward pass, prompt and without a list of grads."""

    def __init__(self, model):
        super().__init__(model)
        self.works = {}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.launch)

    def launch(self, parameter):
        self.works[parameter] = dist.all_reduce(parameter.grad, async_op=True)

    def send(self, grads):
        works = [self.works[p] for p in self.parameters]
        self.works.clear()
        return works


class DividesBefore(Late):
    """The mean of what is divided before it is sent."""

    def send(self, grads):
        torch._foreach_div_(grads, dist.get_world_size())
        return super().send(grads)

    def mean(self, grad):
        return grad


class OneGroupCall(Late):
    """All messages in one launch, waited for once."""

    def send(self, grads):
        with dist._coalescing_manager(async_ops=True) as manager:
            for grad in grads:
                dist.all_reduce(grad)
        return [manager] * len(grads)


class OnAStreamOfItsOwn(Late):
    """The message is waited for, and divided, beside the next step."""

    def send(self, grads):
        side = streams.Stream()
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            for grad in grads:
                dist.all_reduce(grad)
                grad.div_(dist.get_world_size())
        return [side] * len(grads)

    def arrive(self, side):
        streams.current_stream().wait_stream(side)

    def mean(self, grad):
        return grad


@pytest.mark.parametrize(
    "right", [Late, FromHooks, DividesBefore, OneGroupCall, OnAStreamOfItsOwn]
)
def test_an_unusual_reducer_passes(right):
    verdict = judge(find_exercise("8.3"), right)
    assert verdict.passed, str(verdict)


def test_momentum_makes_the_late_edge_narrow_and_the_undelayed_one_wide():
    """Of w(n+1) = (1 + m) w(n) - m w(n-1) - rate g: 2 (1 + m) at once, 1 - m late."""
    assert lab.largest_rate(late=False, momentum=0.9) == 3.79
    assert lab.largest_rate(late=True, momentum=0.9) == 0.09
    assert lab.largest_rate(late=True, momentum=0.0) == 0.99


def test_half_of_the_learning_rate_is_the_edge():
    assert abs(lab.walk(0.99, late=True)[-1]) < 1
    assert max(map(abs, lab.walk(1.05, late=True)[-6:])) > 1
    assert abs(lab.walk(1.99, late=False)[-1]) < 1
