"""Lab 06, exercise 6.5a: everything is sent again from step 2."""

import pytest
import torch.distributed as dist

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06.reducer_checks import DIAGNOSIS, ONCE, PROMPT
from tests.labs.repairs import NUMBERS, Reducer, SerialPastedIn, first_diagnosis


class Resending(Reducer):
    """The reducer of 6.5a, in our own words."""

    def begin(self):
        self.arrived = set()
        self.in_flight = []

    def is_full(self, bucket):
        return all(
            self.state.params[i] in self.arrived for i in self.state.plan[bucket]
        )

    def hook(self, param):
        self.arrived.add(param)
        bucket = self.state.bucket_of(param)
        if self.is_full(bucket):
            for member, place in self.state.pairs(bucket):
                if member.grad is not None:
                    place.copy_(member.grad)
            work = dist.all_reduce(self.state.buffers[bucket], async_op=True)
            self.in_flight.append((bucket, work))

    def wait(self):
        for bucket, work in self.in_flight:
            work.wait()
            for member, place in self.state.pairs(bucket):
                member.grad = place / dist.get_world_size()
        self.in_flight.clear()


class NothingRepaired(Resending):
    pass


class WaitsAfterEachMessage(Resending):
    def hook(self, param):
        super().hook(param)
        self.wait()
        if self.is_full(self.state.bucket_of(param)):
            members = self.state.plan[self.state.bucket_of(param)]
            self.arrived -= {self.state.params[i] for i in members}


class LaterSendsDropped(Resending):
    """Each bucket once in the whole run: from step 2 on nothing is sent."""

    def begin(self):
        super().begin()
        self.sent = set()

    def hook(self, param):
        bucket = self.state.bucket_of(param)
        if bucket not in self.sent:
            super().hook(param)
            if self.is_full(bucket):
                self.sent.add(bucket)


class ClearedInTheHook(Resending):
    """Forgets who has arrived at every gradient: no bucket of two is ever full."""

    def hook(self, param):
        super().hook(param)
        self.arrived.clear()


class ClearedAfterTheStep(Resending):
    def wait(self):
        super().wait()
        self.arrived.clear()


class GenerationCounter(Resending):
    """Each gradient is stamped with its step; nothing is cleared."""

    def begin(self):
        super().begin()
        self.step, self.stamp = 1, {}

    def hook(self, param):
        self.stamp[param] = self.step
        super().hook(param)

    def is_full(self, bucket):
        members = [self.state.params[i] for i in self.state.plan[bucket]]
        return all(self.stamp.get(member) == self.step for member in members)

    def wait(self):
        super().wait()
        self.step += 1


class DiscardedAtTheLaunch(Resending):
    def hook(self, param):
        super().hook(param)
        bucket = self.state.bucket_of(param)
        if self.is_full(bucket):
            self.arrived -= {self.state.params[i] for i in self.state.plan[bucket]}


WRONG_FIRST = {
    NothingRepaired: (ONCE, "in step 2 (2 collectives)"),
    SerialPastedIn: (PROMPT, "right gradients, no overlap"),
    WaitsAfterEachMessage: (PROMPT, "was computed only after a collective"),
    LaterSendsDropped: (ONCE, "sent 0 bytes"),
    ClearedInTheHook: (ONCE, "sent 0 bytes"),
}
RIGHT_FIRST = (ClearedAfterTheStep, GenerationCounter, DiscardedAtTheLaunch)


@pytest.mark.parametrize("wrong", WRONG_FIRST, ids=lambda c: c.__name__)
def test_a_wrong_repair_of_the_resending_is_refused(wrong, faults):
    sentence, reason = WRONG_FIRST[wrong]
    found = faults(judge(find_exercise("6.5a"), 6, first_diagnosis(6), wrong))
    assert reason in found[sentence]


@pytest.mark.parametrize(
    ("right", "number"),
    [*zip(RIGHT_FIRST, NUMBERS, strict=True)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_any_repair_of_the_resending_passes(right, number):
    verdict = judge(find_exercise("6.5a"), number, first_diagnosis(number), right)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "race", "step": 2, "messages": 8},
        {"kind": "sent again", "step": 1, "messages": 8},
        {"kind": "sent again", "step": 2, "messages": 5},
        {"kind": "sent again", "step": 2},
        {},
    ],
    ids=["kind", "step", "messages of step 1", "no number", "nothing"],
)
def test_a_wrong_first_diagnosis_is_refused(said, faults):
    found = faults(judge(find_exercise("6.5a"), 6, said, ClearedAfterTheStep))
    assert list(found) == [DIAGNOSIS]
