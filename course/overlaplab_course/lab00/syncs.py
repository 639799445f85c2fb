"""Exercise 0.3: a training loop in which the CPU waits for the GPU in every step.

The repaired loop must give the same losses and weights, and must win back what the
waiting cost. How it does so is free: values kept on the GPU and read at the end, or a
step later, or a few at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws, origins
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import Op
from overlaplab.timeline import Timeline
from overlaplab_course.lab00 import sources
from overlaplab_course.lab00.runs import GPU, device_idle_ns, host_waits

LEARNING_RATE = 2

LOSSES = "the losses are those of the given loop, as floats"
WORST = "and so is the worst of them"
WEIGHTS = "the model ends with the same weights"
AHEAD = "at least three quarters of what the waiting cost is won back"

Train = Callable[[nn.Module, Sequence[Tensor]], tuple[Sequence[float], float]]


def broken_train(
    model: nn.Module, batches: Sequence[Tensor]
) -> tuple[list[float], float]:
    """The loop as the lesson hands it out (a test holds the two together)."""
    losses: list[float] = []
    worst = 0.0
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        losses.append(loss.item())
        if loss > worst:
            worst = loss.detach()
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad  # type: ignore[operator,misc]
                param.grad = None
    return losses, float(worst)


def good_train(
    model: nn.Module, batches: Sequence[Tensor]
) -> tuple[list[float], float]:
    """Reads everything at the end: what the loop could take."""
    kept: list[Tensor] = []
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        kept.append(loss.detach())
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad  # type: ignore[operator,misc]
                param.grad = None
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def late_train(
    model: nn.Module, batches: Sequence[Tensor]
) -> tuple[list[float], float]:
    """Looks in each step, but after the update: hardly slower than never."""
    losses: list[float] = []
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= LEARNING_RATE * param.grad  # type: ignore[operator,misc]
                param.grad = None
        losses.append(loss.item())
    return losses, max(losses)


def net_and_batches(
    num_layers: int = 6, width: int = 256, num_batches: int = 8, rows: int = 512
) -> tuple[nn.Module, list[Tensor]]:
    """A net and its batches, the same at each call; losses go up and down."""
    generator = torch.Generator().manual_seed(num_batches)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(num_layers)
        layers: list[nn.Module] = []
        for _ in range(num_layers):
            layers += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(width, width))
    scales = torch.rand(num_batches, generator=generator) + 0.5
    return model, [
        scale * torch.randn(rows, width, generator=generator) for scale in scales
    ]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run of a training loop.

    Args:
        losses, worst: what it returned.
        weights: of the model, by name, after it.
        run: on the virtual cluster.
    """

    losses: Any
    worst: Any
    weights: dict[str, Tensor]
    run: Run

    @property
    def timeline(self) -> Timeline:
        return self.run.timeline

    @property
    def waits(self) -> list[Op]:
        """Where the CPU waits."""
        assert self.run.program is not None
        return host_waits(self.run.program.ranks[0])

    @property
    def idle_ns(self) -> int:
        """How long the GPU has nothing to do."""
        return device_idle_ns(self.timeline)


def train(loop: Train, *shape: int) -> TrainingRun:
    """Run a training loop on one GPU of the virtual cluster.

    Args:
        shape: as `net_and_batches` takes it.
    """
    model, batches = net_and_batches(*shape)
    recorded = run(_on_rank, loop, model, batches, world_size=1, hardware=GPU)
    recorded = origins.release(recorded)
    answer, weights = recorded.values[0]
    try:
        losses, worst = answer
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"train returned {answer!r:.100}; expected (losses, worst)"
        ) from error
    return TrainingRun(losses, worst, weights, recorded)


def _on_rank(loop: Train, model: nn.Module, batches: Sequence[Tensor]) -> origins.Held:
    before = origins.given((model, batches))
    answer = loop(model, batches)
    notes = (*before, *origins.returned(model))
    with _disable_current_modes():  # the harness's copies are not the learner's
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return origins.Held((answer, weights), notes)


# What the lesson shows, and another net with more batches.
SHAPES = ((6, 256, 8, 512), (5, 192, 3, 640))


@lru_cache(maxsize=4)
def _ends(shape: tuple[int, ...]) -> tuple[TrainingRun, TrainingRun]:
    """The given loop and the best, on one net."""
    return train(broken_train, *shape), train(good_train, *shape)


@exercise(
    "0.3",
    title="repair: a loop that stops to look",
    solution="train",
    verifies=(LOSSES, WORST, WEIGHTS, AHEAD),
    points=3,
    timeout_s=60.0,
)
def grade_train(sheet: Sheet, train_of_yours: Train) -> None:
    """Values first, then time between the given loop's and the best."""
    sheet.ran("your loop on one GPU: 8 batches of the net above, 3 of another")
    for shape in SHAPES:
        mine = train(train_of_yours, *shape)
        given, best = _ends(shape)
        if shape == SHAPES[0]:
            sheet.show(
                mine.timeline,
                step_ns=mine.timeline.end_ns,
                target_ns=best.timeline.end_ns,
                title="your loop, 8 batches",
            )
        _check_values(sheet, mine, given)
        took_ns, best_ns = mine.timeline.end_ns, best.timeline.end_ns
        limit_ns = best_ns + (given.timeline.end_ns - best_ns) // 4
        sheet.expect(
            AHEAD,
            took_ns <= limit_ns,
            seen=f"{took_ns / 1e6:.2f} ms; the GPU has nothing to do for "
            f"{mine.idle_ns / 1e6:.2f} ms of it.\n{_told(mine.waits)}",
            expected=f"at most {limit_ns / 1e6:.2f} ms; the given loop takes "
            f"{given.timeline.end_ns / 1e6:.2f}, one that never waits on the way "
            f"{best.timeline.end_ns / 1e6:.2f}",
            hint=_hint(mine.waits, len(given.losses)),
        )
        sheet.stop_if_wrong()


def _check_values(sheet: Sheet, mine: TrainingRun, given: TrainingRun) -> None:
    losses = mine.losses
    plain = isinstance(losses, Sequence) and all(type(x) is float for x in losses)
    seen = f"{losses!r:.160}"
    if not plain:
        kinds = (
            {type(x).__name__ for x in losses} if hasattr(losses, "__iter__") else ""
        )
        seen = f"losses is {type(losses).__name__} of {kinds or '?'}: {seen}"
    same = plain and len(losses) == len(given.losses)
    if same:
        pair = torch.tensor(losses), torch.tensor(given.losses)
        same = torch.allclose(*pair, rtol=1e-5)
    elif plain:
        seen = f"{len(losses)} losses: {seen}"
    sheet.expect(
        LOSSES,
        bool(same),
        seen=seen,
        expected=f"{len(given.losses)} floats: {given.losses!r:.160}",
        hint="a tensor that a later step writes again changes under your hands"
        if plain and len(set(losses)) < len(losses)
        else "",
    )
    worst = mine.worst
    sheet.expect(
        WORST,
        type(worst) is float and abs(worst - given.worst) <= 1e-5 * given.worst,
        seen=f"worst is {worst!r}",
        expected=f"{given.worst!r}",
    )
    sheet.verify(WEIGHTS, laws.values_law([mine.weights], given.weights, what="weight"))
    assert mine.run.program is not None
    sheet.verify(WEIGHTS, laws.origin_law(mine.run.program, what="a weight"))


def _told(waits: Sequence[Op]) -> str:
    if not waits:
        return "The CPU never waits."
    lines = Counter(sources.line_of(op.source) if op.source else "?" for op in waits)
    told = [f"  {count} x {line}" for line, count in lines.items() if line != "?"]
    return "\n".join([f"The CPU waits {len(waits)} times{':' if told else '.'}", *told])


def _hint(waits: Sequence[Op], num_batches: int) -> str:
    if len(waits) >= 2 * num_batches:
        return "two lines of the loop need a number on the CPU before it can go on"
    if len(waits) >= num_batches:
        return "one line of the loop still asks the GPU for a number: what about `if`?"
    return "launch every batch first, and look at the numbers after the loop"
