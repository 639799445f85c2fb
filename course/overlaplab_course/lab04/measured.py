"""What lab 04 shows of real GPUs: stored measurements, and predictions beside them.

`python -m overlaplab_course.measure 04 --out FILE` measures; the file of this
package is measured.json. Without it there is nothing to show, and every table says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from overlaplab.cluster.run import run
from overlaplab.program import Program, resolve
from overlaplab_course.lab04 import reference
from overlaplab_course.lab04.board import MIB
from overlaplab_course.lab04.ring import bus_of_ours
from overlaplab_course.lab04.window import backward

_SMALLER = 64
_STORED = Path(__file__).with_name("measured.json")
COMMAND = "python -m overlaplab_course.measure 04 --out mine.json"
NOTHING = f"Nothing is measured yet. On a machine with two GPUs or more:\n    {COMMAND}"

Layer = Callable[[torch.Tensor, Mapping[str, torch.Tensor], str], Any]


@lru_cache(maxsize=1)
def stored() -> Mapping[str, Any] | None:
    """What was measured on GPUs, None if nothing was."""
    if not _STORED.exists():
        return None
    found: Mapping[str, Any] = json.loads(_STORED.read_text())
    return found if found.get("backend") == "nccl" else None


def machine() -> str:
    """The machine of all stored numbers, one line."""
    found = stored()
    if found is None:
        return NOTHING
    return (
        f"{found['world_size']} x {found['card']}, torch {found['torch']}, NCCL "
        f"{found['nccl']}, {found['date'][:10]}; medians, the slowest rank's"
    )


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"This machine has {count} GPUs. Two or more could measure here."
    return f"This machine has {count} GPUs. To measure here:\n    {COMMAND}"


def number(table: str, *keys: str) -> float:
    """One stored number: `number("ways", "wait late")`.

    Raises:
        LookupError: nothing is stored, or not this.
    """
    found: Any = stored()
    if found is None:
        raise LookupError(NOTHING)
    for key in (table, *keys):
        found = found[key]
    return float(found)


# -- the ways to wait


@lru_cache(maxsize=16)
def predicted_ms(layer: Layer, way: str) -> float:
    """The step of `layer(x, w, way)` at the measured size, by the model."""
    found = stored()
    assert found is not None
    sizes = tuple(size // _SMALLER for size in found["layer"])
    return _predicted_ms(_layer_of_size, layer, way, sizes)


def _predicted_ms(function: Callable[..., Any], *args: Any) -> float:
    """What a function would take with matrices `_SMALLER` times as large.

    Recorded small, then timed with as much more arithmetic and as many more bytes.
    """
    found = stored()
    assert found is not None
    seen = run(function, *args, world_size=int(found["world_size"]))
    assert seen.program is not None
    hardware = "h200-nvlink" if "H200" in found["card"] else "h100-nvlink"
    return resolve(enlarged(seen.program, _SMALLER), hardware).step_ns / 1e6


def _layer_of_size(layer: Layer, way: str, sizes: Sequence[int]) -> None:
    rows, inputs, middle, outputs = sizes

    def matrix(n: int, m: int) -> torch.Tensor:
        return torch.empty(n, m, dtype=torch.bfloat16)

    x = matrix(rows, inputs)
    w = {
        "in": matrix(inputs, middle),
        "out": matrix(middle, outputs),
        "side_in": matrix(inputs, outputs),
        "side_out": matrix(outputs, outputs),
    }
    layer(x, w, way)


def enlarged(program: Program, factor: int) -> Program:
    """`program` with matrices `factor` times as large in each dimension.

    For programs of matrix products and what works element by element: FLOPs grow with
    the third power, bytes with the second.
    """
    square, cube = factor**2, factor**3
    ranks = []
    for ops in program.ranks:
        larger = []
        for op in ops:
            collective = op.collective
            if collective is not None:
                parts = tuple(
                    replace(part, bytes=part.bytes * square)
                    for part in collective.payload
                )
                collective = replace(
                    collective, bytes=collective.bytes * square, payload=parts
                )
            larger.append(
                replace(
                    op,
                    flops=op.flops * cube,
                    read_bytes=op.read_bytes * square,
                    write_bytes=op.write_bytes * square,
                    collective=collective,
                )
            )
        ranks.append(tuple(larger))
    return replace(program, ranks=tuple(ranks), storages=(), names=())


def ways_table(layer: Layer) -> str:
    """Each way to wait: predicted and measured step, and what it adds to none."""
    found = stored()
    if found is None:
        return NOTHING
    ways: Mapping[str, float] = found["ways"]
    none_ms = ways["no message"]
    lines = [
        f"{'ms a step':<34}{'predicted':>10}{'measured':>10}{'the message adds':>18}"
    ]
    for way, ms in ways.items():
        if way == "the message alone":
            lines.append(f"{way:<34}{'':>10}{ms:>10.3f}")
            continue
        known = way in _DRAWN
        predicted = f"{predicted_ms(layer, way):.3f}" if known else ""
        added = "" if way == "no message" else f"{ms - none_ms:+.3f}"
        lines.append(f"{way:<34}{predicted:>10}{ms:>10.3f}{added:>18}")
    return "\n".join(lines)


# The ways that the lesson's own function knows.
_DRAWN = (
    "async_op=False",
    "wait at once",
    "wait late",
    "wait at once, on another stream",
    "CPU waits at once",
)


# -- collectives by size

_TITLES = {"reduce_scatter, all_gather": "the two halves"}


def by_size_table(table: str = "by_size") -> str:
    """us and bus bandwidth of each collective, by bytes of the whole tensor."""
    found = stored()
    if found is None:
        return NOTHING
    if not found.get(table):
        return "Not measured."
    measured: Mapping[str, Mapping[str, float]] = found[table]
    names = [name for name in measured if name != "refused"]
    if not names:
        return f"Not measured: {measured.get('refused', 'no reason given')}"
    lines = [f"{'':>10}" + "".join(f"{_TITLES.get(n, n):>20}" for n in names)]
    for size in measured[names[0]]:
        cells = ""
        for name in names:
            ms = measured[name][size]
            # Two halves together carry what an all-reduce does.
            operation = "all_reduce" if "," in name else name
            bus = bus_of_ours(
                operation, int(found["world_size"]), int(size), max(ms, 1e-6) * 1e3
            )
            cells += f"{f'{1e3 * ms:.0f} us, {bus:.0f} GB/s':>20}"
        lines.append(f"{_size(int(size)):>10}{cells}")
    return "\n".join(lines)


def _size(num_bytes: int) -> str:
    if num_bytes >= MIB:
        return f"{num_bytes // MIB} MiB"
    return f"{num_bytes // 1024} KiB"


# -- windows and small tensors


def windows_table() -> str:
    """Steps, predicted and measured, and peaks of exercise 4.4 at a size for GPUs."""
    found = stored()
    if found is None:
        return NOTHING
    steps: Mapping[str, float] = found["windows"]
    peaks: Mapping[str, int | None] = found["window_peak_bytes"]
    lines = [f"{'ms a step':<24}{'predicted':>10}{'measured':>10}{'peak (MiB)':>12}"]
    for name, ms in steps.items():
        peak, window_ms = peaks.get(name), predicted_window_ms(name)
        predicted = "" if window_ms is None else f"{window_ms:.3f}"
        told = f"{peak / MIB:.0f}" if peak else ""
        lines.append(f"{name:<24}{predicted:>10}{ms:>10.3f}{told:>12}")
    return "\n".join(lines)


@lru_cache(maxsize=16)
def predicted_window_ms(name: str) -> float | None:
    """The step of one variant at the measured size; None for what is no step."""
    found = stored()
    assert found is not None
    limit = int(name.split("k=")[1]) if "k=" in name else len(found["tokens"])
    if name == "no message":
        average: Callable[..., Any] = _gradients_only
    elif "side stream" in name:
        average = reference.average_gradients
    elif "stalling" in name or name == "no limit":
        average = reference.stalling
    else:
        return None
    n, m = (size // _SMALLER for size in found["grads"])
    tokens = tuple(t // _SMALLER for t in found["tokens"])
    return _predicted_ms(_window_of_size, average, limit, n, m, tokens)


def _window_of_size(
    average: Callable[..., Any], limit: int, n: int, m: int, tokens: Sequence[int]
) -> None:
    dtype = torch.bfloat16
    average(
        [
            (torch.empty(n, t, dtype=dtype), torch.empty(t, m, dtype=dtype))
            for t in tokens
        ],
        limit,
    )


def _gradients_only(layers: Sequence[Any], limit: int) -> list[torch.Tensor]:
    return [backward(layer) for layer in layers]


def small_table() -> str:
    """Many small all-reduces, in three ways."""
    found = stored()
    if found is None:
        return NOTHING
    count, size = found["small_tensors"]
    lines = [f"{count} tensors of {_size(int(size))}, us"]
    lines += [f"{name:<20}{1e3 * ms:>8.0f}" for name, ms in found["small"].items()]
    return "\n".join(lines)
