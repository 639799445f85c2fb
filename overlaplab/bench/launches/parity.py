"""What the virtual cluster launches, beside what CUDA launched; no GPU is needed.

Kernels (memsets apart: cuBLAS and cuDNN clear counters by them), the bytes that
operators read and write by their arguments and results, and what autograd saves.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overlaplab import streams
from overlaplab.bench.launches.cases import (
    MODULES,
    OPTIMIZERS,
    Sizes,
    build_module,
    build_optimizer,
)
from overlaplab.bench.launches.measure import Saved, forget_gradients
from overlaplab.hardware import Hardware, compute_ns
from overlaplab.operators import Operator, operator
from overlaplab.program import Op

Counts = dict[str, int]  # by COLUMNS
COLUMNS = "kernels", "read", "written"
SAVED = "saved"
STORED = Path(__file__).parents[1] / "results/launches-1xH200-2026-11-29.json"

# Where they differ, by phase: ours minus CUDA's of each column, and "why".
DEVIATIONS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("deviations.toml").read_text("utf-8")
)


def of_cuda(stored: Mapping[str, Any]) -> dict[str, Counts]:
    """The counts of each phase of a stored measurement: "rms_norm, forward"."""
    found: dict[str, Counts] = {}
    for name, facts in stored["modules"].items():
        for phase in ("forward", "backward"):
            found[f"{name}, {phase}"] = _counted(facts[phase])
        found[f"{name}, forward"][SAVED] = facts["saved_bytes"]
    for name, facts in stored["optimizers"].items():
        found[name] = _counted(facts["step"], facts["parameters"])
    return found


@dataclass(frozen=True)
class Recorded:
    """All cases on the virtual cluster, on fake tensors.

    Args:
        phases: "rms_norm, forward", ..., in order.
        operators: of each phase.
        saved_bytes: by module.
    """

    phases: tuple[str, ...]
    operators: tuple[tuple[Op, ...], ...]
    saved_bytes: Mapping[str, int]

    def counts(self) -> dict[str, Counts]:
        found = {
            name: {
                "kernels": sum(op.launches for op in ops),
                "read": sum(op.read_bytes for op in ops),
                "written": sum(op.write_bytes for op in ops),
            }
            for name, ops in zip(self.phases, self.operators, strict=True)
        }
        for name, num_bytes in self.saved_bytes.items():
            found[f"{name}, forward"][SAVED] = num_bytes
        return found

    def times_us(self, hardware: Hardware) -> dict[str, float]:
        """Microseconds of each phase alone, its kernels one after the other."""

        def alone_ns(op: Op) -> int:
            moved = op.read_bytes + op.write_bytes
            return compute_ns(hardware, op.flops, op.dtype, moved, op.name)

        return {
            name: sum(map(alone_ns, ops)) / 1000
            for name, ops in zip(self.phases, self.operators, strict=True)
        }


def record_cases(sizes: Sizes) -> Recorded:
    from overlaplab.cluster.virtual import run_virtual

    answers, program = run_virtual(_run_all, (sizes,), world_size=1, fake=True)
    phases, saved_bytes = answers[0]
    operators: list[list[Op]] = [[] for _ in phases]
    for op in program.ranks[0]:
        number = op.attributes.get("step")
        if number is not None and op.kind == "compute":
            operators[number].append(op)
    return Recorded(tuple(phases), tuple(map(tuple, operators)), saved_bytes)


def _run_all(sizes: Sizes) -> tuple[list[str], dict[str, int]]:
    """Each phase as a step: labels are the optimizers' own."""
    phases: list[str] = []
    saved_bytes = {}
    for name in MODULES:
        case = build_module(name, sizes)
        gradient = torch.ones_like(case.call(*case.inputs))
        saved = Saved(case)
        with saved, streams.step(len(phases)):
            out = case.call(*case.inputs)
        saved_bytes[name] = sum(row[2] for row in saved.rows())
        phases.append(f"{name}, forward")
        with streams.step(len(phases)):
            torch.autograd.backward(out, gradient)
        phases.append(f"{name}, backward")
        forget_gradients(case)
    for name in OPTIMIZERS:
        step, _ = build_optimizer(name, sizes)
        with streams.step(len(phases)):
            step()
        phases.append(name)
    return phases, saved_bytes


def _counted(phase: Mapping[str, Any], parameters: int = 0) -> Counts:
    kernels = sum(row[2] for row in phase["kernels"] if row[1] != "memset")
    read = written = 0
    for name, inputs, outputs, count in phase["operators"]:
        its_read, its_written = _bytes(name, inputs, outputs, parameters)
        read += count * its_read
        written += count * its_written
    return dict(zip(COLUMNS, (kernels, read, written), strict=True))


def _bytes(
    name: str, inputs: list[str], outputs: list[str], parameters: int
) -> tuple[int, int]:
    """What one call reads and writes, by what is stored of its tensors."""
    packet, overload = name.split(".")
    func = getattr(getattr(torch.ops.aten, packet), overload)
    facts: Operator = operator(func)
    if not facts.records or facts.host_sync:
        return 0, 0
    groups = [tuple(map(int, group.split(" x "))) for group in inputs]
    if name.endswith("add_.Tensor") and all(size <= 8 for size, _ in groups):
        return 0, 0  # numbers of steps, in the CPU's memory
    read = sum(size * count for size, count in groups)
    written = _sum(outputs)
    if facts.writes and not outputs:  # lists in place: all are equal in size
        one = groups[0][0] * parameters
        written = one * (3 if packet.startswith("_fused") else 1)
    if not facts.reads:
        read = 0
    elif facts.overwrites:
        read -= written
    return read, written


def _sum(groups: list[str]) -> int:
    return sum(int(size) * int(n) for size, n in (g.split(" x ") for g in groups))


def table(cuda: Mapping[str, Counts], ours: Mapping[str, Counts]) -> str:
    """Markdown: for each phase CUDA's counts, and ours where they differ."""
    lines = [
        "| | kernels | MB read | MB written | MB saved |",
        "|---|---|---|---|---|",
    ]
    for label, counts in cuda.items():
        cells = [label]
        for column in (*COLUMNS, SAVED):
            its, mine = counts.get(column), ours[label].get(column)
            cells.append(_cell(column, its, mine))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(column: str, its: int | None, mine: int | None) -> str:
    if its is None or mine is None:
        return ""

    def text(value: int) -> str:
        return str(value) if column == "kernels" else f"{value / 1e6:.2f}"

    both = text(its), text(mine)
    return both[0] if both[0] == both[1] else f"{both[0]} (ours {both[1]})"
