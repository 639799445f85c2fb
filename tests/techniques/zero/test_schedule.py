"""When gathers and scatters run, on the virtual clock; and that each wait is needed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program.memory import live_bytes
from overlaplab.techniques.zero import plan_memory
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
        *("mm", "mm", "gather 1", "scatter 3", "mm", "mm", "gather 0", "scatter 2"),
        *("mm", "mm", "scatter 1", "mm", "scatter 0"),
    ]


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
            if self._readers[unit.slot]:  # forget who computed with what is there
                self._readers[unit.slot] = {self._stream_key(): None}
            launch(self, unit)

    monkeypatch.setattr(Ring, "launch", early)


def second_fill_before_the_first_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Scatters._settle

    def later(self: Any, turn: int) -> None:
        kept.append(self._flights[turn])
        self._flights[turn] = None

    def finish(self: Any) -> None:
        for flight in kept:
            self._flights[0] = flight
            settle(self, 0)
        kept.clear()

    kept: list[Any] = []
    monkeypatch.setattr(Scatters, "_settle", later)
    monkeypatch.setattr(
        Scatters, "finish", lambda self: (later(self, 0), later(self, 1), finish(self))
    )


@pytest.mark.parametrize(
    ("breaks", "tensor"),
    [
        (no_wait_for_a_gather, "ring slot"),
        (gather_over_what_computes, "ring slot"),
        (second_fill_before_the_first_scatter, "gradient buffer"),
    ],
)
def test_without_one_wait_the_race_is_found_on_its_tensor(
    breaks: Any, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    run = ol.run(steps, 1, 3)
    hazards = [f.name for f in run.warnings if f.kind == "hazard"]
    assert hazards
    assert {name[: len(tensor)] for name in hazards} == {tensor}


def test_without_the_wait_for_scatters_their_works_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scatters, "finish", lambda self: None)
    assert {f.kind for f in ol.run(steps).warnings} == {"unwaited"}


# -- memory


def small() -> Transformer:
    return Transformer(
        TransformerConfig(num_layers=4, d_model=64, vocab_size=101, max_tokens=8)
    )


@pytest.mark.parametrize(
    "settings", [{}, {"prefetch": 2}, {"mixed_precision": torch.bfloat16}]
)
def test_the_summary_is_what_a_run_holds(settings: dict[str, Any]) -> None:
    def hold() -> None:
        model = small()
        mixed = settings.get("mixed_precision", torch.float32)
        model.positions = model.positions.to(mixed)
        zero = ol.Zero3(model, **settings)
        optimizer = torch.optim.AdamW(zero.shards(), fused=True)
        tokens = torch.randint(101, (2, 8))
        for _ in range(2):
            model(tokens, tokens).backward()
            zero.wait()
            optimizer.step()
            optimizer.zero_grad()
        model.kept = optimizer  # type: ignore[assignment]  # to the end

    run = ol.run(hold, world_size=3)
    expected = plan_memory(small().to("meta"), 3, **settings)
    positions = 8 * 64 * 4  # a buffer
    held_bytes = live_bytes(run.program)[-1][1] - positions
    assert held_bytes == pytest.approx(expected.total_bytes, rel=0.01)


def test_a_step_allocates_full_gradients_and_no_weights() -> None:
    program = ol.run(steps, 1, 3).program
    *_, first = (op.index for op in program.ranks[0] if op.name == "randn")
    matrix = 512 * 512 * 4
    born = [
        life.bytes
        for life in program.storages
        if life.rank == 0 and life.born >= first and life.bytes in (matrix, matrix // 2)
    ]
    assert born == [matrix] * NUM_LAYERS
