"""A captured step of micro-batches is the eager one; CUDA's graph is a stand-in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import overlaplab as ol
from overlaplab import capture
from overlaplab.capture import CapturedStep
from overlaplab.models.toy_nets import WIDTH, Mlp, random_batch
from overlaplab.step_members import StepMember
from tests.guards import GUARD_S

on_both = pytest.mark.parametrize("cluster", ["virtual", "gloo"])
NUM_CALLS, NUM_MICRO = 5, 3


class Graph:
    """The capture has run the step, so the first replay does nothing; others run it."""

    def __init__(self) -> None:
        self.run: Callable[[], object] = lambda: None
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        if self.num_replays > 1:
            self.run()

    def reset(self) -> None: ...


@contextlib.contextmanager
def capturing(graph: Graph, **_: Any) -> Iterator[None]:
    yield


def listen(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return step(*args, **kwargs), []


_here = threading.local()


def members() -> Iterator[StepMember]:
    """Of this rank: on the virtual cluster the package's hold those of all ranks."""
    return iter([_here.reducer])


def captured_on_cpu(step: Callable[..., Any]) -> Callable[..., Any]:
    """`ol.capture_step(step)`, as far as it is not CUDA's."""
    captured = CapturedStep(step, num_warmup=2)

    def run(*args: Any) -> Any:
        graph = captured._graph
        if isinstance(graph, Graph):
            graph.run = lambda: step(*captured._inputs)
        return captured(*args)

    return run


def train(captured: bool, set_to_none: bool) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    model = Mlp()
    reducer = _here.reducer = ol.BucketedReducer(model, bucket_mib=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(batches: Tensor) -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        *first, last = batches
        with reducer.no_sync():
            for micro in first:
                model(micro).backward()
        model(last).backward()
        reducer.wait()
        optimizer.step()

    run = captured_on_cpu(step) if captured else step
    for index in range(NUM_CALLS):
        run(random_batch(dist.get_rank(), index, NUM_MICRO, WIDTH).transpose(0, 1))
    assert reducer.num_steps == NUM_CALLS
    return [p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", Graph),
        mock.patch.object(torch.cuda, "graph", capturing),
        mock.patch.object(capture, "_listen_for_syncs", listen),
        mock.patch.object(capture, "members", members),
    ):
        yield


def train_on_cpu(*args: bool) -> list[Tensor]:
    """In a process of its own."""
    with on_cpu():
        return train(*args)


@on_both
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_captured_windows_end_where_eager_ones_do(
    cluster: str, ranks: int, set_to_none: bool
) -> None:
    virtual = cluster == "virtual"

    def run(captured: bool) -> ol.Run:
        with on_cpu() if virtual else contextlib.nullcontext():
            return ol.run(
                train if virtual else train_on_cpu,
                captured,
                set_to_none,
                world_size=ranks,
                cluster=cluster,
                timeout_s=GUARD_S,
            )

    eager, captured = run(False), run(True)
    assert captured.warnings == ()
    for ours, theirs in zip(captured.values, eager.values, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
