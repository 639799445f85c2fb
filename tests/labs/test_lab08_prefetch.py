"""8.1: batches come ahead, on a stream of their own, in order and none of them lost."""

from __future__ import annotations

import pytest

import overlaplab as ol
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab08 import feed_checks as checks
from overlaplab_course.lab08 import given


class Prefetch:
    """One batch ahead, with seams."""

    depth = 1

    def __call__(self, loader):
        self.main, self.copying = streams.current_stream(), streams.Stream()
        ahead = []
        for batch in loader:
            ahead.append(self.load(batch))
            if len(ahead) > self.depth:
                yield self.ready(*ahead.pop(0))
        while ahead:
            yield self.ready(*ahead.pop(0))

    def load(self, batch):
        with streams.stream(self.copying):
            return self.copy(batch), self.copying.record_event()

    def copy(self, batch):
        return tuple(t.to(ol.device(), non_blocking=True) for t in batch)

    def ready(self, batch, copied):
        self.main.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(self.main)
        return batch


class InTurn(Prefetch):
    def __call__(self, loader):
        for batch in loader:
            yield self.copy(batch)


class AfterTheStep(Prefetch):
    """The copy is launched when the loop asks: the step before has ended then."""

    depth = 0


class OnTheMainStream(Prefetch):
    def load(self, batch):
        return self.copy(batch), self.main.record_event()


class Blocking(Prefetch):
    def copy(self, batch):
        return tuple(t.to(ol.device()) for t in batch)


class TheCpuWaits(Prefetch):
    def ready(self, batch, copied):
        copied.synchronize()
        return super().ready(batch, copied)


class NobodyWaits(Prefetch):
    def ready(self, batch, copied):
        for tensor in batch:
            tensor.record_stream(self.main)
        return batch


class AnEventBeforeTheCopy(Prefetch):
    def load(self, batch):
        event = self.copying.record_event()
        with streams.stream(self.copying):
            return self.copy(batch), event


class ForgetsTheAllocator(Prefetch):
    def ready(self, batch, copied):
        self.main.wait_event(copied)
        return batch


class RemembersOneTensorOfTwo(Prefetch):
    def ready(self, batch, copied):
        self.main.wait_event(copied)
        batch[0].record_stream(self.main)
        return batch


class LosesTheLast(Prefetch):
    def __call__(self, loader):
        batches = list(super().__call__(loader))
        yield from batches[:-1]


class TheLastTwice(Prefetch):
    def __call__(self, loader):
        batch = None
        for batch in super().__call__(loader):
            yield batch
        if batch is not None:
            yield batch


class OneBehind(Prefetch):
    """Yields what it has just loaded, and the one ahead at the end."""

    def __call__(self, loader):
        self.main, self.copying = streams.current_stream(), streams.Stream()
        first = None
        for batch in loader:
            loaded = self.load(batch)
            if first is None:
                first = loaded
                continue
            yield self.ready(*loaded)
        if first is not None:
            yield self.ready(*first)


class AllOfTheFirstSize(Prefetch):
    """The last batch padded to the size of the others."""

    def copy(self, batch):
        self.rows = getattr(self, "rows", [len(t) for t in batch])
        ours = super().copy(batch)
        return tuple(
            t.new_zeros(rows, t.shape[1]).index_copy_(0, _range(t), t)
            if len(t) < rows
            else t
            for t, rows in zip(ours, self.rows, strict=True)
        )


def _range(tensor):
    import torch

    return torch.arange(len(tensor), device=tensor.device)


class ThreeAhead(Prefetch):
    depth = 3


class Everything(Prefetch):
    def __call__(self, loader):
        return super().__call__(list(loader))


class EachStepBehindTheNextCopy(Prefetch):
    """wait_stream before a step: it waits for what was launched ahead of it, too."""

    def ready(self, batch, copied):
        self.main.wait_stream(self.copying)
        return super().ready(batch, copied)


class EachCopyBehindTheLastStep(Prefetch):
    """wait_stream after the launch of the step: no copy runs beside it."""

    def __call__(self, loader):
        self.main, self.copying = streams.current_stream(), streams.Stream()
        for batch in loader:
            self.copying.wait_stream(self.main)
            yield self.ready(*self.load(batch))


WRONG = {
    InTurn: (checks.SHORT, "ms"),
    AfterTheStep: (checks.SHORT, "ms"),
    OnTheMainStream: (checks.SHORT, "ms"),
    EachCopyBehindTheLastStep: (checks.SHORT, "ms"),
    Blocking: (checks.FREE_CPU, "the CPU waits in"),
    TheCpuWaits: (checks.FREE_CPU, "event.synchronize"),
    NobodyWaits: (checks.SAFE, "step 0"),
    AnEventBeforeTheCopy: (checks.SAFE, "step 0"),
    ForgetsTheAllocator: (checks.SAFE, "handed out again"),
    RemembersOneTensorOfTwo: (checks.SAFE, "handed out again"),
    LosesTheLast: (checks.OWN, "ran 4 steps"),
    TheLastTwice: (checks.OWN, "ran 6 steps"),
    OneBehind: (checks.OWN, "saw another batch"),
    AllOfTheFirstSize: (checks.OWN, "step 4 on rank 0 saw another batch, or not"),
    ThreeAhead: (checks.LEAN, "has taken 3 batches ahead"),
    Everything: (checks.LEAN, "has taken 4 batches ahead"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_prefetcher_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    verdict = judge(find_exercise("8.1"), wrong())
    found = faults(verdict)
    assert sentence in found, str(verdict)
    assert reason in found[sentence]
    assert verdict.timeline is not None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (InTurn, "on the stream of the steps"),
        (AfterTheStep, "before you yield"),
        (Blocking, "non_blocking=True"),
        (TheCpuWaits, "synchronize makes the CPU wait"),
        (NobodyWaits, "what must the current stream wait for"),
        (RemembersOneTensorOfTwo, "for every tensor of it"),
        (EachStepBehindTheNextCopy, "waits for the next batch's, too"),
    ],
)
def test_the_hint_names_what_is_missing(wrong, told):
    assert told in judge(find_exercise("8.1"), wrong()).hint


class TwoAhead(Prefetch):
    depth = 2


class IntoTwoSlotsOfItsOwn(Prefetch):
    """Two batches on the device that are written in turn: no allocator, no record."""

    def __call__(self, loader):
        self.slots, self.read, self.count = [None, None], [None, None], 0
        for number, batch in enumerate(super().__call__(loader)):
            yield batch
            self.read[number % 2] = self.main.record_event()

    def copy(self, batch):
        slot, self.count = self.count % 2, self.count + 1
        if self.slots[slot] is None:
            self.slots[slot] = super().copy(batch)
            return self.slots[slot]
        if self.read[slot] is not None:
            self.copying.wait_event(self.read[slot])
        for target, tensor in zip(self.slots[slot], batch, strict=True):
            target[: len(tensor)].copy_(tensor, non_blocking=True)
        slots = zip(self.slots[slot], batch, strict=True)
        return tuple(target[: len(tensor)] for target, tensor in slots)

    def ready(self, batch, copied):
        self.main.wait_event(copied)
        return batch


def recursion(loader):
    """An iterator that is asked in two places, and no loop over the loader."""
    main, copying, batches = streams.current_stream(), streams.Stream(), iter(loader)

    def following():
        batch = next(batches, None)
        if batch is None:
            return None
        with streams.stream(copying):
            ours = [t.to(ol.device(), non_blocking=True) for t in batch]
        return ours, copying.record_event()

    now = following()
    while now is not None:
        (ours, event), now = now, following()
        event.wait(main)
        for tensor in ours:
            tensor.record_stream(main)
        yield tuple(ours)


@pytest.mark.parametrize(
    "right",
    [Prefetch(), TwoAhead(), IntoTwoSlotsOfItsOwn(), recursion],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_a_right_prefetcher_passes_however_it_is_written(right):
    verdict = judge(find_exercise("8.1"), right)
    assert verdict.passed, str(verdict)


def test_the_lessons_two_loops_take_34_and_23_ms():
    steps_ms = [given.feed(f()).step_ns // 10**6 for f in (InTurn, Prefetch)]
    assert steps_ms == [34, 23]
