"""Launches of every case on this machine's GPU: one profile of all, then times alone.

On a CPU process it rehearses: operators for kernels, and no memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlaplab import streams
from overlaplab.bench.launches.cases import (
    Case,
    Sizes,
    build_module,
    build_optimizer,
)
from overlaplab.bench.workload import release_memory
from overlaplab.calibrate.clock import device_ns, on_cuda
from overlaplab.operators import tensor_bytes
from overlaplab.profiling.profile import profile
from overlaplab.profiling.trace.names import short_name
from overlaplab.timeline import Timeline

Write = Callable[[dict[str, Any]], None]

_ROUNDS = 3  # of each case in the profile


def measure_launches(
    sizes: Sizes, modules: Iterable[str], optimizers: Iterable[str], write: Write
) -> None:
    """Measure these of MODULES and OPTIMIZERS; `write` what is there after each part.

    Args:
        write: gets "sizes", "workspaces", and for each module and optimizer its phases:
            "operators" below autograd with the bytes of arguments and results,
            "kernels" by operator and name with their number and microseconds, "gpu_us"
            back to back without the profiler, memory, and what autograd saves.
    """
    found: dict[str, Any] = {
        "sizes": asdict(sizes),
        "workspaces": _workspaces(),
        "modules": {},
        "optimizers": {},
    }
    for name in modules:
        found["modules"][name] = _facts_of(build_module(name, sizes))
        release_memory()
    write(found)
    for name in optimizers:
        found["optimizers"][name] = _facts_of_step(name, sizes)
        release_memory()
    write(found)
    _profile_all(found, sizes)
    write(found)


# What an operator's arguments and results say, and what autograd keeps.


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators below autograd by the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _sizes_of((args, kwargs))
        out = func(*args, **kwargs)
        if func.namespace == "aten" and not func.is_view:
            self._seen[str(func).removeprefix("aten."), inputs, _sizes_of(out)] += 1
        return out

    def rows(self) -> list[list[Any]]:
        """[name, inputs, outputs, how often]; tensors are ["bytes x how many"]."""
        return [
            [name, list(inputs), list(outputs), count]
            for (name, inputs, outputs), count in self._seen.items()
        ]


def _sizes_of(tree: Any) -> tuple[str, ...]:
    sizes: list[list[int]] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            size = tensor_bytes(leaf)
            if sizes and sizes[-1][0] == size:
                sizes[-1][1] += 1
            else:
                sizes.append([size, 1])
    return tuple(f"{size} x {count}" for size, count in sizes)


class Saved(saved_tensors_hooks):
    """What autograd keeps for the backward, without parameters and inputs."""

    def __init__(self, case: Case) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._given = {_storage(t) for t in (*case.parameters, *case.inputs)}
        self._kept: dict[int, Tensor] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._given:
            self._kept[_storage(tensor)] = tensor
        return tensor

    def rows(self) -> list[list[Any]]:
        """[shape, dtype, bytes of the storage], one a storage."""
        return [
            [list(t.shape), _dtype(t), t.untyped_storage().nbytes()]
            for t in self._kept.values()
        ]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def forget_gradients(case: Case) -> None:
    for leaf in case.leaves:
        leaf.grad = None


def _facts_of(case: Case) -> dict[str, Any]:
    gradient = torch.ones_like(case.call(*case.inputs))
    torch.autograd.backward(
        case.call(*case.inputs), gradient
    )  # the first call chooses kernels
    forget_gradients(case)
    saved = Saved(case)
    with saved, Operators() as forward:
        out = case.call(*case.inputs)
    with Operators() as backward:
        torch.autograd.backward(out, gradient)
    forget_gradients(case)
    rows = saved.rows()
    del saved, out
    found: dict[str, Any] = {
        "saved_bytes": sum(size for _, _, size in rows),
        "saved": rows,
        "memory": _memory_of(case, gradient),
        "forward": {"operators": forward.rows()},
        "backward": {"operators": backward.rows()},
    }
    for phase, its_ns in _times(case, gradient).items():
        found[phase] = found.get(phase, {}) | {"gpu_us": its_ns / 1000}
    return found


def _facts_of_step(name: str, sizes: Sizes) -> dict[str, Any]:
    step, parameters = build_optimizer(name, sizes)
    with Operators() as seen:
        step()
    _restart_peak()
    before = _allocated()
    step()
    peak = {k: v - before[k] for k, v in _peak().items()}
    time_ns = device_ns(step, 1)
    return {
        "parameters": len(parameters),
        "memory": {"peak": peak},
        "step": {"operators": seen.rows(), "gpu_us": time_ns / 1000},
    }


def _times(case: Case, gradient: Tensor) -> dict[str, int]:
    """Nanoseconds of the forward alone (with autograd), and of both."""

    def forward() -> Tensor:
        return case.call(*case.inputs)

    def both() -> None:
        forget_gradients(case)
        torch.autograd.backward(forward(), gradient)

    return {"forward": device_ns(forward, 10), "both": device_ns(both, 10)}


# Memory.


def _allocated() -> dict[str, int]:
    """Bytes of tensors: as the allocator rounds them, and as they were asked for."""
    return _stats("current")


def _peak() -> dict[str, int]:
    return _stats("peak")


def _stats(which: str) -> dict[str, int]:
    if not on_cuda():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        kind: stats[f"{kind}_bytes.all.{which}"] for kind in ("allocated", "requested")
    }


def _restart_peak() -> None:
    streams.synchronize()
    if on_cuda():
        torch.cuda.reset_peak_memory_stats()


def _memory_of(case: Case, gradient: Tensor) -> dict[str, Any]:
    """More than before the forward: after it, and the most in each phase."""
    before = _allocated()
    _restart_peak()
    out = case.call(*case.inputs)
    after, in_forward = _allocated(), _peak()
    _restart_peak()
    torch.autograd.backward(out, gradient)
    in_backward = _peak()
    del out
    forget_gradients(case)
    rows = {"after_forward": after, "forward": in_forward, "backward": in_backward}
    return {
        name: {kind: bytes - before[kind] for kind, bytes in row.items()}
        for name, row in rows.items()
    }


def _workspaces() -> dict[str, int]:
    """Bytes that stay allocated after the first calls of cuBLAS, in order."""
    matrix = torch.ones(64, 64, device=streams.device(), dtype=torch.bfloat16)
    row, side = matrix[0], streams.Stream()
    result = torch.empty_like(matrix)
    found = {}
    calls: dict[str, Callable[[], object]] = {
        "mm": lambda: torch.mm(matrix, matrix, out=result),
        "addmm": lambda: torch.addmm(row, matrix, matrix, out=result),
        "bmm": lambda: torch.bmm(matrix[None], matrix[None], out=result[None]),
    }
    for stream in (streams.current_stream(), side):
        where = "on another stream" if stream is side else "first"
        for name, call in calls.items():
            before = _allocated().get("allocated", 0)
            with streams.stream(stream):
                call()
            streams.synchronize()
            found[f"{name}, {where}"] = _allocated().get("allocated", 0) - before
    return found


# Kernels.


def _profile_all(found: dict[str, Any], sizes: Sizes) -> None:
    """Add `kernels` and `kernel_us` to each phase of each case, from one profile."""
    order: list[dict[str, Any] | None] = []  # whose each step of the profile is

    with profile() as profiled:

        def end(phase: dict[str, Any] | None = None) -> None:
            streams.synchronize()
            profiled.step()
            order.append(phase)

        for name, facts in found["modules"].items():
            case = build_module(name, sizes)
            gradient = torch.ones_like(case.call(*case.inputs))
            for _ in range(_ROUNDS):
                forget_gradients(case)
                end()
                out = case.call(*case.inputs)
                end(facts["forward"])
                torch.autograd.backward(out, gradient)
                end(facts["backward"])
                del out
            del case, gradient
            release_memory()
        for name, facts in found["optimizers"].items():
            step, parameters = build_optimizer(name, sizes)
            for _ in range(_ROUNDS):
                end()
                step()
                end(facts["step"])
            del step, parameters
            release_memory()
    timeline = profiled.timeline
    rounds: dict[int, list[list[list[Any]]]] = defaultdict(list)
    phases = {id(phase): phase for phase in order if phase is not None}
    for number, phase in enumerate(order):
        if phase is not None and number in timeline.steps:
            rounds[id(phase)].append(_kernels(timeline.of_step(number)))
    for key, seen in rounds.items():
        middle = sorted(seen, key=_total_us)[len(seen) // 2]
        phases[key] |= {"kernels": middle, "kernel_us": _total_us(middle)}


def _kernels(step: Timeline) -> list[list[Any]]:
    """[operator, kernel, how many, microseconds of all], as first launched."""
    count: Counter[tuple[str, str]] = Counter()
    length: Counter[tuple[str, str]] = Counter()
    for span in sorted(step.spans, key=lambda span: span.start_ns):
        if span.kind not in ("launch", "host"):
            kernel = short_name(str(span.attributes.get("kernel", span.kind)))
            count[span.name, kernel] += 1
            length[span.name, kernel] += span.duration_ns
    return [[*key, count[key], length[key] / 1000] for key in count]


def _total_us(rows: list[list[Any]]) -> float:
    return round(sum(float(row[3]) for row in rows), 3)
