"""Steps whose communication a compiler put in, beside PyTorch's own, in one run.

For each model and batch: eager DDP at its best known setting, our eager reducer, our
compiled model by bucket size, eager and lowered through Inductor, and with the rows of
its embedding sent in place of the table, the compiled model under our reducer's hooks,
torch.compile of DDP by bucket size, and one graph with an all-reduce behind each
gradient, as it is and under Inductor's own passes. Every variant's gradients are
compared with a plain all-reduce before any time is believed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Graph, GraphModule

from overlaplab import streams
from overlaplab.bench import variants
from overlaplab.bench.memory import allocated_bytes
from overlaplab.bench.memory import peaks as peaks_of_ranks
from overlaplab.bench.timing import time_in_turn
from overlaplab.bench.variants import Batch, Variant
from overlaplab.bench.workload import build, plans, release_memory, say
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.techniques.buckets import MIB
from overlaplab.techniques.compiler import (
    Backend,
    Fragment,
    backend,
    forget,
    insert_all_reduces,
)
from overlaplab.techniques.compiler.lowering import KEEPS_ORDER, lower
from overlaplab.techniques.data_parallel import BucketedReducer

BATCHES = (2, 8)
EAGER, INDUCTOR = "compute", "compute, inductor"
# What moves and merges collectives there, off by default.
INDUCTOR_PASSES: dict[str, Any] = {
    "bucket_all_reduces_fx": "all",
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure."""

    tokens: int = 1024  # sequence length
    hardware: str | Hardware = "h200-nvlink"  # what our compiler compares orders by
    # Of our compiled models' buckets; 0: what the compiler chooses.
    caps_mib: tuple[float, ...] = (0, 25, 100, 2000)
    ddp_caps_mib: tuple[float, ...] = (25, 100)  # of torch.compile(DDP)'s
    serial_graph: bool = True  # whether Inductor compiles one that waits at once, too
    inductor: bool = True  # whether what Inductor compiles is measured
    warmup: int = 4
    rounds: int = 5
    steps_a_round: int = 6


_PLANS = plans("compiler", Plan)
REHEARSAL, BRIEF = _PLANS["rehearsal"], _PLANS["brief"]
# By link. Without P2P: two H200, `overlaplab calibrate` (course/prediction.md). There
# the host's memory is the limit, so that kernels hardly slow the wire.
HARDWARE = {
    "nvlink": find_hardware("h200-nvlink"),
    "p2p-off": replace(
        with_link("h200-nvlink", latency_ns=11_600, bytes_per_s=29_200_000_000),
        compute_rate_permille=848,
        wire_rate_permille=949,
        contention={
            "matmul": (910, 977),
            "attention": (896, 1000),
            "attention backward": (906, 941),
            "norm": (814, 1000),
            "elementwise": (957, 980),
        },
    ),
}


@dataclass
class Ours(Variant):
    """With the backend that compiled it, and how much equal ones had done before."""

    backend: Backend | None = None
    num_earlier: int = 0

    def predicted(self) -> dict[str, Any]:
        """Of the graphs that run: their messages, and how long they take by formula."""
        found = self.backend.compilations[self.num_earlier :] if self.backend else []
        sizes = [merge.bytes for each in found for merge in each.merges]
        return {
            "num_messages": len(sizes),
            "messages_mib": [round(size / MIB, 1) for size in sizes],
            "predicted_ms": round(sum(each.step_ns for each in found) / 1e6, 4),
        }


def measure_case(name: str, batch_size: int, plan: Plan) -> dict[str, Any]:
    """All variants of one model and batch size. Collective; rank 0's result counts.

    Exposed is a step minus the computing alone, of the same kind: what Inductor
    compiles minus Inductor's, the others minus eager computing.
    """
    from torch import _dynamo

    _dynamo.reset()
    forget()  # else a second batch size is sent as the first was planned
    _dynamo.config.recompile_limit = 64  # one model's code, many backends
    model, batch, head = build(name, batch_size, plan.tokens)
    say(f"\n{name}, batch {batch_size}")
    norm = variants.reference_norm(model, batch)
    built: dict[str, Variant] = {}
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for kind, make in _makers(model, batch, plan).items():
        start = time.perf_counter()
        variant = make()
        variant.step()
        streams.synchronize()
        seconds[kind] = round(time.perf_counter() - start, 3)
        for _ in range(plan.warmup):
            variant.step()
        if variant.averages:
            variants.check_gradients(variant, norm)
        peaks[kind] = _peak_bytes(variant)
        built[kind] = variant
    times = time_in_turn(
        {kind: variant.step for kind, variant in built.items()},
        num_rounds=plan.rounds,
        steps_a_round=plan.steps_a_round,
    )
    best = min(t.median_ns for kind, t in times.items() if "ddp" in kind)
    rows = {}
    for kind, samples in times.items():
        alone = INDUCTOR if "inductor" in kind else EAGER
        exposed_ns = samples.median_ns - times[alone].median_ns
        variant = built[kind]
        rows[kind] = {
            **samples.to_json(),
            **(variant.predicted() if isinstance(variant, Ours) else {}),
            "settings": variant.settings,
            "first_step_s": seconds[kind],
            "peak_bytes": peaks[kind],
            "exposed_ms": round(exposed_ns / 1e6, 4),
            "ratio_to_best_peer": round(samples.median_ns / best, 4),
        }
        say(
            f"  {kind:<32}{samples.median_ns / 1e6:9.3f} ms  "
            f"exposed {exposed_ns / 1e6:8.3f} ms  {samples.median_ns / best:.3f}  "
            f"first step {seconds[kind]:.1f} s  peak {peaks[kind] / 2**20:,.0f} MiB"
        )
    for variant in built.values():
        variant.close()
    built.clear()
    release_memory()
    return head | {"variants": rows, "gradient_norm": norm}


def _makers(
    model: nn.Module, batch: Batch, plan: Plan
) -> dict[str, Callable[[], Variant]]:
    of = functools.partial
    makers: dict[str, Callable[[], Variant]] = {
        EAGER: of(variants.compute, model, batch),
        "serial": of(variants.serial, model, batch),
        "ddp 100 views static": of(
            variants.ddp, model, batch, bucket_cap_mb=100, views=True, static_graph=True
        ),
        "our reducer": of(variants.bucketed, model, batch),
    }
    caps = {f"ours {cap:g}" if cap else "ours": cap for cap in plan.caps_mib}
    for name, cap in caps.items():
        makers[name] = of(ours, model, batch, cap, plan.hardware)
    makers["ours, rows"] = of(
        ours, model, batch, 0, plan.hardware, embedding_rows=batch[0].numel()
    )
    if plan.inductor:
        makers[INDUCTOR] = of(inductor, model, batch)
        makers["our reducer, inductor"] = of(inductor, model, batch, reduces=True)
        for name, cap in caps.items():
            makers[f"{name}, inductor"] = of(
                ours, model, batch, cap, plan.hardware, "inductor"
            )
        if plan.serial_graph:
            makers["serial graph, inductor"] = of(inserted, model, batch)
        makers["inductor's passes"] = of(inserted, model, batch, passes=True)
        for cap in plan.ddp_caps_mib:
            makers[f"ddp {cap:g}, inductor"] = of(inductor_ddp, model, batch, cap)
    return makers


def _stepping(
    name: str,
    settings: dict[str, Any],
    run: Callable[..., Any],
    twin: nn.Module,
    batch: Batch,
) -> Variant:
    def step() -> None:
        twin.zero_grad()
        run(*batch).backward()

    return Variant(name, settings, step, twin)


def _peak_bytes(variant: Variant) -> int:
    """Of a step, above what lay there before it, gradients let go; 0 on a CPU.

    Buffers that a variant keeps from step to step, as DDP its buckets, are not in it.
    """
    if streams.device().type != "cuda":
        return 0
    variant.model.zero_grad()
    before = allocated_bytes()
    torch.cuda.reset_peak_memory_stats()
    variant.step()
    return peaks_of_ranks()["peak_allocated_bytes"] - before


def ours(
    model: nn.Module,
    batch: Batch,
    mib: float,
    hardware: str | Hardware,
    lowering: str = "eager",
    *,
    embedding_rows: int | None = None,
) -> Ours:
    """The unmodified model under our backend, its operators one by one or fused."""
    twin = variants.share_parameters(model)
    settings: dict[str, Any] = {"bucket_mib": mib or None, "lowering": lowering}
    if embedding_rows is not None:
        settings["embedding_rows"] = embedding_rows
    made = backend(hardware=hardware, **settings)
    run = torch.compile(twin, backend=made)
    plain = _stepping(f"ours {mib:g} {lowering}", settings, run, twin, batch)
    earlier = len(made.compilations)
    return Ours(
        plain.name, settings, plain.step, twin, backend=made, num_earlier=earlier
    )


def inserted(model: nn.Module, batch: Batch, *, passes: bool = False) -> Variant:
    """An all-reduce behind each gradient, in one graph that Inductor compiles.

    Args:
        passes: whether Inductor merges and moves them; else each is waited for at once.
    """
    twin = variants.share_parameters(model)
    group = dist.distributed_c10d._get_default_group().group_name
    config = {n: v for n, v in INDUCTOR_PASSES.items() if _is_known(n)}

    def insert(fragment: Fragment) -> Graph:
        return insert_all_reduces(fragment.graph, fragment.gradients, group)

    def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return lower(module, inputs, insert, config if passes else KEEPS_ORDER)

    name = "inductor's passes" if passes else "serial graph, inductor"
    run = torch.compile(twin, backend=compile_graph)
    return _stepping(name, {"config": config} if passes else {}, run, twin, batch)


def _is_known(name: str) -> bool:
    """Whether this torch's Inductor has such a setting, for this device."""
    owner, _, last = name.rpartition(".")
    if owner and streams.device().type != "cuda":
        return False  # it asks the GPU for its bandwidth
    from torch._inductor import config

    return hasattr(getattr(config, owner, config), last)


def _inductor() -> Callable[..., Any]:
    """Inductor under a name of its own, for each variant.

    Dynamo keeps what it compiled by code and backend: under one name DDP would get the
    graph that was compiled without it, which is not split where its buckets end.
    """
    from torch._inductor.compile_fx import compile_fx

    def compile_graph(module: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx(module, inputs)

    return compile_graph


def inductor(model: nn.Module, batch: Batch, *, reduces: bool = False) -> Variant:
    """Computing as Inductor compiles it, alone or under our reducer's hooks."""
    twin = variants.share_parameters(model)
    made = torch.compile(twin, backend=_inductor())
    if not reduces:
        variant = _stepping(INDUCTOR, {}, made, twin, batch)
        variant.averages = False
        return variant
    reducer = BucketedReducer(twin)

    def step() -> None:
        twin.zero_grad()
        made(*batch).backward()
        reducer.wait()

    return Variant("our reducer, inductor", {}, step, twin, close=reducer.remove)


def inductor_ddp(model: nn.Module, batch: Batch, mib: float) -> Variant:
    """torch.compile(DDP): Dynamo splits the graph where DDP's buckets end."""
    twin = variants.share_parameters(model)
    settings = {"bucket_cap_mb": mib, "gradient_as_bucket_view": True}
    wrapped = variants.wrap_in_ddp(twin, **settings)
    made = torch.compile(wrapped, backend=_inductor())
    return _stepping(f"ddp {mib:g}, inductor", settings, made, twin, batch)
