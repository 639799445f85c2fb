"""What lab 00 shows of real GPUs: stored measurements, beside what the model says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch

from overlaplab.cluster.run import run
from overlaplab.program import Program, resolve
from overlaplab_course import stored
from overlaplab_course.lab00.given import last_launch_ns, step_of
from overlaplab_course.stored import Stored, profile_of

_shown = stored.shown("00")
measure_it_here = partial(
    stored.measure_it_here, "python -m overlaplab_course.measure 00 --out FILE"
)


def _machine(found: Stored) -> str:
    return f"Measured: {stored.machine(found)}"


@_shown
def launches(found: Stored) -> list[str]:
    """A queue of products: when the CPU was through, and when the GPU was."""
    dtype = getattr(torch, found["steps"]["dtype"])

    def multiply(a: torch.Tensor, number: int) -> None:
        for _ in range(number):
            torch.mm(a, a)

    rows = []
    for row in found["products"]:
        width, number = row["width"], row["number"]
        a = torch.empty(width, width, dtype=dtype)
        program = run(multiply, a, number, world_size=1, fake=True).program
        rows.append((f"{number} products, {width} wide", row, program))
    return _returned_and_finished(found, rows)


@_shown
def backwards(found: Stored) -> list[str]:
    """Forward and backward pass: when `backward()` returned, and when it was done."""
    steps = found["steps"]
    layers, width, dtype = steps["layers"], steps["width"], steps["dtype"]
    rows = []
    for row in steps["rows"]:
        program = step_of(layers, width, row["batch"], getattr(torch, dtype))
        rows.append((f"batch {row['batch']}", row, program))
    head = f"{layers} layers, {width} wide, {dtype}"
    return [head, *_returned_and_finished(found, rows)]


def _returned_and_finished(
    found: Stored, rows: Iterable[tuple[str, Mapping[str, float], Program | None]]
) -> list[str]:
    rows, hardware = list(rows), profile_of(found)
    wide = max(len(name) for name, _, _ in rows)
    lines = [
        f"{'':{wide}}  {'measured (ms)':>20}  {'predicted (ms)':>20}",
        f"{'':{wide}}  {'returned  finished':>20}  {'returned  finished':>20}",
    ]
    for name, row, program in rows:
        assert program is not None
        timeline = resolve(program, hardware)
        lines.append(
            f"{name:{wide}}  {row['returned_ms']:>10.2f}{row['finished_ms']:>10.2f}"
            f"  {last_launch_ns(timeline) / 1e6:>10.2f}{timeline.end_ns / 1e6:>10.2f}"
        )
    return [*lines, _machine(found), f"Predicted: {hardware.name}"]


@_shown
def launch_costs(found: Stored) -> list[str]:
    """What an operator costs the CPU, bare and in a training step, where it bounds."""
    bare, steps, hardware = found["products"][0], found["steps"], profile_of(found)
    row = steps["rows"][0]
    num_ops = len(step_of(steps["layers"], steps["width"], row["batch"]).ranks[0])
    costs_ms = {
        f"a product of {bare['number']}, {bare['width']} wide": (
            bare["returned_ms"] / bare["number"]
        ),
        f"an operator of {num_ops} in a step, batch {row['batch']}": (
            row["returned_ms"] / num_ops
        ),
        f"a launch of the profile {hardware.name}": hardware.launch_ns / 1e6,
    }
    return stored.columns((n, f"{1e3 * ms:.0f} us") for n, ms in costs_ms.items())


@_shown
def loops(found: Stored) -> list[str]:
    """The two loops of exercise 0.3, ms per step, and what looking costs."""
    table = found["loops"]
    rows = [("", "item()", "at the end", "looking costs")]
    for row in table["rows"]:
        item, end = row["item_ms"], row["at the end_ms"]
        costs = f"{item / end - 1:.0%}"
        rows.append((f"batch {row['batch']}", f"{item:.2f}", f"{end:.2f}", costs))
    head = f"{table['layers']} layers, {table['width']} wide, ms per step"
    machine = _machine(found | table)  # a run of its own, where it says so
    return [head, *stored.columns(rows), machine]


@_shown
def two_ranks(found: Stored) -> list[str]:
    """Exercise 0.4 on real GPUs: the two orders, and both parts alone."""
    table = found["two ranks"]
    product, message, before, after = (
        table[f"{key}_ms"]
        for key in ("product", "message", "product first", "message first")
    )
    rows = (
        ("the product alone", product),
        ("the message alone", message),
        ("product first, then the message", before),
        ("message first, the product beside it", after),
    )
    return [
        *stored.columns((name, f"{ms:.2f} ms") for name, ms in rows),
        f"saved: {before - after:.2f} of the {min(product, message):.2f} ms that could "
        "be",
        _machine(found),
    ]
