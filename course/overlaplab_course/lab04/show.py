"""What lab 04 shows: tables of collectives and of the ring, and stored measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.cluster.run import run
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab.torch_versions import all_gather_single, reduce_scatter_single
from overlaplab.view import Table, format_bytes
from overlaplab_course import stored
from overlaplab_course.lab04.extras import ChunkToSend, no_chunk, simulate
from overlaplab_course.lab04.given import (
    NUM_RANKS,
    backward,
    layer_of_size,
    play,
)

MIB = 2**20

# -- section 2: collectives


def _collectives() -> dict[str, list[int]]:
    """1 2 3 4, ten times as much on each next rank: sums read like words."""
    mine = torch.tensor([10 ** dist.get_rank() * digit for digit in (1, 2, 3, 4)])
    sent, summed = mine.clone(), mine.clone()
    gathered, exchanged = mine.new_empty(dist.get_world_size()), torch.empty_like(mine)
    part = mine.new_empty(1)
    dist.broadcast(sent, src=0)
    all_gather_single(gathered, mine[:1].clone())
    reduce_scatter_single(part, mine)
    dist.all_reduce(summed)
    dist.all_to_all_single(exchanged, mine)
    return {
        "before": mine.tolist(),
        "broadcast": sent.tolist(),
        "all_gather": gathered.tolist(),
        "reduce_scatter": part.tolist(),
        "all_reduce": summed.tolist(),
        "all_to_all": exchanged.tolist(),
    }


@lru_cache(maxsize=1)
def after_each() -> dict[str, list[list[int]]]:
    """collective -> what each of four ranks holds after it; "before": before it."""
    values = run(_collectives, world_size=NUM_RANKS).values
    return {name: [value[name] for value in values] for name in values[0]}


def collectives_table() -> str:
    """What each rank holds after each collective, and what crosses its link."""
    rows = {"": [f"rank {r}" for r in range(NUM_RANKS)]}
    for name, ranks in after_each().items():
        rows[name] = [" ".join(str(n) for n in values) for values in ranks]
    return "\n".join(
        f"{name:<15}" + "".join(f"{text:<22}" for text in cells).rstrip()
        for name, cells in rows.items()
    )


def compare_predictions(said: Mapping[str, Any]) -> None:
    """What the learner said rank 1 holds, beside what it holds. Not marked."""
    for name, ranks in after_each().items():
        if name != "before":
            yours = said.get(name)
            guess = "no guess;" if yours is None else f"your guess: {yours};"
            print(f"{name:<15} {guess:<37} actual: {ranks[1]}")


@lru_cache(maxsize=1)
def halves() -> dict[str, Timeline]:
    """One all-reduce of 400 kB, and its two halves."""

    def two_halves(tensor: Tensor) -> None:
        part = tensor.new_empty(tensor.numel() // dist.get_world_size())
        reduce_scatter_single(part, tensor)
        all_gather_single(tensor, part)

    inputs = [(torch.ones(100_000),) for _ in range(NUM_RANKS)]
    return {
        "all_reduce": play(dist.all_reduce, inputs).timeline,
        "reduce_scatter, then all_gather": play(two_halves, inputs).timeline,
    }


# -- section 7: the ring


def ring_text(chunk_to_send: ChunkToSend, num_ranks: int = NUM_RANKS) -> str:
    """A schedule as a table: what each rank sends, and what all hold at the end."""
    try:
        wrong = no_chunk(chunk_to_send, num_ranks)
    except NotImplementedError:
        return "no schedule yet: chunk_to_send is not written"
    if wrong:
        return f"{wrong[0].message}; expected {wrong[0].expected}"
    lines = ["step      " + "".join(f"rank {r}  " for r in range(num_ranks))]
    for step in range(2 * (num_ranks - 1)):
        sent = [chunk_to_send(rank, step, num_ranks) for rank in range(num_ranks)]
        how = "adds" if step < num_ranks - 1 else "copies"
        cells = "".join(f"{f'sends {c}':<8}" for c in sent).rstrip()
        lines.append(f"{step} {how:<8}" + cells)
    lines.append("at the end: parts of each chunk (4 is a sum, unless one came twice)")
    held = simulate(chunk_to_send, num_ranks, 2 * num_ranks - 2)
    for rank, chunks in enumerate(held):
        counts = (f"{c.total()}{'!' * (max(c.values()) > 1)}" for c in chunks)
        lines.append(f"rank {rank}: {' '.join(counts)}")
    return "\n".join(lines)


_POINTS = json.loads(Path(__file__).with_name("points.json").read_text("utf-8"))


def measured_points() -> Sequence[tuple[int, int, float]]:
    """(ranks, bytes, us) of all-reduces measured alone; see `points_machine`."""
    points: Sequence[tuple[int, int, float]] = _POINTS["points"]
    return points


def points_machine() -> str:
    """The machine on which they were measured."""
    return "{card}, torch {torch}, NCCL {nccl}, {date}".format(**_POINTS)


# -- section 10: stored measurements

_shown = stored.shown("04")
Layer = Callable[[Tensor, Mapping[str, Tensor], str], Any]


@_shown
def machine(found: stored.Stored) -> list[str]:
    """The machine of all stored numbers, one line."""
    return [f"{stored.machine(found)}; medians, the slowest rank's"]


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    return stored.measure_it_here(stored.command("04"))


def _found() -> stored.Stored:
    found = stored.read("04", on_gpus=True)
    if found is None:
        raise LookupError(stored.nothing("04"))
    return found


def number(*keys: str) -> float:
    """One stored number: `number("ways", "wait late")`.

    Raises:
        LookupError: nothing is stored, or not this.
    """
    return float(reduce(getitem, keys, _found()))  # type: ignore[arg-type]


# -- what the model predicts at the measured sizes


@lru_cache(maxsize=16)
def predicted_ms(layer: Layer, way: str) -> float:
    """The step of `layer(x, w, way)` at the measured size, by the model."""
    sizes = _found()["layer"]
    return _predicted_ms(lambda: layer(*layer_of_size(_empty, sizes), way))


@lru_cache(maxsize=16)
def predicted_window_ms(name: str) -> float | None:
    """The step of one variant at the measured size; None for what is no step."""
    from overlaplab_course.lab04 import reference  # not before it is needed

    average: Callable[..., Any] = reference.average_gradients
    if name == "no message":
        average = _gradients_only
    elif "stalling" in name or name == "no limit":
        average = reference.stalling
    elif "side stream" not in name:
        return None
    found = _found()
    limit = int(name.split("k=")[1]) if "k=" in name else len(found["tokens"])
    n, m = found["grads"]
    return _predicted_ms(
        lambda: average([(_empty(n, t), _empty(t, m)) for t in found["tokens"]], limit)
    )


def _gradients_only(layers: Sequence[Any], limit: int) -> list[Tensor]:
    return [backward(layer) for layer in layers]


def _empty(n: int, m: int) -> Tensor:
    return torch.empty(n, m, dtype=torch.bfloat16)


def _predicted_ms(step: Callable[[], Any]) -> float:
    """What a step would take where it was measured; no values are computed."""
    found = _found()
    program = run(step, world_size=int(found["world_size"]), fake=True).program
    assert program is not None
    return resolve(program, stored.profile_of(found)).step_ns / 1e6


# -- tables

# The ways that the lesson's own function knows.
_DRAWN = (
    *("async_op=False", "wait at once", "wait late"),
    *("wait at once, on another stream", "CPU waits at once"),
)
_WINDOWS = (
    *("no message", "no limit", "stalling, k=1", "side stream, k=1"),
    *("stalling, k=2", "side stream, k=2", "a message alone"),
)
_SIZES = ("4096", "1048576", "26214400", "419430400")
_HALVES = "reduce_scatter, all_gather"


@_shown
def gpus_table(found: stored.Stored, layer: Layer) -> list[str]:
    """All that was measured, in us, by section; steps beside their predictions."""
    head = ("section", "us", "predicted", "measured", "captured")
    rows: list[tuple[str, ...]] = []
    for way, ms in found["ways"].items():
        predicted = predicted_ms(layer, way) if way in _DRAWN else None
        rows.append(("3", way, _us(predicted), _us(ms), ""))
    for name in _WINDOWS:
        peak = found["window_peak_bytes"].get(name)
        what = f"{name} (peak {peak / MIB:.0f} MiB)" if peak else name
        ms = found["windows"].get(name)
        rows.append(("5", what, _us(predicted_window_ms(name)), _us(ms), ""))
    count, size = found["small_tensors"]
    for name, ms in found["small"].items():
        what = f"{count} tensors of {format_bytes(int(size))}, {name}"
        rows.append(("6", what, "", _us(ms), ""))
    eager, captured = found["by_size"], found.get("captured_by_size") or {}
    for name in ("all_reduce", _HALVES):
        for size in _SIZES if name == "all_reduce" else _SIZES[-1:]:
            what = f"{name} of {format_bytes(int(size))}"
            both = (table.get(name, {}).get(size) for table in (eager, captured))
            rows.append(("7", what, "", *map(_us, both)))
    return str(Table(head, tuple(rows), left=2)).split("\n")


def _us(ms: float | None) -> str:
    return "" if ms is None else f"{1e3 * ms:.0f}"
