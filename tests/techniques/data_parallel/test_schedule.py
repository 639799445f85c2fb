"""When buckets leave, on the virtual clock: order as a list, and the prompt law."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.timeline import Span


def layers() -> nn.Sequential:
    """Three matrices of 1 MiB each."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))


def step(kind: str, **settings: Any) -> None:
    model = layers()
    reducer: Any = {
        "serial": ol.SerialReducer,
        "hooks": ol.HookReducer,
        "bucketed": ol.BucketedReducer,
    }[kind](model, **settings)
    loss = model(torch.randn(512, 512)).square().mean()
    with ol.annotate("backward"):
        loss.backward()
    reducer.wait()
    with ol.annotate("after"), torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad


def spans(kind: str, **settings: Any) -> list[Span]:
    """Rank 0's matmuls and all-reduces of the backward pass, by start."""
    run = ol.run(step, kind, hardware="chalk", **settings)
    assert run.warnings == ()
    return [
        s
        for s in run.timeline.spans
        if s.rank == 0
        and s.name in ("mm", "all_reduce", "sub_")
        and s.attributes.get("label")
    ]


def order(found: list[Span]) -> list[str]:
    return [
        str(s.attributes["label"]) if s.kind == "communication" else s.name
        for s in found
    ]


def test_a_bucket_leaves_as_soon_as_it_is_full() -> None:
    # Each layer but the first makes two matmuls; its weight's comes first or second.
    assert order(spans("bucketed", bucket_mib=1.0)) == [
        "mm",
        "mm",
        "bucket 0",
        "mm",
        "mm",
        "bucket 1",
        "mm",
        "bucket 2",
        "sub_",
        "sub_",
        "sub_",
    ]


def test_serial_reduction_starts_after_the_whole_backward() -> None:
    expected = ["mm"] * 5 + ["bucket 0"] + ["sub_"] * 3
    assert order(spans("serial")) == expected


def test_two_matrices_share_a_bucket_that_holds_two() -> None:
    expected = ["mm"] * 4 + ["bucket 0", "mm", "bucket 1"] + ["sub_"] * 3
    assert order(spans("bucketed", bucket_mib=2.0)) == expected


def test_one_bucket_a_parameter_is_what_the_hook_reducer_does() -> None:
    assert order(spans("hooks")) == order(spans("bucketed", bucket_mib=1.0))


def test_nothing_but_the_wire_delays_a_full_bucket() -> None:
    found = spans("bucketed", bucket_mib=1.0)
    wire_free = 0
    for index, span in enumerate(found):
        if span.kind != "communication":
            continue
        full = max(s.end_ns for s in found[:index] if s.kind == "compute")
        flags = 1 if span.attributes["label"] == "bucket 2" else 0  # their fill, 1 ns
        assert span.start_ns == max(full, wire_free) + flags
        wire_free = span.end_ns


def test_the_update_waits_for_the_last_bucket() -> None:
    found = spans("bucketed", bucket_mib=1.0)
    last = max(s.end_ns for s in found if s.kind == "communication")
    assert min(s.start_ns for s in found if s.name == "sub_") >= last


def test_a_cap_on_what_is_in_flight_does_not_delay_the_backward() -> None:
    def matmuls(found: list[Span]) -> list[tuple[int, int]]:
        return [(s.start_ns, s.end_ns) for s in found if s.name == "mm"]

    free = spans("bucketed", bucket_mib=1.0)
    capped = spans("bucketed", bucket_mib=1.0, max_in_flight=1)
    assert matmuls(capped) == matmuls(free)


class TwoStreams(nn.Module):
    """Two branches on two streams, in one bucket (B03)."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64)
        self.two = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        here = streams.current_stream()
        outs = []
        for layer in (self.one, self.two):
            side = streams.Stream()
            side.wait_stream(here)
            with streams.stream(side):
                outs.append(layer(x))
            here.wait_stream(side)
        return outs[0].square().mean() + outs[1].square().mean()


def two_streams(max_in_flight: int | None) -> list[Tensor]:
    model = TwoStreams()
    reducer = ol.BucketedReducer(model, max_in_flight=max_in_flight)
    model(torch.randn(64, 64)).backward()
    reducer.wait()
    return [p.grad.clone() for p in model.parameters()]


def test_a_bucket_written_on_two_streams_has_no_hazard() -> None:
    for cap in (None, 1):
        run = ol.run(two_streams, cap)
        assert run.warnings == ()
        for a, b in zip(*run.values, strict=True):
            assert torch.equal(a, b)


def backward_elsewhere() -> Tensor:
    """Backward on a side stream, wait() on the default one, gradients read there."""
    model = layers()
    reducer = ol.BucketedReducer(model, bucket_mib=1.0, reduce_dtype=torch.float64)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        model(torch.randn(8, 512)).square().mean().backward()
    reducer.wait()
    return model[0].weight.grad.clone()


def test_a_wait_on_another_stream_than_the_backwards_has_no_hazard() -> None:
    run = ol.run(backward_elsewhere)
    assert run.warnings == ()
    assert torch.equal(*run.values)


def accumulated_elsewhere() -> Tensor:
    """The second micro-batch has its first gradient here, the others on a stream aside.

    Their hooks have no news; its backward is called aside, `wait()` here.
    """
    model = layers()
    reducer = ol.BucketedReducer(model, bucket_mib=1.0)
    here, side = streams.current_stream(), streams.Stream()
    with reducer.no_sync():
        model(torch.randn(8, 512)).square().mean().backward()
        side.wait_stream(here)
        with streams.stream(side):
            hidden = model[:2](torch.randn(8, 512))
        here.wait_stream(side)
        loss = model[2](hidden).square().mean()
        side.wait_stream(here)
        with streams.stream(side):
            loss.backward()
    reducer.wait()
    return model[0].weight.grad.clone()


def test_what_a_micro_batch_adds_on_another_stream_is_sent_behind_it() -> None:
    run = ol.run(accumulated_elsewhere)
    assert run.warnings == ()
    assert torch.equal(*run.values)


def unfrozen_elsewhere(max_in_flight: int | None) -> Tensor:
    """What trains again has no hook yet that knows the stream of its gradient."""
    model = layers()
    model[0].requires_grad_(False)
    reducer = ol.BucketedReducer(model, bucket_mib=1.0, max_in_flight=max_in_flight)
    model[0].requires_grad_(True)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        model(torch.randn(8, 512)).square().mean().backward()
    reducer.wait()
    return model[0].weight.grad.clone()


def test_a_parameter_that_trains_again_is_sent_behind_its_gradient() -> None:
    for cap in (None, 1):
        run = ol.run(unfrozen_elsewhere, cap)
        assert run.warnings == ()
        assert torch.equal(*run.values)


def test_runs_of_one_reducer_are_equal_to_the_last_digit() -> None:
    first, second = (
        ol.run(step, "bucketed", world_size=3, bucket_mib=1.0).timeline
        for _ in range(2)
    )
    assert first == second


def fake_step() -> None:
    model = nn.ModuleList((*layers(), nn.Linear(512, 512)))
    reducer = ol.BucketedReducer(model)
    model[0](torch.randn(8, 512)).square().mean().backward()
    reducer.wait()
    assert model[3].weight.grad is None


def test_a_representative_rank_leaves_unused_parameters_alone() -> None:
    run = ol.run(fake_step, world_size=8, fake=True)
    assert run.warnings == () and run.timeline.represents == 8
