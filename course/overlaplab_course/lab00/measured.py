"""What lab 00 shows of real GPUs: stored measurements, beside what the model says.

`python -m overlaplab_course.measure 00` makes them. Where none are stored, every table
says so and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import Program, resolve
from overlaplab_course.lab00.given import last_launch_ns, step_of

STORED = Path(__file__).with_name("measured.json")
NOTHING = "No measurement of this lesson is stored yet."

Stored = Mapping[str, Any]


def read(path: Path = STORED) -> Stored | None:
    """The stored measurement, None if there is none."""
    if not path.exists():
        return None
    stored: Stored = json.loads(path.read_text(encoding="utf-8"))
    return stored


def _machine(stored: Stored) -> str:
    """Where and when it was measured, one line."""
    return "Measured: {world_size} x {card}, torch {torch}, NCCL {nccl}, {day}".format(
        **{"card": "CPU", "nccl": "-", **stored}, day=stored["date"][:10]
    )


def profile_of(stored: Stored) -> Hardware:
    """The profile that stands for the card."""
    card = str(stored.get("card", ""))
    return find_hardware("h200-nvlink" if "H200" in card else "h100-nvlink")


def _table(lines: Callable[[Stored], list[str]]) -> Callable[[Stored | None], str]:
    @wraps(lines)
    def table(stored: Stored | None) -> str:
        return NOTHING if stored is None else "\n".join(lines(stored))

    return table


@_table
def launches(stored: Stored) -> list[str]:
    """A queue of products: when the CPU was through, and when the GPU was."""
    dtype = getattr(torch, stored["steps"]["dtype"])
    return _returned_and_finished(
        stored,
        (
            (
                f"{row['number']} products, {row['width']} wide",
                row,
                _queue_of(row["number"], row["width"], dtype),
            )
            for row in stored["products"]
        ),
    )


def _queue_of(number: int, width: int, dtype: torch.dtype) -> Program:
    """Equal products, on shapes alone."""

    def multiply(a: torch.Tensor) -> None:
        for _ in range(number):
            torch.mm(a, a)

    a = torch.empty(width, width, dtype=dtype)
    program = run(multiply, a, world_size=1, fake=True).program
    assert program is not None
    return program


@_table
def backwards(stored: Stored) -> list[str]:
    """Forward and backward pass: when `backward()` returned, and when it was done."""
    steps = stored["steps"]
    layers, width, dtype = steps["layers"], steps["width"], steps["dtype"]
    rows = (
        (
            f"batch {row['batch']}",
            row,
            step_of(layers, width, row["batch"], getattr(torch, dtype)),
        )
        for row in steps["rows"]
    )
    head = f"{layers} layers, {width} wide, {dtype}"
    return [head, *_returned_and_finished(stored, rows)]


def _returned_and_finished(
    stored: Stored, rows: Iterable[tuple[str, Mapping[str, float], Program]]
) -> list[str]:
    rows, hardware = list(rows), profile_of(stored)
    wide = max(len(name) for name, _, _ in rows)
    lines = [
        f"{'':{wide}}  {'measured (ms)':>20}  {'predicted (ms)':>20}",
        f"{'':{wide}}  {'returned  finished':>20}  {'returned  finished':>20}",
    ]
    for name, row, program in rows:
        timeline = resolve(program, hardware)
        lines.append(
            f"{name:{wide}}  {row['returned_ms']:>10.2f}{row['finished_ms']:>10.2f}"
            f"  {last_launch_ns(timeline) / 1e6:>10.2f}{timeline.end_ns / 1e6:>10.2f}"
        )
    return [*lines, _machine(stored), f"Predicted: {hardware.name}"]


@_table
def launch_costs(stored: Stored) -> list[str]:
    """What an operator costs the CPU, bare and in a training step, where it bounds."""
    products, steps = stored["products"][0], stored["steps"]
    row, hardware = steps["rows"][0], profile_of(stored)
    num_ops = len(step_of(steps["layers"], steps["width"], row["batch"]).ranks[0])
    costs_ms = {
        f"a product of {products['number']}, {products['width']} wide": (
            products["returned_ms"] / products["number"]
        ),
        f"an operator of {num_ops} in a step, batch {row['batch']}": (
            row["returned_ms"] / num_ops
        ),
        f"a launch of the profile {hardware.name}": hardware.launch_ns / 1e6,
    }
    return [f"{name:<44}{1e3 * ms:>5.0f} us" for name, ms in costs_ms.items()]


@_table
def loops(stored: Stored) -> list[str]:
    """The two loops of exercise 0.3, ms per step, and what looking costs."""
    table = stored["loops"]
    lines = [
        f"{table['layers']} layers, {table['width']} wide, ms a step",
        f"{'':<12}{'item()':>10}{'at the end':>12}{'looking costs':>15}",
    ]
    for row in table["rows"]:
        item, end = row["item_ms"], row["at the end_ms"]
        lines.append(
            f"batch {row['batch']:<6}{item:>10.2f}{end:>12.2f}{item / end - 1:>14.0%}"
        )
    return [*lines, _machine(stored)]


@_table
def two_ranks(stored: Stored) -> list[str]:
    """Exercise 0.4 on real GPUs: the two orders, and both parts alone."""
    table = stored["two ranks"]
    parts = {
        "the product alone": table["product_ms"],
        "the message alone": table["message_ms"],
        "product first, then the message": table["product first_ms"],
        "message first, the product beside it": table["message first_ms"],
    }
    alone = min(table["product_ms"], table["message_ms"])
    saved = table["product first_ms"] - table["message first_ms"]
    return [
        *(f"{name:<38}{ms:>8.2f} ms" for name, ms in parts.items()),
        f"saved: {saved:.2f} of the {alone:.2f} ms that could be",
        _machine(stored),
    ]


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"This machine has {count} GPUs. Two or more could measure here."
    return (
        f"This machine has {count} GPUs. To measure here, run in a terminal:\n"
        "    python -m overlaplab_course.measure 00 --out FILE"
    )
