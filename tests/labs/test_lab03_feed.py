"""3.4: batches come from pinned memory, beside the step, and nobody reads too early."""

from __future__ import annotations

import pytest
import torch

import overlaplab as ol
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03 import feed_checks as checks
from overlaplab_course.lab03.given import LOOPS, feed_loop


class Feed:
    """Two pinned buffers in turn, with seams."""

    num_buffers = 2
    pin = True

    def __call__(self, samples, step):
        self.samples = samples
        self.main, self.loading = streams.current_stream(), streams.Stream()
        self.buffers = [
            torch.empty_like(samples[0], device="cpu", pin_memory=self.pin)
            for _ in range(self.num_buffers)
        ]
        self.copied = [None] * self.num_buffers
        self.loop(step)

    def loop(self, step):
        following = self.load(0)
        for i in range(len(self.samples)):
            batch = following
            self.order(i, batch)
            if i + 1 < len(self.samples):
                following = self.load(i + 1)
            step(batch)
            self.done(batch)

    def load(self, i):
        slot = i % self.num_buffers
        self.before_filling(slot)
        self.buffers[slot].copy_(self.samples[i])
        with streams.stream(self.loading):
            batch = self.copy(self.buffers[slot])
            self.copied[slot] = self.loading.record_event()
        return batch

    def copy(self, buffer):
        return buffer.to(ol.device(), non_blocking=True)

    def before_filling(self, slot):
        if self.copied[slot] is not None:
            self.copied[slot].synchronize()

    def order(self, i, batch):
        self.main.wait_event(self.copied[i % self.num_buffers])
        batch.record_stream(self.main)

    def done(self, batch):
        pass


class Plain(Feed):
    def loop(self, step):
        for sample in self.samples:
            step(sample.to(ol.device()))


class PageableAhead(Feed):
    pin = False


class OnTheMainStream(Feed):
    def __call__(self, samples, step):
        for sample in samples:
            step(sample.pin_memory().to(ol.device(), non_blocking=True))


class Blocking(Feed):
    def copy(self, buffer):
        return buffer.to(ol.device())


class NoWait(Feed):
    def order(self, i, batch):
        batch.record_stream(self.main)


class WaitsForAnEventBeforeTheCopy(Feed):
    def load(self, i):
        slot = i % self.num_buffers
        self.before_filling(slot)
        self.buffers[slot].copy_(self.samples[i])
        self.copied[slot] = self.loading.record_event()
        with streams.stream(self.loading):
            return self.copy(self.buffers[slot])


class FillsTooEarly(Feed):
    def before_filling(self, slot):
        pass


class StreamWaitsWhereTheCpuMust(Feed):
    """wait_event orders the stream; the CPU fills the buffer all the same."""

    def before_filling(self, slot):
        if self.copied[slot] is not None:
            self.loading.wait_event(self.copied[slot])


class ForgetsTheAllocator(Feed):
    def order(self, i, batch):
        self.main.wait_event(self.copied[i % self.num_buffers])


class LaunchesAfterTheStep(Feed):
    def loop(self, step):
        for i in range(len(self.samples)):
            batch = self.load(i)
            self.order(i, batch)
            step(batch)


class AllAtOnce(Feed):
    def loop(self, step):
        self.num_buffers = len(self.samples)
        self.buffers = [s.pin_memory() for s in self.samples]
        self.copied = [None] * self.num_buffers
        batches = [self.load(i) for i in range(len(self.samples))]
        for i, batch in enumerate(batches):
            self.order(i, batch)
            step(batch)


class SynchronizesEverything(Feed):
    """Also what should run beside the step."""

    def load(self, i):
        batch = super().load(i)
        streams.synchronize()
        return batch


class LeavesOutTheLast(Feed):
    def loop(self, step):
        self.samples = self.samples[:-1] or self.samples
        super().loop(step)


class Backwards(Feed):
    def loop(self, step):
        self.samples = self.samples[::-1]
        super().loop(step)


WRONG = {
    Plain: (checks.FIRST_COPY, "30.0 ms of copies are exposed"),
    PageableAhead: (checks.FIRST_COPY, "ms of copies are exposed"),
    OnTheMainStream: (checks.FIRST_COPY, "15.0 ms of copies are exposed"),
    Blocking: (checks.FIRST_COPY, "ms of copies are exposed"),
    NoWait: (checks.NOBODY_EARLY, "step"),
    WaitsForAnEventBeforeTheCopy: (checks.NOBODY_EARLY, "step"),
    FillsTooEarly: (checks.NOBODY_EARLY, "a stream and the CPU use"),
    StreamWaitsWhereTheCpuMust: (checks.NOBODY_EARLY, "a stream and the CPU use"),
    ForgetsTheAllocator: (checks.NOBODY_EARLY, "is handed out again"),
    LaunchesAfterTheStep: (checks.FIRST_COPY, "15.0 ms of copies are exposed"),
    AllAtOnce: (checks.LEAN, "holds 5 batches"),
    SynchronizesEverything: (checks.FIRST_COPY, "ms of copies are exposed"),
    LeavesOutTheLast: (checks.OWN_BATCH, "ran 4 steps"),
    Backwards: (checks.OWN_BATCH, "saw another batch"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_feed_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("3.4"), wrong()))
    assert sentence in found
    assert reason in found[sentence]


def test_a_slow_feed_gets_the_reason():
    hints = {
        wrong: judge(find_exercise("3.4"), wrong()).hint
        for wrong in (PageableAhead, OnTheMainStream, LaunchesAfterTheStep)
    }
    assert "not pinned" in hints[PageableAhead]
    assert "on the stream of the steps" in hints[OnTheMainStream]
    assert "before the step" in hints[LaunchesAfterTheStep]


class ThreeBuffers(Feed):
    num_buffers = 3


class PinsEachSample(Feed):
    """A fresh pinned tensor a sample: nothing is ever filled twice."""

    def load(self, i):
        with streams.stream(self.loading):
            batch = self.copy(self.samples[i].pin_memory())
            self.copied[i % 2] = self.loading.record_event()
        return batch


class TwoFixedBatches(Feed):
    """Two tensors on the device, filled in turn behind the step that read them."""

    def __call__(self, samples, step):
        self.slots = [torch.empty_like(samples[0], device=ol.device()) for _ in "ab"]
        self.read = [None, None]
        self.count = 0
        super().__call__(samples, step)

    def copy(self, buffer):
        slot = self.count % 2
        self.count += 1
        if self.read[slot] is not None:
            self.loading.wait_event(self.read[slot])
        self.slots[slot].copy_(buffer, non_blocking=True)
        return self.slots[slot]

    def load(self, i):
        if i == 0:
            self.loading.wait_stream(self.main)
        return super().load(i)

    def order(self, i, batch):
        self.main.wait_event(self.copied[i % 2])

    def done(self, batch):
        slot = next(k for k in (0, 1) if self.slots[k] is batch)
        self.read[slot] = self.main.record_event()


def generator(samples, step):
    """A prefetcher as people write it: an iterator that is one batch ahead."""
    main, loading = streams.current_stream(), streams.Stream()

    def batches():
        ahead = None
        for sample in samples:
            with streams.stream(loading):
                following = sample.pin_memory().to(ol.device(), non_blocking=True)
                event = loading.record_event()
            if ahead is not None:
                yield ahead
            ahead = following, event
        yield ahead

    for batch, event in batches():
        event.wait(main)
        batch.record_stream(main)
        step(batch)


@pytest.mark.parametrize(
    "right",
    [Feed(), ThreeBuffers(), PinsEachSample(), TwoFixedBatches(), generator],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_a_right_feed_passes_however_it_is_written(right):
    verdict = judge(find_exercise("3.4"), right)
    assert verdict.passed, str(verdict)


def test_the_lessons_three_loops_take_50_35_and_23_ms():
    steps_ms = [
        feed_loop(f(), LOOPS[0]).step_ns // 10**6
        for f in (Plain, OnTheMainStream, Feed)
    ]
    assert steps_ms == [50, 35, 23]
