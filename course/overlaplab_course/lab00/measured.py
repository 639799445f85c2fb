"""What lab 00 shows of real GPUs: stored measurements, beside what the model says.

`python -m overlaplab_course.measure 00` makes them (overlaplab_course.measure
.lab00). Where none are stored, every table says so and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab00.runs import last_launch_ns
from overlaplab_course.lab00.written import written_products, written_step

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}

STORED = Path(__file__).with_name("measured.json")
NOTHING = "No measurement of this lesson is stored yet."


def read(path: Path = STORED) -> Mapping[str, Any] | None:
    """The stored measurement, None if there is none."""
    if not path.exists():
        return None
    stored: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def machine(stored: Mapping[str, Any]) -> str:
    """Where and when it was measured, one line."""
    return "Measured: {world_size} x {card}, torch {torch}, NCCL {nccl}, {day}".format(
        **{"card": "CPU", "nccl": "-", **stored}, day=stored["date"][:10]
    )


def profile_of(stored: Mapping[str, Any]) -> Hardware:
    """The profile that stands for the card."""
    card = str(stored.get("card", ""))
    return find_hardware("h200-nvlink" if "H200" in card else "h100-nvlink")


def launches(stored: Mapping[str, Any] | None) -> str:
    """A queue of products: when the CPU was through, and when the GPU was."""
    if stored is None:
        return NOTHING
    hardware = profile_of(stored)
    rows = []
    for row in stored["products"]:
        width, number = row["width"], row["number"]
        dtype = stored["steps"]["dtype"]
        program = written_products(
            number, width, dtype=dtype, element_bytes=_ELEMENT_BYTES[dtype]
        )
        timeline = resolve(program, hardware)
        rows.append((f"{number} products, {width} wide", row, timeline))
    return _returned_and_finished(rows, stored, hardware)


def backwards(stored: Mapping[str, Any] | None) -> str:
    """Forward and backward pass: when `backward()` returned, and when it was done."""
    if stored is None:
        return NOTHING
    hardware, steps = profile_of(stored), stored["steps"]
    rows = []
    for row in steps["rows"]:
        program = written_step(
            steps["layers"],
            steps["width"],
            row["batch"],
            dtype=steps["dtype"],
            element_bytes=_ELEMENT_BYTES[steps["dtype"]],
        )
        timeline = resolve(program, hardware)
        rows.append((f"batch {row['batch']}", row, timeline))
    head = f"{steps['layers']} layers, {steps['width']} wide, {steps['dtype']}\n"
    return head + _returned_and_finished(rows, stored, hardware)


def _returned_and_finished(
    rows: Sequence[tuple[str, Mapping[str, float], Timeline]],
    stored: Mapping[str, Any],
    hardware: Hardware,
) -> str:
    width = max(len(name) for name, _, _ in rows)
    lines = [
        f"{'':{width}}  {'measured (ms)':>20}  {'predicted (ms)':>20}",
        f"{'':{width}}  {'returned  finished':>20}  {'returned  finished':>20}",
    ]
    for name, row, timeline in rows:
        said = last_launch_ns(timeline) / 1e6, timeline.end_ns / 1e6
        lines.append(
            f"{name:{width}}  {row['returned_ms']:>10.2f}{row['finished_ms']:>10.2f}"
            f"  {said[0]:>10.2f}{said[1]:>10.2f}"
        )
    return "\n".join([*lines, machine(stored), f"Predicted: {hardware.name}"])


def launch_costs(stored: Mapping[str, Any] | None) -> str:
    """What an operator costs the CPU, bare and in a training step, where it bounds."""
    if stored is None:
        return NOTHING
    products, steps = stored["products"][0], stored["steps"]
    row = steps["rows"][0]
    num_ops = len(written_step(steps["layers"], steps["width"], row["batch"]).ranks[0])
    hardware = profile_of(stored)
    costs = {
        f"a product of {products['number']}, {products['width']} wide": (
            products["returned_ms"] / products["number"]
        ),
        f"an operator of {num_ops} in a step, batch {row['batch']}": (
            row["returned_ms"] / num_ops
        ),
        f"a launch of the profile {hardware.name}": hardware.launch_ns / 1e6,
    }
    return "\n".join(f"{name:<44}{1e3 * ms:>5.0f} us" for name, ms in costs.items())


def loops(stored: Mapping[str, Any] | None) -> str:
    """The two loops of exercise 0.3, ms a step, and what looking costs."""
    if stored is None:
        return NOTHING
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
    return "\n".join([*lines, machine(stored)])


def two_ranks(stored: Mapping[str, Any] | None) -> str:
    """Exercise 0.4 on real GPUs: the two orders, and both parts alone."""
    if stored is None:
        return NOTHING
    table = stored["two ranks"]
    parts = {
        "the product alone": table["product_ms"],
        "the message alone": table["message_ms"],
        "product first, then the message": table["product first_ms"],
        "message first, the product beside it": table["message first_ms"],
    }
    lines = [f"{name:<38}{ms:>8.2f} ms" for name, ms in parts.items()]
    alone = min(table["product_ms"], table["message_ms"])
    saved = table["product first_ms"] - table["message first_ms"]
    lines.append(f"saved: {saved:.2f} of the {alone:.2f} ms that could be")
    return "\n".join([*lines, machine(stored)])


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"This machine has {count} GPUs. Two or more could measure here."
    return (
        f"This machine has {count} GPUs. To measure here, run in a terminal:\n"
        "    python -m overlaplab_course.measure 00 --out FILE"
    )
