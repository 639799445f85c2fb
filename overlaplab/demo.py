"""`overlaplab demo`: three ways to average gradients, on one cluster, side by side.

Trains a small transformer with each reducer, compares one step of each, and checks
that all of them end with the parameters that one process gets from the whole batch.
Prints and saves; what it prints is computed by timeline, view and the reducers.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from overlaplab import streams
from overlaplab.cluster.run import run
from overlaplab.files import write_whole
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.techniques.data_parallel import (
    BucketedReducer,
    HookReducer,
    Reducer,
    SerialReducer,
)
from overlaplab.timeline import Timeline


@dataclass(frozen=True)
class Sizes:
    """What is trained."""

    # the model's sizes; sequences have `config.max_tokens` tokens
    config: TransformerConfig
    sequences: int  # a rank and step
    bucket_mib: float  # of the bucketed reducer


# On a GPU a small model is bound by launches, on a laptop a large one takes too long.
SMALL = Sizes(
    TransformerConfig(num_layers=4, d_model=128, vocab_size=512, max_tokens=64), 4, 0.5
)
LARGE = Sizes(
    TransformerConfig(
        num_layers=8, d_model=1024, num_heads=16, vocab_size=4096, max_tokens=256
    ),
    sequences=8,
    bucket_mib=25,
)
LEARNING_RATE = 0.1
# Ranks add gradients in another order than one process does. Four steps of float32 move
# a parameter by rounding of this size at most, and by 1e-3 if a gradient is missing.
TOLERANCE = 1e-5

# Round numbers, slow enough that a model of a laptop's size has something to hide, and
# with a latency that messages feel. Launching is free on it; see --hardware for cards.
DEMO_HARDWARE = replace(
    with_link(find_hardware("chalk"), latency_ns=20_000), name="chalk, 20 us a message"
)

FIGURE_FORMATS = (".png", ".svg", ".pdf", ".jpg")

MakeReducer = Callable[[Transformer, Sizes], Reducer]
VARIANTS: Mapping[str, MakeReducer] = {
    "serial": lambda model, _: SerialReducer(model),
    "per parameter": lambda model, _: HookReducer(model),
    "bucketed": lambda model, sizes: BucketedReducer(
        model, bucket_mib=sizes.bucket_mib
    ),
}


@dataclass(frozen=True)
class Variant:
    """What one reducer came to."""

    step: Timeline  # the timeline of one step; the median one where steps were measured
    # after the last step, by rank; one flat float32 tensor each
    parameters: tuple[Tensor, ...]


def demo(
    *,
    cluster: str = "virtual",
    num_ranks: int = 4,
    steps: int = 4,
    hardware: str | Hardware = DEMO_HARDWARE,
    out: Path = Path("demo.png"),
) -> bool:
    """Run the demonstration and print it; `out` is where the figure goes.

    Returns:
        Whether all variants ended with the right parameters.

    Raises:
        ValueError: an argument is out of range.
        OSError: the figure cannot be written.
    """
    console = Console(highlight=False, soft_wrap=True)
    if steps < 2:
        raise ValueError(f"steps is {steps}; expected 2 or more, the first is set-up")
    if out.suffix.lower() not in FIGURE_FORMATS:
        raise ValueError(
            f"{str(out)!r} is no figure's file; expected a name that ends in "
            + ", ".join(FIGURE_FORMATS)
        )
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{out}: there is no directory {out.parent}")
    hardware = find_hardware(hardware)
    where = f"hardware: {hardware.name}" if cluster == "virtual" else "measured"
    sizes = LARGE if cluster == "nccl" else SMALL
    num_parameters = flat_parameters(make_model(0, sizes)).numel()
    console.print(
        f"{num_ranks} ranks on cluster {cluster!r} ({where}), {steps} steps of a "
        f"transformer with {num_parameters / 1e6:.2f} M parameters"
    )
    variants: dict[str, Variant] = {}
    bar = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    quiet = not console.is_terminal
    with Progress(*bar, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=len(VARIANTS) + 1)
        for name, make_reducer in VARIANTS.items():
            progress.update(task, description=name)
            variants[name] = run_variant(
                make_reducer, cluster, num_ranks, steps, hardware, sizes
            )
            progress.advance(task)
        progress.update(task, description="one process")
        device = torch.device("cuda" if cluster == "nccl" else "cpu")
        expected = train_alone(num_ranks, steps, sizes, device)
    # matplotlib takes a second to import: not before the arguments have been checked.
    from overlaplab.view import draw_many, table

    timelines = {name: variant.step for name, variant in variants.items()}
    console.print(f"\n{table(timelines)}")
    if cluster != "virtual":
        console.print(f"Measured: the median of steps 2 to {steps}, profiler on.")
    problems = compare(variants, expected)
    for problem in problems:
        console.print(f"DIFFERENT: {problem}", style="bold red")
    if not problems:
        console.print(
            f"\nAll {len(variants)} variants end with the same parameters on every "
            f"rank, equal to one process\non the whole batch (within {TOLERANCE:g})."
        )
    figure = io.BytesIO()
    draw_many(timelines, ranks=[0]).savefig(figure, dpi=120, format=out.suffix[1:])
    write_whole(out, figure.getvalue())
    console.print(f"Figure: {out}")
    return not problems


def run_variant(
    make_reducer: MakeReducer,
    cluster: str,
    num_ranks: int,
    steps: int,
    hardware: Hardware,
    sizes: Sizes = SMALL,
) -> Variant:
    """Train with one reducer; keep the parameters and the timeline of one step."""
    result = run(
        train,
        make_reducer,
        steps,
        sizes,
        world_size=num_ranks,
        cluster=cluster,
        hardware=hardware,
        timeout_s=120,
    )
    later = [result.timeline.of_step(step) for step in range(2, steps + 1)]
    middle = statistics.median_low(timeline.step_ns for timeline in later)
    chosen = next(timeline for timeline in later if timeline.step_ns == middle)
    return Variant(chosen, result.values)


def train(make_reducer: MakeReducer, steps: int, sizes: Sizes) -> Tensor:
    """One rank's training: an ordinary data-parallel loop.

    Returns:
        All parameters after the last step, flat, on the CPU.
    """
    rank = torch.distributed.get_rank()
    # Other values on every rank: the reducer broadcasts rank 0's.
    model = make_model(rank, sizes).to(streams.device())
    reducer = make_reducer(model, sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for step in range(1, steps + 1):
        tokens, targets = batch(rank, step, sizes)
        streams.synchronize()  # so that steps do not run into one another
        with streams.step(step):
            loss = model(tokens.to(streams.device()), targets.to(streams.device()))
            loss.backward()
            reducer.wait()
            optimizer.step()
            optimizer.zero_grad()
            streams.synchronize()
    reducer.remove()
    return flat_parameters(model)


def train_alone(
    num_ranks: int, steps: int, sizes: Sizes, device: torch.device
) -> Tensor:
    """The same training in one process, on the ranks' batches put together."""
    model = make_model(0, sizes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for step in range(1, steps + 1):
        batches = [batch(rank, step, sizes) for rank in range(num_ranks)]
        tokens, targets = (torch.cat(part) for part in zip(*batches, strict=True))
        optimizer.zero_grad()
        model(tokens.to(device), targets.to(device)).backward()
        optimizer.step()
    return flat_parameters(model)


def make_model(seed: int, sizes: Sizes) -> Transformer:
    """The transformer with the initial values of `seed`, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Transformer(sizes.config)


def batch(rank: int, step: int, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, int64 (sequences, max_tokens)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (sizes.sequences, sizes.config.max_tokens + 1)
    text = torch.randint(sizes.config.vocab_size, shape, generator=generator)
    return text[:, :-1], text[:, 1:]


def flat_parameters(model: torch.nn.Module) -> Tensor:
    """All parameters one after the other, a copy on the CPU."""
    return parameters_to_vector(model.parameters()).detach().cpu()


def compare(variants: Mapping[str, Variant], expected: Tensor) -> Sequence[str]:
    """Where parameters differ: between ranks at all, from one process by too much."""
    problems = []
    for name, variant in variants.items():
        for rank, parameters in enumerate(variant.parameters):
            if not torch.equal(parameters, variant.parameters[0]):
                problems.append(f"{name}: rank {rank} and rank 0 have other parameters")
        largest = (variant.parameters[0] - expected).abs().max().item()
        if not largest <= TOLERANCE:
            problems.append(
                f"{name}: a parameter is {largest:.1e} away from one process's"
            )
    return problems
