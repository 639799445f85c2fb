"""What gradients that come one step late do to a loss, by learning rate.

Late gradients cost more than memory: at the learning rate at which training is fastest
it may no longer train. Here a small transformer learns two fixed batches a rank by
heart, by SGD with momentum, once with averages in time and once late.
`python -m overlaplab.bench.late_losses` prints both losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.techniques.double_buffer import DoubleBufferedReducer

CONFIG = TransformerConfig(num_layers=2, d_model=64, vocab_size=64, max_tokens=32)
SEQUENCES = 4  # a rank and step
NUM_BATCHES = 2
RATES = (0.01, 0.1, 0.3)
NUM_STEPS = 40

Curves = dict[float, tuple[list[float], list[float]]]


def curve(rate: float, late: bool, num_steps: int = NUM_STEPS) -> list[float]:
    """The loss at each step, the mean over ranks. Collective, on any cluster."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(CONFIG).to(streams.device())
    reducer = (DoubleBufferedReducer if late else BucketedReducer)(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(
            1000 * (step % NUM_BATCHES) + dist.get_rank()
        )
        shape = (SEQUENCES, CONFIG.max_tokens + 1)
        text = torch.randint(CONFIG.vocab_size, shape, generator=draw)
        text = text.to(streams.device())
        loss = model(text[:, :-1], text[:, 1:])
        losses.append(loss.detach())
        loss.backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
    reducer.remove()
    means = torch.stack(losses)
    dist.all_reduce(means)
    return [float(mean) for mean in means / dist.get_world_size()]


def curves(rates: Sequence[float] = RATES, num_steps: int = NUM_STEPS) -> Curves:
    """By learning rate: (averages in time, one step late). Collective."""
    return {
        rate: (curve(rate, False, num_steps), curve(rate, True, num_steps))
        for rate in rates
    }


def table(found: Curves) -> str:
    """Every fifth loss, a line for each rate and reducer."""
    lines = []
    for rate, pair in found.items():
        for name, losses in zip(("in time", "one step late"), pair, strict=True):
            row = "".join(f"{loss:7.2f}" for loss in losses[::5])
            lines.append(f"learning rate {rate:<5g} {name:<14}{row}")
    return "\n".join(lines)


def main() -> None:
    from overlaplab.cluster.run import run

    argparse.ArgumentParser(description=__doc__).parse_args()  # --help, or an error
    print(table(run(curves, world_size=2, cluster="gloo", timeout_s=600).values[0]))


if __name__ == "__main__":
    main()
