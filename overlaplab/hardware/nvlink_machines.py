"""Profiles of NVIDIA GPUs joined by NVLink, each number with its source.

"Issue" is one of that repository on GitHub.
"""

from __future__ import annotations

from dataclasses import replace

from overlaplab.hardware.model import Hardware, Link

_TERA = 10**12
_GIGA = 10**9

_NVLINK = Link(
    latency_ns=44_000,
    bytes_per_s=340 * _GIGA,
    source=(
        "all_reduce alone, NCCL 2.28.9, 18 NVLinks a GPU, H200: empty 0.044 ms on 4 "
        "ranks; wire bytes 2 (n-1)/n B over (time - 0.044 ms): 25 MiB in 0.161 ms on "
        "4 ranks 336 GB/s, 100 MiB in 0.518 ms 332, 1.477 GB in 6.3 ms 354, and on 2 "
        "ranks in 4.4 ms 339; rounded middle. Too low for small ones: 1 MiB is "
        "predicted at 0.049 ms, measured 0.064"
    ),
)

_GPT = "a GPT of 738.5 M parameters, bf16, sequences of 1024, torch 2.11.0, H200s"

_PAGEABLE = (
    "a fourth of pinned, assumed: pinning made the copies of DeepSpeed's offload 4 to "
    "6 times faster (microsoft/DeepSpeed pull request 5301)"
)

H200_NVLINK = Hardware(
    name="h200-nvlink",
    flops_per_s={
        "default": 50 * _TERA,
        "float32": 50 * _TERA,
        "float64": 50 * _TERA,
        "bfloat16": 780 * _TERA,
        "float16": 780 * _TERA,
    },
    memory_bytes_per_s=2_000 * _GIGA,
    kernel_floor_ns=2_000,
    launch_ns=15_000,
    collective_launch_ns=80_000,
    link=_NVLINK,
    compute_rate_permille=600,
    wire_rate_permille=500,
    source=(
        f"measured on {_GPT}; where not, the note says so. Against that GPT's steps "
        "at batch 8, forward and backward (2 GPUs, then 4): compute alone 61 ms "
        "predicted, 65 and 66 measured; one flat all-reduce behind it +4.4 and +6.6 "
        "predicted, +8.8 measured on 4; overlapped +3.7 and +5.5 predicted, +3.0 to "
        "3.8 and +5.3 to 5.9 measured. At batch 2 Python costs more than the model "
        "says"
    ),
    notes={
        "flops_per_s": (
            f"bf16: {_GPT}, batch 8: 6 x 671 M matmul parameters x 8192 tokens = 33.0 "
            "TFLOP in 42.3 ms of GEMM kernels = 780 TFLOP/s. fp32 and fp64 (no "
            "TF32): three quarters of the data sheet's 67 TFLOP/s, not measured"
        ),
        "memory_bytes_per_s": (
            "the same step: 30 GB through kernels that are neither GEMM nor attention "
            "(normalisation, activation, bias sums, residuals, loss) in 15.2 ms. "
            "Large copies reach twice that; the data sheet says 4.8 TB/s"
        ),
        "kernel_floor_ns": "2 us, assumed",
        "host_bytes_per_s": "PCIe 5 x16 from pinned memory reaches more; assumed",
        "pageable_bytes_per_s": _PAGEABLE,
        "launch_ns": (
            "about 15 us on those hosts, measured. Eager at batch 1, where launching "
            "bounds the step: 13.7 ms for 373 recorded operators, so up to 37 us each"
        ),
        "collective_launch_ns": (
            f"{_GPT}, batch 2, 2 GPUs: one all-reduce for each of 148 parameters from "
            "hooks took 31.6 ms, compute alone 19.5: 82 us each, hook included"
        ),
        "compute_rate_permille": (
            f"{_GPT}, batch 8, 2 GPUs, coalesced reducer: 64.5 ms of compute grew by "
            "3.0 while 7.5 ms of NCCL ran beside it (68.3 ms a step, 0.8 exposed): 1 "
            "- 3.0/7.5 = 600. By GEMM kernels only, 42.3 to 46.1 ms: 493; a GEMM "
            "loop of 14.4 ms took 15.25 under 1.9 ms of all-gather: 553"
        ),
        "wire_rate_permille": (
            "the same run: 4.5 ms of NCCL alone took 8.3, 0.8 of it with nothing "
            "beside: (4.5 - 0.8)/7.5 = 493, so about half. (All-gather under a GEMM "
            "loop: 684)"
        ),
    },
)

H100_NVLINK = replace(
    H200_NVLINK,
    name="h100-nvlink",
    memory_bytes_per_s=1_400 * _GIGA,
    source=(
        "as h200-nvlink (the same chip, clocks and NVLink), with slower memory; "
        "measured on H200s"
    ),
    notes={
        **H200_NVLINK.notes,
        "memory_bytes_per_s": (
            "that of h200-nvlink times 3.35/4.8, the data sheets' ratio; not measured"
        ),
    },
)

H100_IB400 = replace(
    H100_NVLINK,
    name="h100-ib400",
    host_bytes_per_s=35 * _GIGA,
    gpus_per_node=8,
    network=Link(
        latency_ns=47_000,
        bytes_per_s=47 * _GIGA,
        hop_ns=10_000,
        source=(
            "one 400 Gbit/s NDR card a GPU: 46 to 48 GB/s each (NVIDIA/nccl-tests "
            "issue 290). 8 bytes over 2 nodes of 8 took 47 us, of 8 H20s with NDR "
            "(NVIDIA/nccl issue 1244). A doubling of the nodes: twice (up the tree and "
            "down) the 5 us that NCCL's src/graph/tuning.cc gives a network hop of the "
            "protocol for small messages"
        ),
    ),
    source=(
        "nodes of 8 GPUs as h100-nvlink, one network card of 400 Gbit/s for each GPU, "
        "GPUDirect RDMA; not measured as a whole. 512 MiB all-reduced by 248 such "
        'nodes: 340 GB/s of bus bandwidth predicted, "around 350" reported for nodes '
        "of 8 H200s with 8 cards of a speed not told (NVIDIA/nccl-tests issue 283)"
    ),
    notes={
        **H100_NVLINK.notes,
        "host_bytes_per_s": (
            "pinned, PCIe 5 x16, by kernels: 35 GB/s to the device, 53 from it "
            "(NVIDIA/nvbandwidth issue 24); the smaller"
        ),
        "gpus_per_node": "HGX and DGX H100 boards",
        "network_staged": "no: GPUDirect RDMA is what such machines are built for",
    },
)

A100_NVLINK = replace(
    H200_NVLINK,
    name="a100-nvlink",
    flops_per_s={
        "default": 14 * _TERA,
        "float32": 14 * _TERA,
        "float64": 14 * _TERA,
        "bfloat16": 245 * _TERA,
        "float16": 245 * _TERA,
    },
    memory_bytes_per_s=850 * _GIGA,
    link=Link(
        latency_ns=44_000,
        bytes_per_s=200 * _GIGA,
        source=(
            "12 NVLinks a GPU: about 200 GB/s of bus bandwidth on 8 A100 80GB "
            "(NVIDIA/nccl-tests issue 149), 208 on 2 (issue 178). Latency: that of "
            "h200-nvlink, assumed"
        ),
    ),
    source="A100 SXM 80GB of one node; put together from public numbers, not measured",
    notes={
        **H200_NVLINK.notes,
        "flops_per_s": (
            "bf16: the data sheet's 312 TFLOP/s (dense) times the 0.79 of its data "
            "sheet that the H200 reached, assumed. fp32 and fp64 (no TF32): three "
            "quarters of the data sheet's 19.5 TFLOP/s, assumed"
        ),
        "memory_bytes_per_s": (
            "the data sheet's 2039 GB/s times the 0.42 of its data sheet that the "
            "small kernels of a training step reached on the H200, assumed"
        ),
        "host_bytes_per_s": (
            "pinned, PCIe 4 x16: 24.8 GB/s each way alone (NVIDIA/nvbandwidth issue "
            "53, 8 A100 SXM4; both ways at once, that machine's slower one fell to 11)"
        ),
        "launch_ns": f"{H200_NVLINK.notes['launch_ns']}. Of a host with H200s",
        "compute_rate_permille": "that of h200-nvlink, assumed",
        "wire_rate_permille": "that of h200-nvlink, assumed",
        "collective_launch_ns": "that of h200-nvlink, assumed",
    },
)
