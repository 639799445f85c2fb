"""Events: nobody waits before the record, and a record replaces the one before."""

import pytest
import torch

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.errors import EventError, RankError
from overlaplab.program import find_findings


def error_of(step) -> EventError:
    with pytest.raises(RankError) as caught:
        run_virtual(step, world_size=1)
    assert isinstance(caught.value.__cause__, EventError)
    return caught.value.__cause__


def hazards(step):
    _, program = run_virtual(step, world_size=1)
    return [f for f in find_findings(program) if f.kind == "hazard"]


def wait_on_a_stream():
    side, event = streams.Stream(), streams.Event()
    with streams.stream(side):
        event.wait()
    event.record()


def wait_of_a_stream():
    side, event = streams.Stream(), streams.Event()
    side.wait_event(event)


def wait_of_the_cpu():
    streams.Event().synchronize()


def ask():
    streams.Event().query()


@pytest.mark.parametrize(
    ("step", "who"),
    [
        (wait_on_a_stream, "stream 'stream 1'"),
        (wait_of_a_stream, "stream 'stream 1'"),
        (wait_of_the_cpu, "the CPU"),
        (ask, "the CPU"),
    ],
)
def test_a_wait_before_the_record_says_who_waits_where_and_how_to_repair(step, who):
    message = str(error_of(step))
    assert f"on rank 0, {who} waits for an event that was never recorded" in message
    assert f"in {step.__name__}" in message and "test_events.py:" in message
    assert "call event.record() on the stream of the producer before" in message


def two_producers(num_events: int):
    """B05: two streams fill halves of a buffer, a third one reads both."""
    one, two, reader = streams.Stream(), streams.Stream(), streams.Stream()
    events = [streams.Event() for _ in range(num_events)]
    flat = torch.zeros(8)
    streams.name_tensor(flat, "flat")
    for number, producer in enumerate((one, two)):
        producer.wait_stream(streams.current_stream())
        with streams.stream(producer):
            flat[4 * number : 4 * number + 4].fill_(1)
            events[number % num_events].record()
    for event in events:
        reader.wait_event(event)
    with streams.stream(reader):
        return flat * 2


def test_an_event_for_each_producer_orders_both():
    assert hazards(lambda: two_producers(2)) == []


def test_one_event_recorded_on_two_streams_keeps_the_last_and_the_first_is_missing():
    (found,) = hazards(lambda: two_producers(1))
    assert found.name == "flat"
    assert "then read: mul on stream 'stream 3'" in str(found)
    assert "first written: fill_ on stream 'stream 1'" in str(found)


def test_one_event_is_recorded_and_waited_for_in_every_step():
    def step():
        side, event = streams.Stream(), streams.Event()
        value = torch.ones(4)
        for _ in range(3):
            event.record()
            with streams.stream(side):
                event.wait()
                value.add_(1)
                event.record()
            event.wait()
            value.mul_(2)
        return value

    assert hazards(step) == []
