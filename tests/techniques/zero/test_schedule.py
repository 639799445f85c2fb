"""When gathers and scatters run, on the virtual clock; and that each wait is needed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.techniques.zero.plan import StepPlan
from overlaplab.techniques.zero.ring import Ring
from overlaplab.techniques.zero.scatters import Scatters
from overlaplab.timeline import Span

NUM_LAYERS = 4


def layers() -> nn.Sequential:
    """Matrices of 1 MiB each."""
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(NUM_LAYERS)))


def steps(prefetch: int = 1, number: int = 2, **settings: Any) -> None:
    model = layers()
    zero = ol.Zero3(model, prefetch=prefetch, **settings)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.1)
    for step in range(number):
        with ol.annotate(f"step {step}"):
            model(torch.randn(2048, 512)).square().mean().backward()
            zero.wait()
            optimizer.step()
            optimizer.zero_grad()


def spans(prefetch: int, hardware: Any = "chalk") -> list[Span]:
    """Rank 0's matmuls, gathers and scatters of the second step, by start."""
    run = ol.run(steps, prefetch, hardware=hardware)
    assert run.warnings == ()
    timeline = run.timeline.of_step(1)
    found = [s for s in timeline.spans if s.rank == 0]
    return [s for s in found if s.name in ("mm", "all_gather", "reduce_scatter")]


def order(found: list[Span]) -> list[str]:
    return ["mm" if s.kind == "compute" else str(s.attributes["label"]) for s in found]


def test_a_unit_is_gathered_while_the_one_before_computes() -> None:
    assert order(spans(1)) == [
        *("gather 0", "gather 1", "mm", "gather 2", "mm", "gather 3", "mm", "mm"),
        # A gather waits for the gradients that leave from its slot; nobody else does.
        *("mm", "mm", "scatter 3", "mm", "gather 1", "mm", "scatter 2", "mm"),
        *("gather 0", "mm", "scatter 1", "mm", "scatter 0"),
    ]


def windows_of_two() -> StepPlan | None:
    """The plan of steps whose first backward is inside no_sync."""
    model = layers()
    zero = ol.Zero3(model)
    for step in range(3):
        with ol.annotate(f"step {step}"):
            with zero.no_sync():
                model(torch.randn(64, 512)).square().mean().backward()
            model(torch.randn(64, 512)).square().mean().backward()
            zero.wait()
    return zero.plan


def test_a_plan_says_what_is_gathered_and_sent_where_a_backward_sends_nothing() -> None:
    run = ol.run(windows_of_two)
    plan = run.values[0]
    gathered = [plan.names[unit] for row in plan.rows for unit in row.gathers]
    sent = [plan.names[row.use.unit] for row in plan.rows if row.scatters]
    spans = [s for s in run.timeline.of_step(2).spans if s.rank == 0]
    labels = [
        str(s.attributes.get("label")) for s in spans if s.kind == "communication"
    ]
    assert gathered == [x[7:] for x in labels if x.startswith("gather ")]
    assert sent == [x[8:] for x in labels if x.startswith("scatter ")] == [*"3210"]
    assert str(plan).count("then scatter") == NUM_LAYERS


def test_on_demand_nothing_is_gathered_early() -> None:
    assert order(spans(0)) == [
        *("gather 0", "mm", "gather 1", "mm", "gather 2", "mm", "gather 3", "mm"),
        *("mm", "mm", "gather 2", "scatter 3", "mm", "mm", "gather 1", "scatter 2"),
        *("mm", "mm", "gather 0", "scatter 1", "mm", "scatter 0"),
    ]


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_every_gather_but_the_first_starts_before_the_unit_before_it_ends(
    prefetch: int,
) -> None:
    """D05, and the memory: at most `prefetch` + 1 units are there at once."""
    found = spans(prefetch)
    gathers = [s for s in found if s.name == "all_gather"]
    matmuls = [s for s in found if s.name == "mm"]
    for gather in gathers[1:]:
        assert any(m.start_ns <= gather.start_ns < m.end_ns for m in matmuls)
    # One matmul a layer forward; backward two, but for the first layer.
    assert sum(b.start_ns - a.end_ns for a, b in pairwise(matmuls)) < 100_000


def test_gathers_and_scatters_run_on_communicators_of_their_own() -> None:
    run = ol.run(steps)
    groups = {
        op.name: op.collective.group
        for op in run.program.ranks[0]
        if op.collective and op.name in ("all_gather", "reduce_scatter")
    }
    assert len(set(groups.values())) == 2


# -- each wait is needed


def no_wait_for_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "wait", lambda self, unit: None)


def gather_over_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathers are launched on a stream that waits for the start of the step alone."""
    launch = Ring.launch

    def early(self: Any, unit: Any) -> None:
        if not hasattr(self, "side"):
            self.side = streams.Stream()
        if unit.index == 0:
            self.side.wait_stream(streams.current_stream())
        with streams.stream(self.side):
            slot = self._slots[unit.slot]
            if slot.readers:  # forget who computed with what is there
                slot.readers = {self._stream_key(): None}
            launch(self, unit)

    monkeypatch.setattr(Ring, "launch", early)


def gather_over_gradients_that_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def lend(self: Any, unit: Any, works: Any) -> None:
        self._slots[unit.slot].leaves = True

    monkeypatch.setattr(Ring, "lend", lend)


@pytest.mark.parametrize(
    "breaks",
    [
        no_wait_for_a_gather,
        gather_over_what_computes,
        gather_over_gradients_that_leave,
    ],
    ids=lambda fn: fn.__name__,
)
def test_without_one_wait_the_race_is_found_on_its_slot(
    breaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    run = ol.run(steps, 1, 3)
    hazards = [f.name for f in run.warnings if f.kind == "hazard"]
    assert hazards
    assert {name[: len("ring slot")] for name in hazards} == {"ring slot"}


def test_without_the_wait_for_scatters_their_works_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scatters, "settle", lambda self: self._flights.clear())
    monkeypatch.setattr(Ring, "drain", lambda self: None)
    assert "unwaited" in {f.kind for f in ol.run(steps).warnings}
