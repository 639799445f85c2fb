"""3.1: two streams are judged by what they did, whatever code made them."""

from __future__ import annotations

import pytest

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03 import checks
from overlaplab_course.lab03.jobs import COMPUTE, backward_job, drawn_job, play
from overlaplab_course.lab03.reference import issue as plain_issue


class Issue:
    """A right solution with seams where the wrong ones differ."""

    def __call__(self, tasks):
        self.compute, self.wire = streams.current_stream(), streams.Stream()
        self.begin()
        self.ended = {}
        for task in tasks:
            own = self.compute if task.on == COMPUTE else self.wire
            self.order(own, task)
            with streams.stream(own):
                self.launch(own, task)
        self.end()

    def begin(self):
        self.wire.wait_stream(self.compute)

    def order(self, own, task):
        for name in task.needs:
            own.wait_event(self.ended[name])

    def launch(self, own, task):
        task.run()
        self.ended[task.name] = own.record_event()

    def end(self):
        self.compute.wait_stream(self.wire)


class OneStream(Issue):
    def __call__(self, tasks):
        for task in tasks:
            task.run()


class WaitsForTheWholeStream(Issue):
    def order(self, own, task):
        own.wait_stream(self.wire if own is self.compute else self.compute)


class WaitsForTheWholeStreamIfItNeedsOne(Issue):
    def order(self, own, task):
        if task.needs:
            own.wait_stream(self.wire if own is self.compute else self.compute)


class NoWaits(Issue):
    def order(self, own, task):
        pass


class ForgetsTheContext(Issue):
    """Events and all, but every task is launched on the caller's stream."""

    def __call__(self, tasks):
        compute, wire, ended = streams.current_stream(), streams.Stream(), {}
        for task in tasks:
            own = compute if task.on == COMPUTE else wire
            for name in task.needs:
                own.wait_event(ended[name])
            task.run()
            ended[task.name] = own.record_event()


class NoBegin(Issue):
    def begin(self):
        pass


class NoEnd(Issue):
    def end(self):
        pass


class RecordsTooEarly(Issue):
    def launch(self, own, task):
        self.ended[task.name] = own.record_event()
        task.run()


class OneEventForAll(Issue):
    """Recorded anew behind each task: it stands for the last one only."""

    def begin(self):
        super().begin()
        self.event = streams.Event()

    def order(self, own, task):
        if task.needs:
            own.wait_event(self.event)

    def launch(self, own, task):
        task.run()
        self.event.record()


class WrongStreamWaits(Issue):
    """The caller's stream is the one that waits."""

    def order(self, own, task):
        for name in task.needs:
            self.ended[name].wait()


class CpuWaitsForEachNeed(Issue):
    def order(self, own, task):
        for name in task.needs:
            self.ended[name].synchronize()


class SynchronizesAtTheEnd(Issue):
    def end(self):
        streams.synchronize()


class ForgetsTheLast(Issue):
    def __call__(self, tasks):
        super().__call__(tasks[:-1])


class RunsTwice(Issue):
    def launch(self, own, task):
        super().launch(own, task)
        if task.on != COMPUTE:
            super().launch(own, task)


class RunsOneTwice(Issue):
    """Where there is time for it: only the last update of the lesson's job."""

    def launch(self, own, task):
        super().launch(own, task)
        if task.name == "opt 1":
            super().launch(own, task)


class AStreamForEachTask(Issue):
    """Kernels that could run in turn share the GPU: the one that matters is late."""

    def __call__(self, tasks):
        caller, self.ended, used = streams.current_stream(), {}, []
        for task in tasks:
            own = streams.Stream()
            own.wait_stream(caller)
            used.append(own)
            self.order(own, task)
            with streams.stream(own):
                self.launch(own, task)
        for stream in used:
            caller.wait_stream(stream)


WRONG = {
    OneStream: (checks.SHORT_STEPS, "29.0 ms, as on one stream"),
    WaitsForTheWholeStream: (checks.SHORT_STEPS, "29.0 ms, as on one stream"),
    WaitsForTheWholeStreamIfItNeedsOne: (checks.SHORT_STEPS, "the step took 29.0 ms"),
    NoWaits: (checks.SAFE, "does not wait for"),
    NoBegin: (checks.SAFE, "input"),
    NoEnd: (checks.SAFE, "collect"),
    RecordsTooEarly: (checks.SAFE, "back 4"),
    OneEventForAll: (checks.SHORT_STEPS, "something waits for too much"),
    AStreamForEachTask: (checks.SHORT_STEPS, "the step took 20.0 ms"),
    WrongStreamWaits: (checks.SAFE, "stream 1"),
    CpuWaitsForEachNeed: (checks.FREE_CPU, "the CPU waits in event.synchronize"),
    SynchronizesAtTheEnd: (checks.FREE_CPU, "the CPU waits in synchronize"),
    ForgetsTheLast: (checks.ALL_RUN, "the result of opt 1 is wrong"),
    RunsTwice: (checks.ALL_RUN, "ran 'send 4' 2 times"),
    RunsOneTwice: (checks.ALL_RUN, "ran 'opt 1' 2 times"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda c: c.__name__)
def test_a_wrong_issue_is_refused_for_its_own_reason(wrong, faults):
    sentence, reason = WRONG[wrong]
    found = faults(judge(find_exercise("3.1"), wrong()))
    assert sentence in found
    assert reason in found[sentence]


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (NoBegin, "the caller's stream still writes the input"),
        (NoEnd, "the caller reads the results on its own stream"),
        (RecordsTooEarly, "is it recorded after the task"),
        (ForgetsTheContext, "all tasks ran on 'default': which stream is current"),
        (WaitsForTheWholeStream, "an event waits for one task"),
    ],
    ids=lambda c: getattr(c, "__name__", ""),
)
def test_the_hint_names_the_edge_that_is_missing_or_too_much(wrong, hint):
    assert hint in judge(find_exercise("3.1"), wrong()).hint


class TwoPasses(Issue):
    """Works out the fewest waits first; none within a stream."""

    def __call__(self, tasks):
        self.on = {task.name: task.on for task in tasks}
        self.at = {task.name: place for place, task in enumerate(tasks)}
        super().__call__(tasks)

    def order(self, own, task):
        other = [name for name in task.needs if self.on[name] != task.on]
        if other:  # the last of them is behind the others
            own.wait_event(self.ended[max(other, key=self.at.get)])


class EventsOfOneStreamOnly(Issue):
    """Waits are written inside the block, with Event.wait and Event.record."""

    def launch(self, own, task):
        for name in task.needs:
            self.ended[name].wait()
        event = self.ended[task.name] = streams.Event()
        task.run()
        event.record()

    def order(self, own, task):
        pass


class BehindAnEventAtBothEnds(Issue):
    def begin(self):
        self.wire.wait_event(self.compute.record_event())

    def end(self):
        self.compute.wait_event(self.wire.record_event())


def recursive(tasks):
    wire, caller = streams.Stream(priority=-1), streams.current_stream()
    wire.wait_stream(caller)

    def rest(number, ended):
        if number == len(tasks):
            return caller.wait_stream(wire)
        task = tasks[number]
        own = {"compute": caller, "wire": wire}[task.on]
        with own:
            [own.wait_event(ended[name]) for name in task.needs]
            task.run()
        return rest(number + 1, {**ended, task.name: own.record_event()})

    rest(0, {})


@pytest.mark.parametrize(
    "right",
    [
        Issue(),
        TwoPasses(),
        EventsOfOneStreamOnly(),
        BehindAnEventAtBothEnds(),
        recursive,
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_a_right_issue_passes_however_it_is_written(right):
    verdict = judge(find_exercise("3.1"), right)
    assert verdict.passed, str(verdict)
    assert verdict.step_ns == verdict.target_ns


@pytest.mark.parametrize("seed", checks.SEEDS)
def test_on_each_random_job_waiting_for_streams_loses_a_tenth(seed):
    job = drawn_job(seed)
    best = play(job, plain_issue).step_ns
    for slow in (OneStream(), WaitsForTheWholeStreamIfItNeedsOne()):
        assert play(job, slow).step_ns > 1.1 * best


def test_the_lessons_job_takes_29_ms_in_turn_and_19_with_events():
    job = backward_job()
    steps_ms = [play(job, f()).step_ns // 10**6 for f in (OneStream, Issue)]
    assert steps_ms == [29, 19]
