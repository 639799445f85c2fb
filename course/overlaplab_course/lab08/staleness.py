"""What a gradient that comes one step late does to a loss: numbers and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure

from overlaplab.view.colors import INK
from overlaplab.view.stacking import Picture
from overlaplab_course.drawing import LINES, quiet_axes


def walk(
    rate: float, *, late: bool, steps: int = 60, momentum: float = 0.0
) -> list[float]:
    """Gradient descent on w * w / 2 from w = 1: w before each step.

    The gradient is w itself; the first step of the late one does nothing.
    """
    w, before, speed, seen = 1.0, 0.0, 0.0, []
    for _ in range(steps):
        seen.append(w)
        speed = momentum * speed + (before if late else w)
        w, before = w - rate * speed, w
    return seen


def largest_rate(*, late: bool, momentum: float) -> float:
    """Of the learning rates 0.01, 0.02 to 4 the largest with which `walk` shrinks."""

    def shrinks(rate: float) -> bool:
        walked = walk(rate, late=late, steps=1000, momentum=momentum)
        return max(map(abs, walked[-6:])) < 0.5

    return max(percent / 100 for percent in range(1, 401) if shrinks(percent / 100))


def losses(rate: float, *, late: bool, steps: int = 60) -> list[float]:
    """SGD with momentum on a small net and 512 fixed samples: the loss at each step."""
    draw = torch.Generator().manual_seed(8)
    inputs = torch.randn(512, 8, generator=draw)
    targets = 2 * torch.tanh(inputs @ torch.randn(8, 4, generator=draw) / 2)
    weights = [
        (torch.randn(shape, generator=draw) / shape[0] ** 0.5).requires_grad_()
        for shape in ((8, 64), (64, 4))
    ]
    optimizer = torch.optim.SGD(weights, lr=rate, momentum=0.9)
    waiting: list[torch.Tensor | None] = [None, None]
    seen = []
    for step in range(steps):
        rows = slice(64 * (step % 8), 64 * (step % 8) + 64)
        out = torch.tanh(inputs[rows] @ weights[0]) @ weights[1]
        loss = (out - targets[rows]).square().mean()
        seen.append(min(loss.item(), 1e3))
        fresh: list[torch.Tensor | None] = [*torch.autograd.grad(loss, weights)]
        now, waiting = (waiting, fresh) if late else (fresh, waiting)
        for weight, grad in zip(weights, now, strict=True):
            weight.grad = grad
        optimizer.step()
    return seen


def last(values: Sequence[float], number: int = 8) -> float:
    """The mean of the last ones: a whole turn through the samples."""
    return sum(values[-number:]) / number


def draw_losses(
    runs: Mapping[float, tuple[Sequence[float], Sequence[float]]],
) -> Figure:
    """A panel for each learning rate: the loss at each step, undelayed and late."""
    said = "; ".join(
        f"learning rate {rate:g}: undelayed ends at {last(at_once):.3g}, one step late "
        f"at {last(late):.3g}"
        for rate, (at_once, late) in runs.items()
    )
    figure = Picture(alt=f"Loss over steps. {said}.", figsize=(9, 2.6))
    width = 0.88 / len(runs)
    for place, (rate, (at_once, late)) in enumerate(runs.items()):
        axes = (0.07 + place * width, 0.2, width - 0.03, 0.6)
        ax = quiet_axes(figure, axes, "step", "" if place else "loss")
        ax.plot(at_once, "-", color=LINES[0], label="undelayed")
        ax.plot(late, "--", color=LINES[1], label="one step late")
        ax.set_ylim(0, 2.0)
        ax.set_title(f"learning rate {rate:g}", fontsize=10, color=INK)
        if place:
            ax.set_yticklabels([])
        else:
            ax.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure
