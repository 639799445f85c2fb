"""What lab 04 gives: the board, the programs of sections 1 to 6, and their inputs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.cluster.run import Run
from overlaplab.grading.orders import disagree
from overlaplab.grading.origins import Held, hold, release
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, Link, collective_ns, find_hardware
from overlaplab.program import Program
from overlaplab.program.record import StorageLife
from overlaplab.streams import annotate
from overlaplab.timeline import Timeline

SIZES: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("sizes.toml").read_text("utf-8")
)
NUM_RANKS = 4

# `chalk` with a CPU that takes its time: round numbers for the head.
BOARD: Hardware = replace(
    find_hardware("chalk"),
    name="board",
    launch_ns=5_000,
    collective_launch_ns=10_000,
    link=Link(
        latency_ns=10_000,
        bytes_per_s=10 * 10**9,
        source="round numbers: 10 us, then 0.1 ns a byte that crosses the link",
    ),
    source=(
        "no machine: 1000 FLOP take 1 ns, a message 10 us and 0.1 ns a byte on the "
        "wire, a launch 5 us of the CPU, 10 us for a collective"
    ),
)

Inputs = Sequence[tuple[Any, ...]]


def play(
    step: Callable[..., Any],
    inputs: Inputs,
    *args: Any,
    hardware: Hardware = BOARD,
    apart: bool = False,
) -> Run:
    """Call `step(*inputs[rank], *args)` on each of `len(inputs)` ranks.

    The inputs are there before the step begins: making them is not recorded. Both ends
    are noted for `origin_law`.

    Args:
        apart: a set has another order on each rank, see `overlaplab.grading.orders`.
    """
    call = (step, list(inputs), args, apart)
    return release(run(_on_rank, *call, world_size=len(inputs), hardware=hardware))


def _on_rank(
    step: Callable[..., Any], inputs: Inputs, args: tuple[Any, ...], apart: bool
) -> Held:
    if apart:
        step, *args = map(disagree, (step, *args))  # type: ignore[assignment]
    return hold(step, *inputs[dist.get_rank()], *args)


def draws(seed: int, num_ranks: int = NUM_RANKS) -> list[torch.Generator]:
    """What draws each rank's inputs."""
    return [torch.Generator().manual_seed(seed + rank) for rank in range(num_ranks)]


def matrix(n: int, m: int, draw: torch.Generator) -> Tensor:
    """Entries scaled so that products stay near 1."""
    return torch.randn(n, m, generator=draw).div_(n**0.5)


# -- bytes and times of messages

# One byte a nanosecond and no latency: `collective_ns` then counts bytes.
COUNTER: Hardware = replace(
    find_hardware("chalk"), link=Link(latency_ns=0, bytes_per_s=10**9)
)


def wire_bytes(operation: str, num_ranks: int, num_bytes: int) -> int:
    """Bytes that cross one rank's link in a collective of `num_bytes`, rounded up."""
    return collective_ns(COUNTER, operation, num_ranks, num_bytes)[1]


def sent_bytes(program: Program, rank: int = 0) -> int:
    """Bytes that cross the link of `rank` in all its collectives."""
    return sum(
        wire_bytes(c.operation, len(c.ranks), c.bytes)
        for op in program.ranks[rank]
        if (c := op.collective) is not None
    )


def crossings(operation: str, num_ranks: int = NUM_RANKS) -> float:
    """How often the payload crosses one rank's link."""
    return wire_bytes(operation, num_ranks, 10**6) / 10**6


def bus_of_ours(operation: str, num_ranks: int, num_bytes: int, us: float) -> float:
    """Bytes that cross one rank's link, in 1e9 a second."""
    return wire_bytes(operation, num_ranks, num_bytes) / (us * 1e3)


def message_ns(num_bytes: int, num_ranks: int = NUM_RANKS) -> int:
    """What an all-reduce of `num_bytes` takes on the board, alone."""
    return sum(collective_ns(BOARD, "all_reduce", num_ranks, num_bytes))


# -- sections 1 to 4: steps of matrix products, (x, w) of each rank


def _step_inputs(name: str, num_ranks: int = NUM_RANKS, rows: int = 200) -> Inputs:
    """(x, w) of each rank: `rows` of input, and matrices by name."""
    shapes = SIZES["steps"][name]
    width = next(iter(shapes.values()))[0]
    return [
        (
            torch.randn(rows, width, generator=draw),
            {name: matrix(n, m, draw) for name, (n, m) in shapes.items()},
        )
        for draw in draws(100, num_ranks)
    ]


layer_inputs = partial(_step_inputs, "layer")  # of the first program of the lab
two_sums_inputs = partial(_step_inputs, "two_sums")  # of exercise 4.2
experts_inputs = partial(_step_inputs, "experts")  # of exercise 4.3


def layer_of_size(
    made: Callable[[int, int], Tensor], sizes: Sequence[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(x, w) of the lab's first program at another size, of `made(n, m)`."""
    rows, inputs, middle, outputs = sizes
    return made(rows, inputs), {
        "in": made(inputs, middle),
        "out": made(middle, outputs),
        "side_in": made(inputs, outputs),
        "side_out": made(outputs, outputs),
    }


# -- section 5: a window of k messages

BACKWARD = "backward"
SHAPE = (250, 400)
MESSAGE_BYTES = 4 * SHAPE[0] * SHAPE[1]
# Tokens of each layer: bursts of cheap gradients before an expensive one.
TOKENS = (150, 50, 50, 50, 1200, 150, 50, 50, 50, 1200)
WORLD = 2
# The CPU is out of the picture here: what is looked at is who waits for whom.
FAST_CPU = replace(
    BOARD, name="board, fast CPU", launch_ns=1_000, collective_launch_ns=2_000
)
Layer = tuple[Tensor, Tensor]
Average = Callable[[Sequence[Layer], int], Sequence[Tensor]]


def backward(layer: Layer) -> Tensor:
    """The gradient of one layer, bfloat16, computed on the current stream."""
    with annotate(BACKWARD):
        return (layer[0] @ layer[1]).bfloat16()


def backward_us() -> list[int]:
    """What each layer's gradient takes to compute, in us."""
    flops = [2 * SHAPE[0] * SHAPE[1] * tokens for tokens in TOKENS]
    return [round(1e6 * n / FAST_CPU.flops_per_s["default"]) for n in flops]


def products(tokens: Sequence[int], draw: torch.Generator) -> list[Layer]:
    """(a, b) for each number of tokens: a @ b is a gradient of `SHAPE`."""
    n, m = SHAPE
    return [
        (torch.randn(n, t, generator=draw) / t**0.5, torch.randn(t, m, generator=draw))
        for t in tokens
    ]


@lru_cache(maxsize=2)
def window_inputs(num_ranks: int = WORLD, tokens: Sequence[int] = TOKENS) -> Inputs:
    """([layer, ...],) of each rank."""
    return [(products(tokens, draw),) for draw in draws(40, num_ranks)]


def _window_step(layers: Sequence[Layer], average: Average, k: int) -> list[Tensor]:
    """What is graded: all gradients, averaged, read right after the call."""
    grads = average(layers, k)
    return [g.clone() if isinstance(g, Tensor) else g for g in grads]


def play_window(
    average: Average, k: int, inputs: Inputs | None = None, apart: bool = False
) -> Run:
    """Ten layers on two ranks of the board, with at most `k` messages alive.

    Args:
        inputs: other layers, on other ranks.
        apart: see `play`.
    """
    ranks = inputs or window_inputs()
    return play(_window_step, ranks, average, k, hardware=FAST_CPU, apart=apart)


def messages_alive(program: Program, rank: int = 0) -> float:
    """The most memory that messages held at any time, in messages.

    A message's memory is what its collective reads or writes, from its allocation to
    its release, in the order of the CPU. After `record_stream` a release gives nothing
    back until the device has come to it, and the CPU is far ahead by then: such memory
    counts to the end.
    """
    touched = {
        access.storage
        for op in program.ranks[rank]
        if op.collective is not None
        for access in (*op.reads, *op.writes)
    }
    num_ops = len(program.ranks[rank])
    change = [0] * (num_ops + 2)
    for life in program.storages:
        if life.rank == rank and life.storage in touched:
            kept = life.freed is None or recorded_elsewhere(life)
            change[life.born] += life.bytes
            change[num_ops + 1 if kept else life.freed or 0] -= life.bytes
    return max(accumulate(change)) / MESSAGE_BYTES


def recorded_elsewhere(life: StorageLife) -> bool:
    """Whether `record_stream` puts the release of this memory off."""
    return any(stream != life.stream for stream, _ in life.recorded)


# -- section 6: many small tensors

# What a step collects beside its gradients: norms, losses, counts.
FLOATS = ((250,), (250,), (), (40, 5), (1000,), ()) * 5
COUNTS = ((), (16,), (64,), ()) * 2
FEWER_FLOATS = ((300,), (), (7, 11), (64, 3), (2000,)) * 2  # other sizes
# Launches cost nothing here, as in a CUDA graph: what is left of a message is alpha.
CAPTURED = replace(BOARD, name="board, captured", launch_ns=0, collective_launch_ns=0)
SumAll = Callable[[Sequence[Tensor]], Any]


@lru_cache(maxsize=2)
def small_inputs(
    num_ranks: int = NUM_RANKS, floats: Sequence[tuple[int, ...]] = FLOATS
) -> Inputs:
    """([tensor, ...],) of each rank: float32 and int64, some with one element."""
    made = []
    for draw in draws(60, num_ranks):
        drawn = [torch.randn(shape, generator=draw) for shape in floats]
        # Counts that float32 would round.
        counts = [
            torch.randint(2**40, 2**41, shape, generator=draw) for shape in COUNTS
        ]
        mixed: list[Tensor] = []
        for i, tensor in enumerate(drawn):
            mixed.append(tensor)
            if i % 4 == 3 and counts:
                mixed.append(counts.pop())
        made.append(([*mixed, *counts],))
    return made


def one_by_one(tensors: Sequence[Tensor]) -> None:
    """A message for each."""
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()


def _small_step(tensors: Sequence[Tensor], sum_all: SumAll) -> list[Tensor]:
    """What is graded: the tensors, read right after the call."""
    sum_all(tensors)
    return [tensor.clone() for tensor in tensors]


def play_small(
    sum_all: SumAll, inputs: Inputs | None = None, apart: bool = False
) -> Run:
    """Sum 38 small tensors over four ranks of the board, captured.

    Args:
        inputs: other tensors, on other ranks.
        apart: see `play`.
    """
    ranks = inputs or small_inputs()
    return play(_small_step, ranks, sum_all, hardware=CAPTURED, apart=apart)


def latencies(timeline: Timeline, latency_ns: int = BOARD.link.latency_ns) -> float:
    """How many of the link's latencies stand in the critical path."""
    return timeline.critical_path().shares_ns["latency"] / latency_ns
