"""3.3: a repair mends the race and keeps the overlap; a diagnosis is the run's own."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03 import checks
from overlaplab_course.lab03.given import Case

NUMBERS = (3, 11)  # and 4, on which 3 is tried, too


# -- 3.3a


class Flat:
    """Packs on a side stream, like the lab's, with seams."""

    def __call__(self, layers):
        self.packing = streams.Stream()
        self.works = []
        for layer in layers:
            layer.backward()
            if len(layer.grads) > 1:
                self.pack(layer)
                self.send_packed(layer)
            else:
                self.send(layer)
        for work in self.works:
            work.wait()

    def pack(self, layer):
        self.packing.wait_stream(streams.current_stream())
        with streams.stream(self.packing):
            layer.pack()

    def send_packed(self, layer):
        self.send(layer)

    def send(self, layer):
        self.works.append(dist.all_reduce(layer.flat, async_op=True))


class RecordStreamOnly(Flat):
    def send_packed(self, layer):
        layer.flat.record_stream(self.packing)
        self.send(layer)


class EventBeforeThePacking(Flat):
    def pack(self, layer):
        self.packing.wait_stream(streams.current_stream())
        self.event = self.packing.record_event()
        with streams.stream(self.packing):
            layer.pack()

    def send_packed(self, layer):
        streams.current_stream().wait_event(self.event)
        self.send(layer)


class PackingWaitsForNobody(Flat):
    def pack(self, layer):
        with streams.stream(self.packing):
            layer.pack()
            self.send(layer)

    def send_packed(self, layer):
        pass


class SynchronizesEverything(Flat):
    def send_packed(self, layer):
        streams.synchronize()
        self.send(layer)


class CpuWaitsForThePacking(Flat):
    def send_packed(self, layer):
        self.packing.synchronize()
        self.send(layer)


class WaitsInTheLoop(Flat):
    def send(self, layer):
        super().send(layer)
        self.works[-1].wait()

    def send_packed(self, layer):
        streams.current_stream().wait_stream(self.packing)
        self.send(layer)


class SendsAllAtTheEnd(Flat):
    def __call__(self, layers):
        for layer in layers:
            layer.backward()
            if len(layer.grads) > 1:
                layer.pack()
        works = [dist.all_reduce(x.flat, async_op=True) for x in layers]
        for work in works:
            work.wait()


class NeverPacks(Flat):
    def pack(self, layer):
        pass


class MainWaitsForThePacking(Flat):
    def send_packed(self, layer):
        streams.current_stream().wait_stream(self.packing)
        self.send(layer)


class MainWaitsForAnEvent(Flat):
    def send_packed(self, layer):
        streams.current_stream().wait_event(self.packing.record_event())
        self.send(layer)


class PacksOnTheMainStream(Flat):
    def pack(self, layer):
        layer.pack()


WRONG_FLAT = {
    Flat: (checks.SAFE, "all_reduce"),
    RecordStreamOnly: (checks.SAFE, "all_reduce"),
    EventBeforeThePacking: (checks.SAFE, "all_reduce"),
    PackingWaitsForNobody: (checks.SAFE, "does not wait for"),
    SynchronizesEverything: (checks.FREE_CPU, "the CPU waits in synchronize"),
    CpuWaitsForThePacking: (checks.FREE_CPU, "stream.synchronize"),
    WaitsInTheLoop: (checks.OVERLAP_KEPT, "the step took"),
    SendsAllAtTheEnd: (checks.OVERLAP_KEPT, "the step took"),
    NeverPacks: (checks.VALUES, "flat"),
    MainWaitsForThePacking: (checks.OVERLAP_KEPT, "the step took"),
    MainWaitsForAnEvent: (checks.OVERLAP_KEPT, "the step took"),
    PacksOnTheMainStream: (checks.OVERLAP_KEPT, "the step took"),
}


class FromThePackingStream(Flat):
    def send_packed(self, layer):
        with streams.stream(self.packing):
            self.send(layer)


class FromAStreamForMessages(Flat):
    def __call__(self, layers):
        self.sending = streams.Stream()
        super().__call__(layers)

    def send_packed(self, layer):
        self.sending.wait_event(self.packing.record_event())
        with streams.stream(self.sending):
            self.send(layer)


# -- 3.3b


class Towers:
    def __call__(self, towers):
        self.main, self.events, self.sides = streams.current_stream(), [], []
        for tower in towers:
            side = streams.Stream()
            self.sides.append(side)
            self.fork(side)
            with streams.stream(side):
                tower.fetch()
                tower.forward()
                self.events.append(side.record_event())
            self.inside()
        self.join()

    def fork(self, side):
        side.wait_stream(self.main)

    def inside(self):
        pass

    def join(self):
        for event in self.events:
            self.main.wait_event(event)


class WaitsForTheLast(Towers):
    def join(self):
        self.main.wait_event(self.events[-1])


class WaitsForTheFirst(Towers):
    def join(self):
        self.main.wait_event(self.events[0])


class WaitsInside(Towers):
    def inside(self):
        self.main.wait_event(self.events[-1])


class JoinsWithTheCpu(Towers):
    def join(self):
        for event in self.events:
            event.synchronize()


class SynchronizesBetween(Towers):
    def inside(self):
        streams.synchronize()


class TowersInTurn(Towers):
    def __call__(self, towers):
        for tower in towers:
            tower.fetch()
            tower.forward()


class ForwardOnly(Towers):
    def __call__(self, towers):
        super().__call__(towers[:1])


WRONG_EVENT = {
    WaitsForTheLast: (checks.SAFE, "combine"),
    WaitsForTheFirst: (checks.SAFE, "combine"),
    WaitsInside: (checks.OVERLAP_KEPT, "the step took"),
    JoinsWithTheCpu: (checks.FREE_CPU, "event.synchronize"),
    SynchronizesBetween: (checks.OVERLAP_KEPT, "the step took"),
    TowersInTurn: (checks.OVERLAP_KEPT, "the step took"),
    ForwardOnly: (checks.VALUES, "is wrong"),
}


class WaitsForStreams(Towers):
    def join(self):
        for side in self.sides:
            self.main.wait_stream(side)


class OneSideChainsTheOther(Towers):
    """The last side stream waits for the others, the main stream for it alone."""

    def join(self):
        for event in self.events:
            self.sides[-1].wait_event(event)
        self.main.wait_stream(self.sides[-1])


# -- 3.3c


class Train:
    def __call__(self, batches, step):
        self.loading, self.compute = streams.Stream(), streams.current_stream()
        self.kept = []
        for host in batches:
            self.before()
            with streams.stream(self.loading):
                batch = host.to(ol.device(), non_blocking=True)
            self.order(batch)
            step(batch)
            self.after(batch)

    def before(self):
        pass

    def order(self, batch):
        self.compute.wait_stream(self.loading)

    def after(self, batch):
        pass


class RecordsTheWrongStream(Train):
    def order(self, batch):
        super().order(batch)
        batch.record_stream(self.loading)


class NoOrderAtAll(Train):
    def order(self, batch):
        batch.record_stream(self.compute)


class LoadingWaitsForTheStep(Train):
    def before(self):
        self.loading.wait_stream(self.compute)


class LoadsOnTheMainStream(Train):
    def __call__(self, batches, step):
        for host in batches:
            step(host.to(ol.device(), non_blocking=True))


class KeepsThemAll(Train):
    def after(self, batch):
        self.kept.append(batch)


class SynchronizesEachStep(Train):
    def after(self, batch):
        streams.synchronize()


class SkipsTheLast(Train):
    def __call__(self, batches, step):
        class Recording(Train):
            def order(self, batch):
                super().order(batch)
                batch.record_stream(self.compute)

        Recording()(batches[:-1], step)


WRONG_REUSE = {
    Train: (checks.SAFE, "is handed out again"),
    RecordsTheWrongStream: (checks.SAFE, "is handed out again"),
    NoOrderAtAll: (checks.SAFE, "two streams use"),
    LoadingWaitsForTheStep: (checks.OVERLAP_KEPT, "the step took"),
    LoadsOnTheMainStream: (checks.OVERLAP_KEPT, "the step took"),
    KeepsThemAll: (checks.LEAN, "holds 6 batches"),
    SynchronizesEachStep: (checks.FREE_CPU, "the CPU waits in synchronize"),
    SkipsTheLast: (checks.VALUES, "step 6 is wrong"),
}


class RecordsTheStream(Train):
    def order(self, batch):
        super().order(batch)
        batch.record_stream(self.compute)


class KeepsTwoBehindAnEvent(Train):
    """No record_stream: a batch goes when loading is behind the step that read it."""

    def after(self, batch):
        self.kept.append((batch, self.compute.record_event()))
        del batch
        if len(self.kept) == 2:
            _, read = self.kept[0]
            self.loading.wait_event(read)
            del self.kept[0]


# -- all of them

CASES = {
    "3.3a": (WRONG_FLAT, [FromThePackingStream, FromAStreamForMessages]),
    "3.3b": (WRONG_EVENT, [Towers, WaitsForStreams, OneSideChainsTheOther]),
    "3.3c": (WRONG_REUSE, [RecordsTheStream, KeepsTwoBehindAnEvent]),
}
WRONG = [(e, w) for e, (wrong, _) in CASES.items() for w in wrong]
RIGHT = [(e, r) for e, (_, right) in CASES.items() for r in right]


def diagnosis(exercise, number):
    truth = dict(checks.REPAIRS[exercise].truth(number))
    return {k: min(v) if isinstance(v, frozenset) else v for k, v in truth.items()}


def graded(exercise, number, program, said=None):
    said = diagnosis(exercise, number) if said is None else said
    return judge(find_exercise(exercise), number, said, program)


@pytest.mark.parametrize(("exercise", "wrong"), WRONG, ids=lambda x: str(x)[-24:])
def test_a_wrong_repair_is_refused_for_its_own_reason(exercise, wrong, faults):
    sentence, reason = CASES[exercise][0][wrong]
    found = faults(graded(exercise, 3, wrong()))
    assert sentence in found
    assert reason in found[sentence]


@pytest.mark.parametrize(("exercise", "right"), RIGHT, ids=lambda x: str(x)[-24:])
def test_a_right_repair_passes_for_every_number(exercise, right):
    for number in NUMBERS:
        verdict = graded(exercise, number, right())
        assert verdict.passed, f"{number}: {verdict}"


@pytest.mark.parametrize("exercise", CASES)
def test_every_field_of_a_diagnosis_counts(exercise, faults):
    right = diagnosis(exercise, 3)
    program = CASES[exercise][1][0]
    for key in right:
        found = faults(graded(exercise, 3, program(), {**right, key: None}))
        assert list(found) == [checks.DIAGNOSIS]
        assert key in found[checks.DIAGNOSIS]


@pytest.mark.parametrize("exercise", CASES)
def test_the_first_finding_as_handed_out_shows_the_diagnosis_for_every_number(exercise):
    seen = set()
    for number in range(12):
        case = Case(exercise, number)
        said, findings = diagnosis(exercise, number), case.as_handed_out().findings
        assert findings, f"number {number} shows nothing"
        first = str(findings[0])
        assert f"'{said['tensor']}'" in first
        assert findings[0].rank == said.get("rank", 0)
        for key in ("packed_on", "overwritten_by"):
            assert key not in said or f"'{said[key]}'" in first
        seen.add(str(said))
    assert len(seen) > 1, "every number has the same diagnosis"
