"""What the extras of lab 10 try: settings of `ol.Zero3` and of FSDP2, and their cost.

Everything here runs on the virtual cluster. FSDP 1 refuses to run without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.hardware import Hardware
from overlaplab.program import Op, Program, resolve
from overlaplab.program.kinds import memory_kinds
from overlaplab.techniques.zero import Zero3
from overlaplab_course import stored
from overlaplab_course.lab10.given import BOARD

NUM_LAYERS, WIDTH, ROWS = 6, 64, 64
LAYER_ELEMENTS = WIDTH * WIDTH + WIDTH

# A layer's matmul takes 8 ms, its gather over two ranks 2 ms; launches cost nothing.
CAPTURED: Hardware = replace(
    BOARD,
    name="board for two, captured",
    flops_per_s={"default": 2 * ROWS * WIDTH * WIDTH * 1000 // 8},
    launch_ns=0,
    collective_launch_ns=0,
    link=replace(BOARD.link, bytes_per_s=4 * LAYER_ELEMENTS // 2 * 10**4 // 18),
)

# -- settings


@dataclass(frozen=True, slots=True)
class Tried:
    """The second step of a run with some settings; it prints as one line.

    Args:
        name: the settings as they are typed.
        forward, backward: gathers in each pass.
        layers: the most that gathers filled and nobody had freed yet, in layers.
        step_ns: of the step.
    """

    name: str
    forward: int
    backward: int
    layers: float
    step_ns: int

    def __str__(self) -> str:
        return (
            f"{self.name:<46} {self.forward} + {self.backward} gathers, "
            f"{self.layers:3.1f} layers, {self.step_ns / 1e6:5.1f} ms"
        )


def try_ours(**settings: Any) -> Tried:
    """`ol.Zero3` with these settings: two steps of six layers on two ranks."""
    return _tried("ol.Zero3", tuple(sorted(settings.items())))


def try_fsdp2(**settings: Any) -> Tried:
    """FSDP2 with these settings.

    Args:
        settings: of `fully_shard`; and `forward` and `backward`: how many layers ahead
            `set_modules_to_forward_prefetch` and `..._backward_prefetch` are given.
    """
    return _tried("FSDP2", tuple(sorted(settings.items())))


@lru_cache(maxsize=32)
def _tried(kind: str, items: tuple[tuple[str, Any], ...]) -> Tried:
    settings = dict(items)
    recorded = run(_train, kind, settings, world_size=2, hardware=CAPTURED)
    typed = ", ".join(f"{key}={value}" for key, value in items)
    return _read(f"{kind}({typed})", recorded)


def _train(kind: str, settings: dict[str, Any]) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    zero = None
    if kind == "FSDP2":
        shard_with_fsdp2(model, list(model), **settings)
        parameters = list(model.parameters())
    else:
        zero = Zero3(model, **settings)
        parameters = zero.shards()
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for step in range(2):
        with streams.step(step):
            model(torch.randn(ROWS, WIDTH)).square().mean().backward()
            if zero is not None:
                zero.wait()
            optimizer.step()
            optimizer.zero_grad()


def shard_with_fsdp2(
    model: nn.Module,
    layers: Sequence[Any],
    *,
    forward: int = 0,
    backward: int = 0,
    **settings: Any,
) -> None:
    """Each layer a unit of its own; see `try_fsdp2`."""
    from torch.distributed.fsdp import fully_shard  # takes seconds to import

    mesh = init_device_mesh(streams.device().type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh)
    for i, layer in enumerate(layers):
        if forward:
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + forward])
        if backward:
            before = layers[max(i - backward, 0) : i]
            layer.set_modules_to_backward_prefetch(before[::-1])


def _read(name: str, recorded: Run) -> Tried:
    program = recorded.program
    assert program is not None
    ops = ops_of_step(recorded)
    gathers = [op for op in ops if _is_gather(op)]
    first = min((op.index for op in ops if op.phase == "backward"), default=len(ops))
    in_forward = sum(op.index < first for op in gathers)
    return Tried(
        name,
        in_forward,
        len(gathers) - in_forward,
        _gathered_bytes(program, ops) / (4 * LAYER_ELEMENTS),
        recorded.timeline.of_step(1).step_ns,
    )


def _is_gather(op: Op) -> bool:
    return op.collective is not None and op.collective.operation == "all_gather"


def ops_of_step(recorded: Run, step: int = 1) -> list[Op]:
    """Rank 0's operators of a step."""
    assert recorded.program is not None
    spans = recorded.timeline.of_step(step).spans
    inside = {span.attributes.get("op") for span in spans if span.rank == 0}
    return [op for op in recorded.program.ranks[0] if op.index in inside]


def _gathered_bytes(program: Program, ops: Sequence[Op]) -> int:
    """The most that gathered weights, and what gathers filled, take in a step."""
    kinds = memory_kinds(program, 0)
    filled = {a.storage for op in ops if _is_gather(op) for a in op.writes}
    lives = [
        life
        for life in program.storages
        if life.rank == 0
        and (life.storage in filled or kinds[life.storage] == "gathered")
    ]
    begin, end = ops[0].index, ops[-1].index
    return max(
        sum(s.bytes for s in lives if s.born <= t and (s.freed is None or s.freed > t))
        for t in range(begin, end + 1)
    )


# -- DeepSpeed counts elements


def deepspeed_ahead(bucket_size: float, sizes: Sequence[int]) -> int:
    """How many tensors DeepSpeed's stage 3 gathers ahead.

    It takes the next tensors as long as what it has taken has fewer elements than
    `stage3_prefetch_bucket_size`; so the last one may pass it.

    Args:
        bucket_size: in elements.
        sizes: elements of the tensors to come, in the order of their use.
    """
    taken = number = 0
    while number < len(sizes) and taken < bucket_size:
        taken += sizes[number]
        number += 1
    return number


# -- where the lead comes from

COPIES = frozenset(
    """
    _chunk_cat _foreach_copy_ all_gather_copy_in cat chunk_cat clone copy_
    split_with_sizes_copy
    """.split()  # noqa: SIM905 (wrapped)
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What rank 0 does in a step beside computing.

    Args:
        launches: kernels and collectives that the CPU launches.
        copied_bytes: written by kernels that copy.
        allocations: made in the step.
    """

    launches: int
    copied_bytes: int
    allocations: int


def costs(recorded: Run) -> Costs:
    """Of the second step."""
    assert recorded.program is not None
    ops = ops_of_step(recorded)
    begin, end = ops[0].index, ops[-1].index
    made = [
        life
        for life in recorded.program.storages
        if life.rank == 0 and begin <= life.born <= end and life.bytes and not life.host
    ]
    copies = [op for op in ops if op.name.split(".")[0] in COPIES]
    launched = [op for op in ops if op.kind in ("compute", "communication")]
    return Costs(len(launched), sum(op.write_bytes for op in copies), len(made))


def costs_table(runs: Mapping[str, Run], hardware: Hardware) -> str:
    """A row for each run, with its step where launches cost what `hardware` says."""
    rows = []
    for name, recorded in runs.items():
        assert recorded.program is not None
        found = costs(recorded)
        timeline = resolve(recorded.program, hardware).of_step(1)
        rows.append(
            (
                name,
                found.launches,
                f"{found.copied_bytes / 2**20:.0f}",
                found.allocations,
                f"{timeline.step_ns / 1e6:.1f}",
            )
        )
    head = ("of one step", "launches", "MiB copied", "allocations", "step (ms)")
    return stored.text_table(head, rows)
