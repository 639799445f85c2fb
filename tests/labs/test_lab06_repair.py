"""6.5b: a repair of the race that serialises, or that mends nothing, is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06.reducer_checks import PROMPT, SAFE, VALUES
from tests.labs.repairs import (
    NUMBERS,
    Reducer,
    SerialPastedIn,
    first_diagnosis,
    second_diagnosis,
)


class EventBeforeTheCopy(Reducer):
    """The launch waits for an event that the copies come after."""

    def launch(self, bucket):
        self.packing.wait_stream(streams.current_stream())
        event = self.packing.record_event()
        with streams.stream(self.packing):
            self.pack(bucket)
        streams.current_stream().wait_event(event)
        self.send(bucket)


class RecordStreamOnly(Reducer):
    """Keeps the memory from reuse; orders nothing."""

    def launch(self, bucket):
        self.packing.wait_stream(streams.current_stream())
        with streams.stream(self.packing):
            self.pack(bucket)
        self.state.buffers[bucket].record_stream(self.packing)
        self.send(bucket)


class Racing(Reducer):
    def launch(self, bucket):
        self.packing.wait_stream(streams.current_stream())
        with streams.stream(self.packing):
            self.pack(bucket)
        self.send(bucket)


class OtherEdgeOnly(Reducer):
    """The message waits for the copies, the copies for nobody."""

    def launch(self, bucket):
        with streams.stream(self.packing):
            self.pack(bucket)
            self.send(bucket)


class EverythingSynchronised(Racing):
    def send(self, bucket):
        streams.synchronize()
        super().send(bucket)
        streams.synchronize()


class AllOnOneStream(Reducer):
    """The collective itself on the backward pass's stream."""

    def send(self, bucket):
        dist.all_reduce(self.state.buffers[bucket])
        self.state.works[bucket] = Done()


class Done:
    def wait(self):
        pass


class PackedOnTheBackwardStream(Reducer):
    """No side stream at all: plain, and right."""


class SentFromThePackingStream(Reducer):
    def launch(self, bucket):
        self.packing.wait_stream(streams.current_stream())
        with streams.stream(self.packing):
            self.pack(bucket)
            self.send(bucket)


class AnEventAfterTheCopy(Reducer):
    def launch(self, bucket):
        self.packing.wait_stream(streams.current_stream())
        with streams.stream(self.packing):
            self.pack(bucket)
            event = self.packing.record_event()
        streams.current_stream().wait_event(event)
        self.send(bucket)


class NoBuffer(Reducer):
    def launch(self, bucket):
        with dist._coalescing_manager(async_ops=True) as work:
            for position in self.state.plan[bucket]:
                dist.all_reduce(self.state.params[position].grad)
        self.state.works[bucket] = work

    def wait(self):
        for work in self.state.works:
            work.wait()
        grads = [param.grad for param in self.state.params]
        torch._foreach_div_(grads, float(dist.get_world_size()))
        self.state.missing = [len(bucket) for bucket in self.state.plan]
        self.state.works = [None] * len(self.state.plan)


class MeanInPlace(Reducer):
    """Nothing after the wait: the all-reduce has made the mean, in `.grad`."""

    op = dist.ReduceOp.AVG

    def launch(self, bucket):
        grads = [self.state.params[i].grad for i in self.state.plan[bucket]]
        works = [dist.all_reduce(g, op=self.op, async_op=True) for g in grads]
        self.state.works[bucket] = works

    def wait(self):
        for works in self.state.works:
            for work in works:
                work.wait()
        self.state.missing = [len(bucket) for bucket in self.state.plan]


class SumInPlace(MeanInPlace):
    op = dist.ReduceOp.SUM


class GradIsThePlace(Reducer):
    """`.grad` becomes its place in the buffer, which then holds the mean."""

    def send(self, bucket):
        buffer = self.state.buffers[bucket] = self.state.buffers[bucket].clone()
        for member, place in self.state.pairs(bucket):
            member.grad = place
        work = dist.all_reduce(buffer, op=dist.ReduceOp.AVG, async_op=True)
        self.state.works[bucket] = work

    def wait(self):
        for work in self.state.works:
            work.wait()
        self.state.missing = [len(bucket) for bucket in self.state.plan]


@pytest.mark.parametrize("right", [MeanInPlace, GradIsThePlace])
@pytest.mark.parametrize("task", ["6.5a", "6.5b"])
def test_a_mean_by_the_all_reduce_itself_passes(task, right):
    said = first_diagnosis(6) if task == "6.5a" else second_diagnosis(6)
    verdict = judge(find_exercise(task), 6, said, right)
    assert verdict.passed, str(verdict)


def test_a_sum_in_place_shows_the_number_of_ranks(faults):
    found = faults(judge(find_exercise("6.5b"), 6, second_diagnosis(6), SumInPlace))
    assert list(found) == [VALUES]
    assert "the median ratio to the right value is 2)" in found[VALUES]


def test_every_wrong_answer_of_a_diagnosis_is_listed(faults):
    said = {**second_diagnosis(6), "kind": "blocked", "written_on": "comm"}
    found = faults(judge(find_exercise("6.5b"), 6, said, NoBuffer))
    (seen,) = found.values()
    assert "kind: 'blocked'" in seen and "written_on: 'comm'" in seen
    assert "one of: sent again, never sent" in seen and "bucket" not in seen


WRONG_SECOND = {
    Racing: (SAFE, "buffer of bucket"),
    EventBeforeTheCopy: (SAFE, "buffer of bucket"),
    OtherEdgeOnly: (SAFE, "does not wait for"),
    EverythingSynchronised: (PROMPT, "the CPU waits in synchronize"),
    AllOnOneStream: (PROMPT, "was computed only after a collective"),
    SerialPastedIn: (PROMPT, "right gradients, no overlap"),
}


def test_record_stream_alone_is_no_repair():
    verdict = judge(find_exercise("6.5b"), 6, second_diagnosis(6), RecordStreamOnly)
    assert not verdict.passed
    assert "buffer of bucket" in str(verdict) or "record_stream" in verdict.error


RIGHT_SECOND = (
    PackedOnTheBackwardStream,
    SentFromThePackingStream,
    AnEventAfterTheCopy,
    NoBuffer,
)


@pytest.mark.parametrize("wrong", WRONG_SECOND, ids=lambda c: c.__name__)
def test_a_wrong_repair_of_the_race_is_refused(wrong, faults):
    sentence, reason = WRONG_SECOND[wrong]
    found = faults(judge(find_exercise("6.5b"), 6, second_diagnosis(6), wrong))
    assert reason in found[sentence]
    assert VALUES not in found or sentence == SAFE


@pytest.mark.parametrize("right", RIGHT_SECOND, ids=lambda c: c.__name__)
def test_any_repair_of_the_race_passes(right):
    verdict = judge(find_exercise("6.5b"), 6, second_diagnosis(6), right)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("number", NUMBERS[1:])
def test_the_race_is_repaired_in_every_learner_s_net(number):
    said = second_diagnosis(number)
    verdict = judge(find_exercise("6.5b"), number, said, SentFromThePackingStream)
    assert verdict.passed, str(verdict)


def test_learners_find_different_things():
    firsts = {first_diagnosis(n)["messages"] for n in range(20)}
    seconds = {second_diagnosis(n)["bucket"] for n in range(20)}
    assert len(firsts) > 1
    assert len(seconds) > 1
