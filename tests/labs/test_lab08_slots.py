"""8.2: a slot is filled again when its reader is done, no sooner and no later."""

from __future__ import annotations

import pytest

import overlaplab as ol
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course import lab08 as lab
from overlaplab_course.lab08 import feed_checks as checks


class Slots:
    """Two slots of each kind in turn, with seams."""

    def __call__(self, loader, pinned, device):
        self.main, self.copying = streams.current_stream(), streams.Stream()
        self.pinned, self.device = pinned, device
        self.copied, self.read = [None, None], [None, None]
        yield from self.loop(loader)

    def loop(self, loader):
        ahead = None
        for i, batch in enumerate(loader):
            following = self.load(i, batch)
            if ahead is not None:
                yield from self.hand_out(i - 1, ahead)
            ahead = following
        if ahead is not None:
            yield from self.hand_out(i, ahead)

    def hand_out(self, i, ours):
        self.before_the_step(i % 2)
        yield ours
        self.after_the_step(i % 2)

    def before_the_step(self, slot):
        self.main.wait_event(self.copied[slot])

    def after_the_step(self, slot):
        self.read[slot] = self.main.record_event()

    def load(self, i, batch):
        slot = i % 2
        host, ours = self.rows(slot, batch)
        self.before_filling(slot)
        self.fill(host, batch)
        self.before_copying(slot)
        self.copy(slot, ours, host)
        return ours

    def rows(self, slot, batch):
        return lab.part(self.pinned[slot], batch), lab.part(self.device[slot], batch)

    def before_filling(self, slot):
        if self.copied[slot] is not None:
            self.copied[slot].synchronize()

    def fill(self, host, batch):
        for target, source in zip(host, batch, strict=True):
            target.copy_(source)

    def before_copying(self, slot):
        if self.read[slot] is not None:
            self.copying.wait_event(self.read[slot])

    def copy(self, slot, ours, host):
        with streams.stream(self.copying):
            for target, source in zip(ours, host, strict=True):
                target.copy_(source, non_blocking=True)
            self.copied[slot] = self.copying.record_event()


class FillsTooEarly(Slots):
    def before_filling(self, slot):
        pass


class AStreamWaitsWhereTheCpuMust(Slots):
    def before_filling(self, slot):
        if self.copied[slot] is not None:
            self.copying.wait_event(self.copied[slot])


class AsksTheWrongEvent(Slots):
    """Slot B is filled when the copy from A, launched after B's, has ended."""

    def before_filling(self, slot):
        super().before_filling(0)


class OverwritesWhatAStepReads(Slots):
    def before_copying(self, slot):
        pass


class TheEventBeforeTheStep(Slots):
    def hand_out(self, i, ours):
        self.before_the_step(i % 2)
        self.after_the_step(i % 2)
        yield ours


class StepsTooEarly(Slots):
    def before_the_step(self, slot):
        pass


class TheWholeSlot(Slots):
    """Of the last batch the step gets rows of an older one, too."""

    def hand_out(self, i, ours):
        yield from super().hand_out(i, self.device[i % 2])


class WaitsAtOnce(Slots):
    """Right, and fills and copies take turns."""

    def copy(self, slot, ours, host):
        super().copy(slot, ours, host)
        self.copied[slot].synchronize()


class OnePinnedSlot(Slots):
    """The CPU fills A only, when each copy has ended."""

    def rows(self, slot, batch):
        _, ours = super().rows(slot, batch)
        return lab.part(self.pinned[0], batch), ours

    def before_filling(self, slot):
        for event in self.copied:
            if event is not None:
                event.synchronize()


class OneDeviceSlot(Slots):
    def rows(self, slot, batch):
        host, _ = super().rows(slot, batch)
        return host, lab.part(self.device[0], batch)

    def loop(self, loader):
        for i, batch in enumerate(loader):
            yield from self.hand_out(i, self.load(i, batch))

    def before_copying(self, slot):
        self.copying.wait_stream(self.main)


class SynchronizesEverything(Slots):
    def before_filling(self, slot):
        streams.synchronize()


class TheCpuWaitsForTheStep(Slots):
    """Right, and the CPU cannot fill ahead: dear where one fill takes long."""

    def before_copying(self, slot):
        if self.read[slot] is not None:
            self.read[slot].synchronize()


class StepsBehindAllCopies(Slots):
    """A step waits for the next batch's copy as well."""

    def before_the_step(self, slot):
        self.main.wait_stream(self.copying)


class AllocatesBatches(Slots):
    def copy(self, slot, ours, host):
        with streams.stream(self.copying):
            self.new = tuple(t.to(ol.device(), non_blocking=True) for t in host)
            self.copied[slot] = self.copying.record_event()
        for tensor in self.new:
            tensor.record_stream(self.main)

    def load(self, i, batch):
        super().load(i, batch)
        return self.new


class PinsEachBatch(Slots):
    def load(self, i, batch):
        return super().load(i, tuple(t.pin_memory() for t in batch))


class ReadsTheLoaderToItsEnd(Slots):
    def loop(self, loader):
        yield from super().loop(list(loader))


class LosesTheLast(Slots):
    def loop(self, loader):
        ahead = None
        for i, batch in enumerate(loader):
            following = self.load(i, batch)
            if ahead is not None:
                yield from self.hand_out(i - 1, ahead)
            ahead = following


WRONG = {
    FillsTooEarly: (checks.EDGES, "a stream and the CPU use"),
    AStreamWaitsWhereTheCpuMust: (checks.EDGES, "a stream and the CPU use"),
    OverwritesWhatAStepReads: (checks.EDGES, "device A"),
    TheEventBeforeTheStep: (checks.EDGES, "device A"),
    StepsTooEarly: (checks.EDGES, "device A"),
    TheWholeSlot: (checks.OWN_SLOT, "saw another batch, or not its rows"),
    LosesTheLast: (checks.OWN_SLOT, "steps"),
    WaitsAtOnce: (checks.BESIDE, "ms"),
    AsksTheWrongEvent: (checks.BESIDE, "32.3 ms"),
    OnePinnedSlot: (checks.BESIDE, "ms"),
    OneDeviceSlot: (checks.BESIDE, "ms"),
    SynchronizesEverything: (checks.BESIDE, "ms"),
    TheCpuWaitsForTheStep: (checks.BESIDE, "29.0 ms"),
    StepsBehindAllCopies: (checks.BESIDE, "43.0 ms"),
    AllocatesBatches: (checks.NO_MORE, "of the device's memory"),
    PinsEachBatch: (checks.NO_MORE, "of the host's memory"),
    ReadsTheLoaderToItsEnd: (checks.LAZY, "has taken 5 batches"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_double_buffer_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    verdict = judge(find_exercise("8.2"), wrong())
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]
    assert verdict.timeline is not None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (FillsTooEarly, "event.synchronize()"),
        (AStreamWaitsWhereTheCpuMust, "the CPU itself must know"),
        (OverwritesWhatAStepReads, "its step has ended"),
        (StepsTooEarly, "before the batch is handed out"),
        (WaitsAtOnce, "only where it fills a slot again"),
        (StepsBehindAllCopies, "waits for the next one, too"),
    ],
)
def test_the_hint_names_the_edge_that_is_missing(wrong, told):
    assert told in judge(find_exercise("8.2"), wrong()).hint


class BehindAllOfTheMainStream(Slots):
    """The copy is launched before the next step, so all of the stream is not more."""

    def before_copying(self, slot):
        self.copying.wait_stream(self.main)

    def after_the_step(self, slot):
        pass


class ByQueries(Slots):
    """Asks again and again whether the copy has ended, and waits then."""

    def before_filling(self, slot):
        event = self.copied[slot]
        if event is not None and not event.query():
            event.synchronize()


def without_a_class(loader, pinned, device):
    """A queue of slots that are free, and one of batches that are ready."""
    main, copying = streams.current_stream(), streams.Stream()
    free = [(p, d, None, None) for p, d in zip(pinned, device, strict=True)]
    ready = []

    def hand_out():
        host, ours, views, copied = ready.pop(0)
        copied.wait(main)
        yield views
        free.append((host, ours, copied, main.record_event()))

    for batch in loader:
        host, ours, copied, read = free.pop(0)
        if copied is not None:
            copied.synchronize()
            read.wait(copying)
        views = lab.part(ours, batch)
        with streams.stream(copying):
            for view, slot, tensor in zip(views, host, batch, strict=True):
                slot[: len(tensor)].copy_(tensor)
                view.copy_(slot[: len(tensor)], non_blocking=True)
        ready.append((host, ours, views, copying.record_event()))
        if len(ready) == 2:
            yield from hand_out()
    if ready:
        yield from hand_out()


@pytest.mark.parametrize(
    "right",
    [Slots(), BehindAllOfTheMainStream(), ByQueries(), without_a_class],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_a_right_double_buffer_passes_however_it_is_written(right):
    verdict = judge(find_exercise("8.2"), right)
    assert verdict.passed, str(verdict)


def test_six_batches_take_29_ms():
    assert lab.feed_slots(Slots()).step_ns // 10**6 == 29
