"""What the cells of lab 00 run: a GPU in round numbers, and small training steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.run import Run
from overlaplab.grading import origins
from overlaplab.grading.forms import KnobProgram, Settings
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import Op, Program, resolve
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import merge, total
from overlaplab.view import Knob
from overlaplab_course.lab00.launches import LAUNCH_US

GPU: Hardware = replace(
    find_hardware("chalk"),
    name="chalk, 10 us a launch",
    launch_ns=LAUNCH_US * 1000,
    backward_launch_ns=None,
    collective_launch_ns=20_000,
    link=Link(latency_ns=20_000, bytes_per_s=10**10, source="round numbers"),
    source=(
        "no machine: round numbers for mental arithmetic. A launch costs 10 us, a "
        "collective's 20; 1000 FLOP or 1000 bytes of memory take 1 ns; a message takes "
        "20 us and 0.1 ns a byte"
    ),
)
Train = Callable[[nn.Module, Sequence[Tensor]], tuple[Sequence[float], float]]
Step = Callable[[Tensor, Tensor], Tensor]


def is_launch(span: Span) -> bool:
    return span.kind == "launch"


def is_on_gpu(span: Span) -> bool:
    """A kernel, a copy or a collective: not of the CPU's lane."""
    return span.kind not in ("launch", "host")


def last_launch_ns(timeline: Timeline) -> int:
    """When the CPU has launched everything."""
    return max(span.end_ns for span in timeline.spans if is_launch(span))


def launch_table(timeline: Timeline) -> str:
    """Each operator of rank 0: when it is launched, when it runs, how long it waits.

    In us; in the order of the launches.
    """
    own = timeline.of_rank(0).spans
    ran = {span.attributes["op"]: span for span in own if is_on_gpu(span)}
    lines = [f"{'':<12}{'launched':>16}{'runs':>18}{'waits':>10}"]
    for launch in filter(is_launch, own):
        if span := ran.get(launch.attributes["op"]):
            times_ns = launch.start_ns, launch.end_ns, span.start_ns, span.end_ns
            begin, end, start, stop = (ns / 1000 for ns in times_ns)
            lines.append(
                f"{span.name:<12}{begin:>7.0f} to {end:>5.0f}{start:>9.0f} to "
                f"{stop:>5.0f}{start - end:>7.0f} us"
            )
    return "\n".join(lines)


def host_waits(program: Program | None) -> list[Op]:
    """Where the CPU of rank 0 waits for its GPU, in program order."""
    assert program is not None
    return [op for op in program.ranks[0] if op.kind == "host_wait"]


def linear_layers(
    number: int, width: int, make: Callable[..., nn.Module] = nn.Linear
) -> list[nn.Module]:
    """Equal linear layers, a ReLU behind each."""
    return [layer for _ in range(number) for layer in (make(width, width), nn.ReLU())]


# A step, and what has happened when its backward pass returns


def model_and_batch(number: int) -> tuple[nn.Module, Tensor]:
    """A few equal layers and a batch, of sizes that belong to a learner's number."""
    draw = random.Random(int(number))
    width = draw.choice((224, 256, 288))
    num_layers = draw.choice((4, 5, 6, 7))
    batch = draw.choice((768, 896, 1024))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(number) % 2**31)
        model = nn.Sequential(*linear_layers(num_layers, width))
        return model, torch.randn(batch, width)


class Counts(NamedTuple):
    """One step, at the moment at which `backward()` returned."""

    returned_us: float
    launched: int
    started: int
    finished: int


def count(timeline: Timeline) -> Counts:
    """Operators of a step whose last launch is the last of its backward pass."""
    now_ns = last_launch_ns(timeline)
    on_gpu = [span for span in timeline.spans if is_on_gpu(span)]
    return Counts(
        returned_us=now_ns / 1000,
        launched=sum(is_launch(span) for span in timeline.spans),
        started=sum(span.start_ns <= now_ns for span in on_gpu),
        finished=sum(span.end_ns <= now_ns for span in on_gpu),
    )


# The same step with knobs, on shapes alone

SHORTER, FASTER = "launches half as long", "a GPU twice as fast"
KNOBS: Mapping[str, Knob] = {
    "batch": Knob(
        (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 256, "batch (rows)"
    ),
    "width": Knob((128, 256, 512, 1024), 256, "width of a layer"),
    "launch_us": Knob((2, 5, 10, 20, 40), 20, "a launch (us)"),
    "teraflops": Knob((1, 5, 20, 100), 1, "GPU (TFLOP/s)"),
}
# The machine of the third task: only its batch is free.
BORDER_AT = {"width": 512, "launch_us": 10, "teraflops": 20}


def train_step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward pass: what exercise 0.2 counts."""
    loss = model(x).square().mean()
    loss.backward()


@lru_cache(maxsize=64)
def step_of(
    num_layers: int, width: int, batch: int, dtype: torch.dtype = torch.float32
) -> Program:
    """`train_step` of equal layers; no value is computed, sizes take no time."""
    unset = partial(skip_init, nn.Linear, dtype=dtype)  # nobody looks at the weights
    model = nn.Sequential(*linear_layers(num_layers, width, unset))
    x = torch.empty(batch, width, dtype=dtype)
    recorded = run(train_step, model, x, world_size=1, fake=True)
    assert recorded.program is not None
    return recorded.program


def _timed(s: Settings) -> Timeline:
    gpu = replace(
        GPU,
        launch_ns=round(1000 * s["launch_us"]),
        flops_per_s={"default": s["teraflops"] * 10**12},
        memory_bytes_per_s=s["teraflops"] * 10**12,
    )
    return resolve(step_of(6, s["width"], s["batch"]), gpu)


turn = KnobProgram(
    KNOBS,
    _timed,
    what_if={
        SHORTER: lambda s: {"launch_us": s["launch_us"] / 2},
        FASTER: lambda s: {"teraflops": 2 * s["teraflops"]},
    },
)


# Lines and loops that make the CPU wait

LINES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss.item()": lambda x, loss: loss.item(),
    "print(loss)": lambda x, loss: f"{loss}",
    "x.shape[0]": lambda x, loss: x.shape[0],
    "if loss > 0:": lambda x, loss: bool(loss > 0),
    "loss.detach()": lambda x, loss: loss.detach(),
    "x.nonzero()": lambda x, loss: x.nonzero(),
    "x.cpu()": lambda x, loss: x.cpu(),
    "torch.maximum(loss, loss)": lambda x, loss: torch.maximum(loss, loss),
}


def holds_the_cpu(line: Callable[[Tensor, Tensor], Any]) -> bool:
    """Whether the CPU waits for the GPU in `line(x, loss)`, from a run of it."""

    def on_rank() -> None:
        x = torch.randn(64, 64) @ torch.randn(64, 64)
        line(x, x.square().mean())

    return bool(host_waits(run(on_rank, world_size=1, hardware=GPU).program))


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
                param -= 2 * param.grad  # type: ignore[operator,misc]
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
        layers = linear_layers(num_layers, width)
        model = nn.Sequential(*layers, nn.Linear(width, width))
    scales = torch.rand(num_batches, generator=generator) + 0.5
    return model, [s * torch.randn(rows, width, generator=generator) for s in scales]


class TrainingRun(NamedTuple):
    """One run of a training loop."""

    # losses, worst: what it returned
    losses: Any
    worst: Any
    weights: dict[str, Tensor]  # of the model, by name, after it
    run: Run  # on the virtual cluster
    # program, timeline: of that
    program: Program
    timeline: Timeline
    waits: list[Op]  # where the CPU waits
    idle_ns: int  # how long the GPU has nothing to do


def train(loop: Train, *shape: int) -> TrainingRun:
    """Run a training loop on one GPU of the virtual cluster.

    Args:
        shape: as `net_and_batches` takes it.
    """
    model, batches = net_and_batches(*shape)
    recorded = run(_train_on_rank, loop, model, batches, world_size=1, hardware=GPU)
    recorded = origins.release(recorded)
    answer, weights = recorded.values[0]
    try:
        losses, worst = answer
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"train returned {answer!r:.100}; expected (losses, worst)"
        ) from error
    program, timeline = recorded.program, recorded.timeline
    assert program is not None
    waits, idle_ns = host_waits(program), device_idle_ns(timeline)
    of_run = (recorded, program, timeline, waits, idle_ns)
    return TrainingRun(losses, worst, weights, *of_run)


def _train_on_rank(
    loop: Train, model: nn.Module, batches: Sequence[Tensor]
) -> origins.Held:
    before = origins.given((model, batches))
    answer = loop(model, batches)
    notes = (*before, *origins.returned(model))
    with _disable_current_modes():  # the harness's copies are not the learner's
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return origins.Held((answer, weights), notes)


def device_idle_ns(timeline: Timeline) -> int:
    """How long the GPU has nothing to run between its first start and its last end."""
    busy = merge((s.start_ns, s.end_ns) for s in timeline.spans if is_on_gpu(s))
    return busy[-1][1] - busy[0][0] - total(busy) if busy else 0


# Two ranks

WIDTH = 512


def inputs(rank: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """`x` and `a` of a rank: other numbers on each."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(width, width, generator=generator)
    return x, torch.randn(width, width, generator=generator) / width**0.5


def run_step(step: Step, world_size: int = 2, width: int = WIDTH) -> Run:
    """`step(x, a)` on every rank of the virtual cluster."""
    return origins.release(
        run(_step_on_rank, step, width, world_size=world_size, hardware=GPU)
    )


def _step_on_rank(step: Step, width: int) -> origins.Held:
    with _disable_current_modes():  # given: no work of the step
        x, a = inputs(dist.get_rank(), width)
    answer = origins.hold(step, x, a)
    if not isinstance(answer.value, Tensor):
        raise TypeError(
            f"step returned {type(answer.value).__name__}; expected a tensor"
        )
    return answer


class Uneven(NamedTuple):
    """Products of each rank before the message, and who looks at a number."""

    products: tuple[int, int]
    looks: int


def draw_uneven(number: int) -> Uneven:
    """What the two ranks of a learner's number do."""
    draw = random.Random(int(number) + 1000)
    few = draw.randrange(3, 6)
    many = few + draw.randrange(2, 5)
    products = draw.choice(((few, many), (many, few)))
    return Uneven(products, draw.choice((0, 1)))


def _uneven_step(drawn: Uneven) -> None:
    rank = dist.get_rank()
    with _disable_current_modes():
        a, x = torch.eye(256), torch.ones(256, 256)
    for _ in range(drawn.products[rank]):
        a = a @ a
    if rank == drawn.looks:
        a[0, 0].item()
    work = dist.all_reduce(x, async_op=True)
    a = a @ a
    assert work is not None
    work.wait()
    x.mul_(0.5)


@lru_cache(maxsize=16)
def two_ranks(number: int) -> Timeline:
    """The run of a learner's number."""
    step = draw_uneven(number)
    return run(_uneven_step, step, world_size=2, hardware=GPU).timeline
