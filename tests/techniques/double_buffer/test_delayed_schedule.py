"""Which bucket travels under which forward and backward, on the virtual clock."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.timeline import Span

NUM_STEPS = 5
# Of the backward pass of three matrices of 1 MiB on "chalk". Computing on 256 samples
# takes longer than sending, on 32 it is over long before.
COMPUTE_BOUND, WIRE_BOUND = 256, 32
LAYER_BYTES = 2**20


def train(kind: str, batch: int, num_steps: int = NUM_STEPS, **settings: Any) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    reducer = getattr(ol, kind)(model, bucket_mib=1.0, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(num_steps):
        with streams.step(step):
            with ol.annotate(f"forward {step}"):
                loss = model(torch.randn(batch, 512)).square().mean()
            with ol.annotate(f"backward {step}"):
                loss.backward()
            reducer.wait()
            with ol.annotate(f"update {step}"):
                optimizer.step()
            optimizer.zero_grad()
    if kind == "DoubleBufferedReducer" and reducer.flush():
        with ol.annotate("last update"):
            optimizer.step()


@cache
def run_of(
    kind: str, batch: int, num_steps: int = NUM_STEPS, **settings: Any
) -> ol.Run:
    run = ol.run(train, kind, batch, num_steps, hardware="chalk", **settings)
    assert run.warnings == ()
    return run


def spans_of(kind: str, batch: int) -> list[Span]:
    """Rank 0's matmuls and messages, by start."""
    spans = run_of(kind, batch).timeline.of_rank(0).spans
    wanted = (s for s in spans if s.name in ("mm", "all_reduce") and label(s))
    return sorted(wanted, key=lambda s: s.start_ns)


def label(span: Span) -> str:
    return str(span.attributes.get("label") or "")


def messages(kind: str, batch: int) -> list[Span]:
    return [s for s in spans_of(kind, batch) if s.name == "all_reduce"]


def journeys(kind: str, batch: int, num_messages: int) -> list[str]:
    """Of the first messages: bucket, step, and what was computed meanwhile."""
    lines = []
    for message in messages(kind, batch)[:num_messages]:
        beside = dict.fromkeys(
            label(s)
            for s in spans_of(kind, batch)
            if s.kind == "compute"
            and s.start_ns < message.end_ns
            and message.start_ns < s.end_ns
        )
        step = message.attributes["step"]
        lines.append(f"{label(message)} of step {step}: {', '.join(beside)}".strip())
    return lines


def test_the_last_bucket_travels_under_the_next_forward() -> None:
    assert journeys("BucketedReducer", COMPUTE_BOUND, 6) == [
        "bucket 0 of step 0: backward 0",
        "bucket 1 of step 0: backward 0",
        "bucket 2 of step 0:",
        "bucket 0 of step 1: backward 1",
        "bucket 1 of step 1: backward 1",
        "bucket 2 of step 1:",
    ]
    assert journeys("DoubleBufferedReducer", COMPUTE_BOUND, 6) == [
        "bucket 0 of step 0: backward 0",
        "bucket 1 of step 0: backward 0",
        "bucket 2 of step 0: forward 1",
        "bucket 0 of step 1: backward 1",
        "bucket 1 of step 1: backward 1",
        "bucket 2 of step 1: forward 2",
    ]


def test_on_a_slow_link_messages_travel_under_the_whole_next_step() -> None:
    # The first two steps compute at once: step 0 has nothing to wait for.
    assert journeys("DoubleBufferedReducer", WIRE_BOUND, 9) == [
        "bucket 0 of step 0: backward 0, forward 1, backward 1",
        "bucket 1 of step 0: backward 1",
        "bucket 2 of step 0:",
        "bucket 0 of step 1: forward 2, backward 2",
        "bucket 1 of step 1: backward 2",
        "bucket 2 of step 1:",
        "bucket 0 of step 2: forward 3, backward 3",
        "bucket 1 of step 2: backward 3",
        "bucket 2 of step 2:",
    ]


def test_on_a_slow_link_the_wire_never_rests() -> None:
    found = messages("DoubleBufferedReducer", WIRE_BOUND)
    assert len(found) == 3 * NUM_STEPS
    for before, after in pairwise(found):
        assert after.start_ns == before.end_ns


def test_a_step_is_as_long_as_the_longer_of_computing_and_sending() -> None:
    def step_ns(kind: str, batch: int) -> int:
        """From the last message of a step to that of the next."""
        (*_, third, fourth) = messages(kind, batch)[2:-3:3]
        return fourth.end_ns - third.end_ns

    wire_bound = messages("DoubleBufferedReducer", WIRE_BOUND)[3:6]
    sending_ns = sum(s.end_ns - s.start_ns for s in wire_bound)
    assert step_ns("DoubleBufferedReducer", WIRE_BOUND) == sending_ns
    assert step_ns("BucketedReducer", WIRE_BOUND) > 1.15 * sending_ns
    matmuls = [s for s in spans_of("DoubleBufferedReducer", COMPUTE_BOUND)]
    computing_ns = sum(s.end_ns - s.start_ns for s in matmuls if s.kind == "compute")
    # Less than 3 % for the loss and the update.
    assert step_ns("DoubleBufferedReducer", COMPUTE_BOUND) < (
        1.03 * computing_ns / NUM_STEPS
    )


def test_the_next_forward_waits_for_the_step_before_and_not_for_this_one() -> None:
    spans = spans_of("DoubleBufferedReducer", WIRE_BOUND)

    def begin_ns(what: str) -> int:
        return min(s.start_ns for s in spans if label(s) == what)

    def end_ns(step: int) -> int:
        """Of its last message."""
        own = [s for s in spans if s.attributes["step"] == step]
        return max(s.end_ns for s in own if s.name == "all_reduce")

    for step in range(1, NUM_STEPS - 1):
        forward_ns = begin_ns(f"forward {step + 1}")
        assert end_ns(step - 1) <= forward_ns < end_ns(step)


def memory_of(kind: str, num_steps: int, **settings: Any) -> tuple[int, int]:
    """Bytes of gradients where they are most, and all bytes at their peak."""
    run = run_of(kind, WIRE_BOUND, num_steps, **settings)
    (memory,) = run.timeline.of_rank(0).memory
    return max(dict(memory.kinds)["gradients"]), memory.peak_bytes


def test_there_are_two_sets_of_gradients_however_long_it_trains() -> None:
    set_bytes = 3 * LAYER_BYTES
    one, peak = memory_of("BucketedReducer", NUM_STEPS)
    assert one == set_bytes
    for num_steps in (2, NUM_STEPS, 12):
        two, higher = memory_of("DoubleBufferedReducer", num_steps)
        assert two == 2 * set_bytes
        # And the flags of the last bucket of the step before.
        assert set_bytes <= higher - peak < set_bytes + 100


def extra_bytes(**settings: Any) -> int:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    return ol.DoubleBufferedReducer(model, **settings).extra_bytes


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_what_it_says_that_it_costs_is_what_the_peak_grows_by(
    reduce_dtype: torch.dtype | None,
) -> None:
    (said,) = ol.run(extra_bytes, world_size=1, reduce_dtype=reduce_dtype).values
    one, two = (
        memory_of(kind, NUM_STEPS, reduce_dtype=reduce_dtype)[1]
        for kind in ("BucketedReducer", "DoubleBufferedReducer")
    )
    assert said <= two - one < said + 100


def on_another_stream(reduce_dtype: torch.dtype | None) -> Tensor:
    """Forward and backward on a side stream; `wait()` and the optimizer on this one."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=1.0, reduce_dtype=reduce_dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    here, side = streams.current_stream(), streams.Stream()
    for _ in range(4):
        side.wait_stream(here)
        with streams.stream(side):
            model(torch.randn(32, 512)).square().mean().backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
    reducer.remove()
    return model[0].weight.detach().clone()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_the_optimizer_may_be_on_another_stream_than_the_backward(
    reduce_dtype: torch.dtype | None,
) -> None:
    run = ol.run(on_another_stream, reduce_dtype)
    assert run.warnings == ()
    assert torch.equal(*run.values)
