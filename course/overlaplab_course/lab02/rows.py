"""Rows of a trace, as a profiler writes them, and rows that nobody has seen.

A row knows no kind: whether it computes or communicates is exercise 2.4.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Row(NamedTuple):
    """One event of a trace.

    Args:
        name: as the profiler wrote it.
        category: "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation" (a range
            of the user's, drawn on the GPU), "cpu_op", "cuda_runtime".
        stream: number of the GPU's stream; of an event of the CPU, its thread.
        start_ns, end_ns: integers.
        args: what else the profiler knows.
    """

    name: str
    category: str
    stream: int
    start_ns: int
    end_ns: int
    args: Mapping[str, Any] = NO_ARGS


COMMUNICATION_WORDS = (
    "nccl",
    "rccl",
    "multimem",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "cross_device_reduce",
)


def is_communication(row: Row) -> bool:
    """Whether a row is a kernel that communicates: the course's own (exercise 2.4)."""
    if row.category != "kernel":
        return False
    name = row.name.lower()
    return "Collective name" in row.args or any(w in name for w in COMMUNICATION_WORDS)


def as_table(rows: Sequence[Row]) -> str:
    """Rows as lines, times in us."""
    width = max((len(row.name) for row in rows), default=0)
    return "\n".join(
        f"{row.name:{width}}  {row.category:<19} stream {row.stream:<3}"
        f"{row.start_ns / 1e3:>7g} to {row.end_ns / 1e3:g} us"
        for row in rows
    )


def kernel(name: str, stream: int, start_us: float, end_us: float, **args: Any) -> Row:
    """A kernel, from times in us."""
    return Row(name, "kernel", stream, _ns(start_us), _ns(end_us), args)


def other(category: str, name: str, stream: int, start_us: float, end_us: float) -> Row:
    """What is no kernel."""
    return Row(name, category, stream, _ns(start_us), _ns(end_us))


def unseen_rows(seed: int) -> list[Row]:
    """A step of a GPU with several streams, drawn anew: everything at once."""
    draw = random.Random(seed)
    rows = []
    # Large clocks: a float cannot hold them to the nanosecond.
    base_ns = 1_700_000_000_000_000_000 + draw.randrange(10**9)
    streams = (7, 20, draw.choice((7, 24)))
    for stream, names in (
        (streams[0], _COMPUTE),
        (streams[1], _TALKS),
        (streams[2], _COMPUTE + _TALKS),
    ):
        at_ns = base_ns
        for _ in range(draw.randrange(5, 20)):
            at_ns += draw.choice((0, draw.randrange(1, 30_000)))
            end_ns = at_ns + draw.choice((0, draw.randrange(200, 40_000)))
            rows.append(Row(draw.choice(names), "kernel", stream, at_ns, end_ns))
            at_ns = end_ns
    for category, name in _OTHERS:
        at_ns = base_ns + draw.randrange(200_000)
        length_ns = draw.randrange(1000, 100_000)
        rows.append(Row(name, category, 7, at_ns, at_ns + length_ns))
    draw.shuffle(rows)
    return rows


def _ns(time_us: float) -> int:
    return round(1000 * time_us)


_COMPUTE = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float>>(...)",
    "my_fused_op",
    "triton_red_fused__to_copy_sum_3",
)
_TALKS = (
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclSymkDevKernel_AllGather_LL(...)",
    "void rcclGenericKernel<1>(...)",
)
_OTHERS = (
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"),
    ("gpu_memset", "Memset (Device)"),
    ("gpu_user_annotation", "nccl:all_reduce"),
    ("gpu_user_annotation", "forward"),
    ("cpu_op", "c10d::allreduce_"),
    ("cuda_runtime", "cudaLaunchKernel"),
)
