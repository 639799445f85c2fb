"""Profiles for the head, for Ethernet and for CPUs, each number with its source.

"Issue" is one of that repository on GitHub.
"""

from __future__ import annotations

from dataclasses import replace

from overlaplab.hardware.model import Hardware, Link
from overlaplab.hardware.nvlink_machines import H100_NVLINK

_TERA = 10**12
_GIGA = 10**9

CHALK = Hardware(
    name="chalk",
    flops_per_s={"default": _TERA},
    memory_bytes_per_s=_TERA,
    kernel_floor_ns=0,
    launch_ns=0,
    collective_launch_ns=0,
    link=Link(
        latency_ns=1_000,
        bytes_per_s=10 * _GIGA,
        source="round numbers: 1 us, then 0.1 ns a byte",
    ),
    host_bytes_per_s=10 * _GIGA,
    pageable_bytes_per_s=5 * _GIGA,
    source=(
        "no machine: round numbers for the head. 1000 FLOP or 1000 bytes of memory "
        "take 1 ns; two ranks all-reduce n bytes in 1000 + n/10 ns, four in 1000 + "
        "0.15 n ns; launching is free and nothing slows anything else"
    ),
)

ETHERNET_100G = replace(
    H100_NVLINK,
    name="ethernet-100g",
    link=Link(
        latency_ns=100_000,
        bytes_per_s=12_500_000_000,
        source="100 Gbit/s by definition; 100 us a collective, assumed",
    ),
    compute_rate_permille=1000,
    wire_rate_permille=1000,
    source="one H100 a node, joined by 100 Gbit/s Ethernet with 100 us; not measured",
    notes={
        **H100_NVLINK.notes,
        "compute_rate_permille": (
            "taken as none: so slow a link needs few of the GPU's processors; not "
            "measured"
        ),
        "wire_rate_permille": "taken as none; not measured",
    },
)

ETHERNET_25G = replace(
    ETHERNET_100G,
    name="ethernet-25g",
    link=Link(
        latency_ns=100_000,
        bytes_per_s=3_125_000_000,
        source=(
            "25 Gbit/s by definition. 100 us a collective, assumed: 8 bytes took 38 to "
            "46 us on one network (NVIDIA/nccl-tests issue 82) and 164 us on another "
            "(NVIDIA/nccl issue 527). NCCL over TCP may not reach the wire: at most "
            "60 % of 32 Gbit/s (NVIDIA/nccl issue 209), under half of 100 (issue 450)"
        ),
    ),
    source="one H100 a node, joined by 25 Gbit/s Ethernet with 100 us; not measured",
)

_CORE = "one core of a cloud machine's AMD EPYC (Zen 3), shared, best of several runs"

LAPTOP = Hardware(
    name="laptop",
    flops_per_s={"default": 50 * _GIGA},
    memory_bytes_per_s=5 * _GIGA,
    kernel_floor_ns=4_000,
    launch_ns=0,
    collective_launch_ns=0,
    link=Link(
        latency_ns=150_000,
        bytes_per_s=_GIGA // 2,
        hop_ns=200_000,
        source=(
            "gloo between processes of one machine with two busy cores, torch 2.13.0: "
            "an all_reduce of 4 bytes took 0.15 ms on 2 ranks and 0.36 on 4; 1 MiB on "
            "2 ranks 0.53 GB/s of bus bandwidth, 32 MiB on 4 ranks 0.46. An idle "
            "laptop does better"
        ),
    ),
    host_bytes_per_s=5 * _GIGA,
    pageable_bytes_per_s=5 * _GIGA,
    source=(
        "processes of one machine, one core each, without a GPU. What the model calls "
        "device is the same core: the real one launches nothing and waits where it "
        "computes, so look here for proportions, not for times"
    ),
    notes={
        "flops_per_s": (
            f"{_CORE}, torch 2.13.0, fp32 matmul: 79 GFLOP/s at 256, 20 to 34 at 512 "
            "and 1024; between them"
        ),
        "memory_bytes_per_s": f"{_CORE}: copying 64 MiB read and wrote 5.1 GB/s",
        "kernel_floor_ns": f"{_CORE}: adding to two numbers in place took 4.1 us",
        "launch_ns": "the operator's own 4 us are its launch",
        "collective_launch_ns": "as launch_ns; the link's latency has it",
        "compute_rate_permille": (
            "taken as none; where ranks and gloo's threads share cores it is not so"
        ),
        "wire_rate_permille": "taken as none, as compute_rate_permille",
        "host_bytes_per_s": "host and device are one memory: as memory_bytes_per_s",
        "pageable_bytes_per_s": "as host_bytes_per_s: a CPU needs no pinned memory",
    },
)
