"""5.4: reducers that are right only where all ranks see the same are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab05
from overlaplab_course.lab05 import reducer_checks as lab
from overlaplab_course.lab05 import reference

_KEYS = ("mean", "once", "prompt", "waited", "safe", "cpu", "memory")
EVERY = dict(zip(_KEYS, (lab.RIGHT, *lab.LAB.sentences("5.4")[2:]), strict=True))


class Ordered:
    """A right one, of parts that the wrong ones change; not one of the package's."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad][::-1]
        self.arrived, self.works = set(), []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.arrived.add(param)
        while len(self.works) < len(self.params):
            one = self.params[len(self.works)]
            if one not in self.arrived:
                return
            self.launch(one)

    def launch(self, param):
        self.works.append(dist.all_reduce(param.grad, async_op=True))

    def fill(self, param):
        if param.grad is None:
            param.grad = torch.zeros_like(param)

    def launch_the_rest(self):
        for param in self.params[len(self.works) :]:
            self.fill(param)
            self.launch(param)

    def wait(self):
        self.launch_the_rest()
        for param, work in zip(self.params, self.works, strict=True):
            work.wait()
            param.grad /= dist.get_world_size()
        self.begin_anew()

    def begin_anew(self):
        self.arrived.clear()
        self.works.clear()


class InOrderOfArrival(Ordered):
    """5.3's: who comes first goes first."""

    def __init__(self, model):
        super().__init__(model)
        self.order = []

    def hook(self, param):
        self.order.append(param)
        self.launch(param)

    def launch_the_rest(self):
        rest = [p for p in self.params if all(p is not one for one in self.order)]
        for param in rest:
            self.fill(param)
            self.launch(param)
        self.params = [*self.order, *rest]
        self.order = []


class SkipsWhatNeverCame(Ordered):
    """In one order, but a rank without a gradient sends nothing."""

    def wait(self):
        sent = self.params[: len(self.works)]
        for param in self.params[len(self.works) :]:
            if param.grad is not None:
                sent.append(param)
                self.launch(param)
        for param, work in zip(sent, self.works, strict=True):
            work.wait()
            param.grad /= dist.get_world_size()
        self.begin_anew()


class MeanOfThoseWhoHaveOne(Ordered):
    """Divides by the number of ranks that used the parameter."""

    def wait(self):
        used = [torch.tensor(float(p in self.arrived)) for p in self.params]
        self.launch_the_rest()
        for param, work, count in zip(self.params, self.works, used, strict=True):
            work.wait()
            dist.all_reduce(count)
            param.grad /= count.clamp(min=1)
        self.begin_anew()


class OnesForWhatNeverCame(Ordered):
    def fill(self, param):
        if param.grad is None:
            param.grad = torch.ones_like(param)


class WaitsForTheFirstRegistered(Ordered):
    """One order on all ranks, the wrong way round."""

    def __init__(self, model):
        super().__init__(model)
        self.params.reverse()


class AllAtTheEnd(Ordered):
    def hook(self, param):
        pass


class NeverBeginsAnew(Ordered):
    """What arrived in step 1 has arrived for ever: old gradients leave early."""

    def begin_anew(self):
        self.works.clear()


class ReadsArrivalsOffGrad(Ordered):
    """Zeros left from the last step pass for a gradient that has arrived."""

    def hook(self, param):
        while len(self.works) < len(self.params):
            one = self.params[len(self.works)]
            if one.grad is None:
                return
            self.launch(one)


class SumOnly(Ordered):
    def wait(self):
        self.launch_the_rest()
        for work in self.works:
            work.wait()
        self.begin_anew()


class WaitsAtEachLaunch(Ordered):
    def launch(self, param):
        super().launch(param)
        self.works[-1].wait()


class NeverWaits(Ordered):
    def wait(self):
        self.launch_the_rest()
        for param in self.params:
            param.grad /= dist.get_world_size()
        self.begin_anew()


class StopsTheCpu(Ordered):
    def wait(self):
        super().wait()
        streams.synchronize()


class KeepsEveryGradient(Ordered):
    def __init__(self, model):
        super().__init__(model)
        self.kept = []

    def launch(self, param):
        self.kept.append(param.grad.clone())
        super().launch(param)


class DividesTooEarly(Ordered):
    def wait(self):
        self.launch_the_rest()
        for param, work in zip(self.params, self.works, strict=True):
            param.grad /= dist.get_world_size()
            work.wait()
        self.begin_anew()


WRONG = {
    InOrderOfArrival: (lab.ORDER, "in collective #0 of process group 'default'"),
    SkipsWhatNeverCame: (lab.SOME, "rank 0 waits in all_reduce"),
    MeanOfThoseWhoHaveOne: (lab.SOME, "net 'detour'"),
    OnesForWhatNeverCame: (lab.SOME, "net 'detour'"),
    WaitsForTheFirstRegistered: (lab.AT_ONCE, "was ready at 10.0 ms"),
    AllAtTheEnd: (lab.AT_ONCE, "no overlap"),
    ReadsArrivalsOffGrad: (lab.RIGHT, "net 'zeroed_in_place'"),
    SumOnly: (lab.RIGHT, "ratio to the right value is 4"),
    WaitsAtEachLaunch: (lab.AT_ONCE, "was computed only after a collective"),
    NeverWaits: (EVERY["waited"], "all_reduce"),
    StopsTheCpu: (EVERY["cpu"], "the CPU waits in"),
    KeepsEveryGradient: (EVERY["memory"], "bytes at the end of step 2"),
    DividesTooEarly: (EVERY["safe"], "two streams"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_reducer_is_refused_for_its_own_fault(wrong, faults):
    sentence, reason = WRONG[wrong]
    verdict = judge(find_exercise("5.4"), wrong)
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]


def test_one_that_never_begins_anew_ends_where_it_sends_what_is_not_there():
    verdict = judge(find_exercise("5.4"), NeverBeginsAnew)
    assert "got <class 'NoneType'>" in verdict.error
    assert "in launch" in verdict.error


def test_a_late_message_is_told_without_lab_06_s_buckets(faults):
    verdict = judge(find_exercise("5.4"), AllAtTheEnd)
    assert "message 0 was ready at" in faults(verdict)[lab.AT_ONCE]
    assert "in its gradient's hook" in verdict.hint
    assert "bucket" not in str(verdict)


def test_ranks_that_are_stuck_are_told_what_to_send():
    verdict = judge(find_exercise("5.4"), SkipsWhatNeverCame)
    assert "must send zeros in its place" in verdict.hint


def test_the_net_that_fails_is_named_and_drawn():
    verdict = judge(find_exercise("5.4"), InOrderOfArrival)
    assert "'branches': ranks use two layers in different orders" in str(verdict)
    assert verdict.timeline_title == "your run on 'branches', step 1"
    assert verdict.timeline is not None
    sent = [s for s in verdict.timeline.spans if s.kind == "communication"]
    first = [next(s.name for s in sent if s.rank == rank) for rank in (0, 1)]
    assert first == ["b.bias", "a.bias"]


class ByNumber(Ordered):
    """Counts places instead of keeping sets; the mean is asked for."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad][::-1]
        self.there = [False] * len(self.params)
        self.works = []
        for place, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(self.at(place))

    def at(self, place):
        def hook(param):
            self.there[place] = True
            while len(self.works) < len(self.there) and self.there[len(self.works)]:
                self.launch(self.params[len(self.works)])

        return hook

    def launch(self, param):
        mean = dist.ReduceOp.AVG
        self.works.append(dist.all_reduce(param.grad, op=mean, async_op=True))

    def wait(self):
        self.launch_the_rest()
        while self.works:
            self.works.pop().wait()
        self.there = [False] * len(self.params)


class FlagsTravelToo(Ordered):
    """Who used what is summed beside the gradients, and nobody waits for it."""

    def wait(self):
        used = torch.tensor([float(p in self.arrived) for p in self.params])
        self.launch_the_rest()
        flags = dist.all_reduce(used, async_op=True)
        for param, work in zip(self.params, self.works, strict=True):
            work.wait()
            param.grad /= dist.get_world_size()
        flags.wait()
        for param, count in zip(self.params, used, strict=True):
            param.grad *= count > 0
        self.begin_anew()


def the_course_s_own(model):
    return reference.OrderedReducer(model)


class WithTheCourseSToLaunch(Ordered):
    """Whose 5.4a is not finished takes ours, as the lesson says."""

    def hook(self, param):
        self.arrived.add(param)
        to_launch = lab05.ours("5.4a")
        for ready in to_launch(self.params, len(self.works), self.arrived):
            self.launch(ready)


@pytest.mark.parametrize(
    "right",
    (the_course_s_own, ByNumber, FlagsTravelToo, WithTheCourseSToLaunch),
    ids=lambda c: c.__name__,
)
def test_unusual_right_reducers_pass(right):
    verdict = judge(find_exercise("5.4"), right)
    assert verdict.passed, str(verdict)
