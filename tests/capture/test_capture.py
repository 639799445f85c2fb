"""Capture watches whatever takes part in steps; CUDA's graph is a stand-in here."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab import capture, step_members
from overlaplab.capture import CapturedStep
from overlaplab.errors import CaptureError


class Sharder:
    """Takes part in a step as a reducer does, and is none."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.num_steps = 0
        self.abandoned = 0
        step_members.join(self)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("weight", self.parameter)]

    def abandon_step(self) -> None:
        self.abandoned += 1

    def end_step(self) -> None:
        self.num_steps += 1


class Graph:
    """Replays nothing and counts."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None: ...


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def capturing(graph: Graph, **_: Any) -> Iterator[None]:
        yield

    def listen(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return step(*args, **kwargs), []

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(capture, "_listen_for_syncs", listen)


@pytest.fixture
def sharder() -> Sharder:
    return Sharder(nn.Parameter(torch.ones(2)))


def run(step: Callable[[], None], *, num_calls: int) -> CapturedStep[[], None]:
    captured = CapturedStep(step, num_warmup=2)
    for _ in range(num_calls):
        captured()
    return captured


def test_a_member_that_ends_one_step_per_call_is_captured(sharder: Sharder) -> None:
    assert run(sharder.end_step, num_calls=4).captured
    assert sharder.num_steps == 3  # two to warm up, one captured; replays run no Python


def test_a_member_that_ends_two_steps_in_the_captured_one_is_refused(
    sharder: Sharder,
) -> None:
    def step() -> None:
        sharder.end_step()
        if sharder.num_steps > 2:
            sharder.end_step()

    with pytest.raises(CaptureError, match="Sharder finished 2 steps") as refused:
        run(step, num_calls=3)
    assert "expected 1" in str(refused.value)


def test_a_member_whose_step_breaks_in_the_capture_gives_it_up(
    sharder: Sharder,
) -> None:
    def step() -> None:
        sharder.end_step()
        if sharder.num_steps == 3:
            raise RuntimeError("no such kernel\nmore")

    with pytest.raises(CaptureError, match=r"cannot be captured: no such kernel$"):
        run(step, num_calls=3)
    assert sharder.abandoned == 1


def test_the_gradients_of_a_member_must_stay_where_they_were(sharder: Sharder) -> None:
    sharder.parameter.grad = torch.ones(2)
    captured = run(sharder.end_step, num_calls=3)
    sharder.parameter.grad = torch.ones(2)
    with pytest.raises(CaptureError, match=r"weight\.grad is another tensor"):
        captured()


def test_a_member_that_the_step_does_not_use_is_not_watched(sharder: Sharder) -> None:
    captured = run(lambda: None, num_calls=3)
    sharder.parameter.grad = torch.ones(2)
    captured()
    assert sharder.num_steps == 0


def test_what_is_no_member_is_refused_with_what_it_lacks() -> None:
    class Half:
        num_steps = 0

        def abandon_step(self) -> None: ...

    half: Any = Half()
    with pytest.raises(TypeError, match=r"Half .* it has no named_parameters"):
        step_members.join(half)


def test_a_member_leaves_when_it_says_so_and_when_nobody_needs_it() -> None:
    gc.collect()  # what other tests left behind
    before = len(list(step_members.members()))
    staying = Sharder(nn.Parameter(torch.ones(1)))
    Sharder(nn.Parameter(torch.ones(1)))
    gc.collect()
    assert len(list(step_members.members())) == before + 1
    step_members.leave(staying)
    assert len(list(step_members.members())) == before


def test_without_cuda_a_step_is_refused_before_it_runs() -> None:
    with pytest.raises(CaptureError, match="a CUDA graph needs CUDA"):
        ol.capture_step(lambda: None)
    with pytest.raises(ValueError, match="num_warmup is 0"):
        ol.capture_step(lambda: None, num_warmup=0)
