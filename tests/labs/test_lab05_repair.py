"""5.6a and 5.6b: five broken reducers, each diagnosis its own, each repair judged."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab05 import broken, reference
from overlaplab_course.lab05 import reducer_checks as lab
from overlaplab_course.lab05.repairs import KINDS, repair_cases

NAMES = ("Alder", "Birch", "Cedar", "Elm", "Fir")


def wrapped(cls):
    """The course's own counts as nobody's: a function that makes one."""
    return lambda model: cls(model)


def first_number(name):
    """The first number whose first repair is this one."""
    return next(n for n in range(50) if repair_cases(n)[0].name == name)


def judge_with(name, repaired, said=None, place=0):
    number = next(n for n in range(50) if repair_cases(n)[place].name == name)
    case = repair_cases(number)[place]
    classes = [wrapped(getattr(broken, other)) for other in NAMES]
    classes[NAMES.index(name)] = repaired
    exercise = find_exercise(("5.6a", "5.6b")[place])
    return judge(exercise, number, case.truth() if said is None else said, *classes)


@pytest.mark.parametrize(
    ("name", "place"), [(name, number % 2) for number, name in enumerate(NAMES)]
)
def test_the_course_s_repair_passes(name, place):
    verdict = judge_with(name, wrapped(getattr(reference, name)), place=place)
    assert verdict.passed, str(verdict)


AS_GIVEN = {
    "Alder": (lab.SHORT, "the wire was free"),
    "Birch": (lab.ORDERED, "then read: copy_"),
    "Cedar": (lab.SHORT, "the wire was free"),
    "Elm": (lab.SENT, "process group 'default', rank 1 in collective"),
    "Fir": (lab.VALUES, "ratio to the right value is"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_was_handed_out_is_refused_for_its_own_fault(name, faults):
    sentence, reason = AS_GIVEN[name]
    found = faults(judge_with(name, wrapped(getattr(broken, name))))
    assert reason in found[sentence]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_kind_is_refused(name, faults):
    case = repair_cases(first_number(name))[0]
    other = NAMES[NAMES.index(name) - 1]
    said = {**case.truth(), "kind": KINDS[other]}
    verdict = judge_with(name, wrapped(getattr(reference, name)), said)
    assert list(faults(verdict)) == [lab.DIAGNOSIS]


WRONG_NUMBERS = {
    "Alder": {"exposed_ms": None},
    "Birch": {"read_by": "mm"},
    "Cedar": {"exposed_ms": 1000.0},
    "Elm": {"message": 0},
    "Fir": {"factor": 2},
}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_run_shows_is_asked_for(name, faults):
    case = repair_cases(first_number(name))[0]
    said = {**case.truth(), **WRONG_NUMBERS[name]}
    verdict = judge_with(name, wrapped(getattr(reference, name)), said)
    assert list(faults(verdict)) == [lab.DIAGNOSIS]


def test_a_wrong_kind_is_not_told_which_entry_goes_with_the_right_one(faults):
    verdict = judge_with("Fir", wrapped(reference.Fir), {"kind": None})
    assert "factor" not in faults(verdict)[lab.DIAGNOSIS]


class Base:
    def __init__(self, model):
        self.params = list(model.parameters())[::-1]
        self.works = []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.works.append((param, dist.all_reduce(param.grad, async_op=True)))

    def wait(self):
        for param, work in self.works:
            work.wait()
            param.grad /= dist.get_world_size()
        self.works.clear()


class SynchronisesEverything(Base):
    """No race, no overlap."""

    def hook(self, param):
        super().hook(param)
        self.works[-1][1].wait()


class AllAtTheEnd(Base):
    def hook(self, param):
        pass

    def wait(self):
        for param in self.params:
            super().hook(param)
        super().wait()


class SentTwice(Base):
    def hook(self, param):
        super().hook(param)
        super().hook(param)


class StillRaces(Base):
    def wait(self):
        for param, _ in self.works:
            param.grad /= dist.get_world_size()
        for _, work in self.works:
            work.wait()
        self.works.clear()


class HalvesTwice(Base):
    def wait(self):
        for param, work in self.works:
            work.wait()
            param.grad /= 2
        self.works.clear()


class SumStill(Base):
    def wait(self):
        for _, work in self.works:
            work.wait()
        self.works.clear()


class ReducesACopy(Base):
    def hook(self, param):
        copied = param.grad.clone()
        self.works.append((param, dist.all_reduce(copied, async_op=True)))


class StopsTheCpu(Base):
    def wait(self):
        super().wait()
        streams.synchronize()


class KeepsWhatItSent(Base):
    def __init__(self, model):
        super().__init__(model)
        self.kept = []

    def hook(self, param):
        self.kept.append(param.grad.clone())
        super().hook(param)


class SkipsOneOnRank0(Base):
    def hook(self, param):
        if dist.get_rank() or param is not self.params[0]:
            super().hook(param)


WRONG = {
    SynchronisesEverything: ("Birch", lab.SHORT, "only after a collective"),
    AllAtTheEnd: ("Cedar", lab.SHORT, "the wire was free"),
    SentTwice: ("Birch", lab.SENT, "2 collectives"),
    StillRaces: ("Birch", lab.ORDERED, "two streams"),
    HalvesTwice: ("Fir", lab.VALUES, "ratio to the right value is"),
    SumStill: ("Alder", lab.VALUES, "ratio to the right value is"),
    ReducesACopy: ("Alder", lab.VALUES, "elements are wrong"),
    SkipsOneOnRank0: ("Fir", lab.SENT, "ranks differ in collective #0"),
    StopsTheCpu: ("Fir", lab.NO_WAIT, "the CPU waits in"),
    KeepsWhatItSent: ("Cedar", lab.NO_LEAK, "bytes at the end of step 2"),
    Base: ("Elm", lab.SENT, "process group 'default', rank 1 in collective"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_repair_is_refused_for_its_own_fault(wrong, faults):
    name, sentence, reason = WRONG[wrong]
    verdict = judge_with(name, wrong)
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]


def test_a_sum_in_the_place_of_a_mean_is_named_unless_that_is_the_question():
    assert "divide by" in judge_with("Alder", SumStill).hint
    assert judge_with("Fir", SumStill).hint == ""


class MeanAskedFor(Base):
    def hook(self, param):
        mean = dist.ReduceOp.AVG
        self.works.append(dist.all_reduce(param.grad, op=mean, async_op=True))

    def wait(self):
        while self.works:
            self.works.pop(0).wait()


class SideStreamWithHooks(Base):
    def __init__(self, model):
        super().__init__(model)
        self.side = streams.Stream()

    def hook(self, param):
        self.side.wait_stream(streams.current_stream())
        with streams.stream(self.side):
            dist.all_reduce(param.grad)

    def wait(self):
        streams.current_stream().wait_stream(self.side)
        torch._foreach_div_([p.grad for p in self.params], dist.get_world_size())


@pytest.mark.parametrize("right", [MeanAskedFor, SideStreamWithHooks])
@pytest.mark.parametrize("name", ["Alder", "Birch", "Cedar", "Fir"])
def test_an_unusual_repair_passes(name, right):
    verdict = judge_with(name, right)
    assert verdict.passed, str(verdict)


class EachAloneInOrder(Base):
    """A repair of Elm without any buffer."""

    def __init__(self, model):
        super().__init__(model)
        self.arrived = set()

    def hook(self, param):
        self.arrived.add(param)
        for one in self.params[len(self.works) :]:
            if one not in self.arrived:
                return
            super().hook(one)

    def wait(self):
        super().wait()
        self.arrived.clear()


class BucketsByPlan(Base):
    """A repair of Elm with a plan made once; a bucket leaves when it is full."""

    def __init__(self, model):
        super().__init__(model)
        self.plan, room = [], 0
        for param in self.params:
            if room <= 0:
                self.plan.append([])
                room = 3000
            self.plan[-1].append(param)
            room -= param.numel()
        self.arrived, self.sent = set(), []

    def hook(self, param):
        self.arrived.add(param)
        for bucket in self.plan[len(self.sent) :]:
            if not self.arrived.issuperset(bucket):
                return
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.sent.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self):
        for bucket, flat, work in self.sent:
            work.wait()
            flat /= dist.get_world_size()
            parts = flat.split([p.numel() for p in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad.copy_(part.view_as(param))
        self.sent.clear()
        self.arrived.clear()


@pytest.mark.parametrize("right", [EachAloneInOrder, BucketsByPlan])
def test_an_unusual_repair_of_the_streaming_buffer_passes(right):
    verdict = judge_with("Elm", right)
    assert verdict.passed, str(verdict)


def test_every_number_draws_two_of_the_five_and_all_five_are_drawn():
    drawn = [repair_cases(n) for n in range(40)]
    assert all(first.name != second.name for first, second in drawn)
    assert {case.name for pair in drawn for case in pair} == set(NAMES)


@pytest.mark.parametrize("number", range(6))
def test_what_was_drawn_shows_its_fault(number):
    """A broken reducer is slower, or finds something, or is wrong: never all right."""
    for case in repair_cases(number):
        seen = case.play(getattr(broken, case.name))
        mended = case.play(getattr(reference, case.name))
        slower = seen.step_ms > 1.02 * mended.step_ms
        assert slower == (case.name in ("Alder", "Cedar"))
        assert bool(seen.findings) == (case.name == "Birch")
        assert seen.wrong() == (case.name in ("Birch", "Elm", "Fir"))
        assert not mended.wrong() and not mended.findings
