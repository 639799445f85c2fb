"""Facts of two machines for the doctor's tests, and how to read what it says."""

from __future__ import annotations

from dataclasses import replace

from overlaplab.checkup import Checkup
from overlaplab.checkup.facts import Facts, Section
from overlaplab.checkup.system import Port, System

H100 = {"name": "NVIDIA H100 80GB HBM3", "bytes": 79 * 2**30, "processors": 132}
SKIPPED = Section({"skipped": "no GPU"})
LAPTOP = Facts(
    python=(3, 12, 3),
    package="0.1.0",
    platform="Darwin arm64",
    cores=8,
    environ={},
    seen_by_cuda=None,
    seen_exactly=False,
    sections={
        "torch": Section(
            {"torch": "2.13.0", "cuda": None, "hip": None, "nccl": None, "gloo": True}
        ),
        "gloo": Section(),
        "gpus": Section({"gpus": [], "peers": [], "why": ""}),
        "pinned": SKIPPED,
        "profiler": SKIPPED,
        "nccl": SKIPPED,
    },
    smi_gpus=None,
    links=(),
)
CUDA_TORCH = Section(
    {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gloo": True}
)
SERVER = replace(
    LAPTOP,
    platform="Linux x86_64",
    cores=32,
    sections={
        "torch": CUDA_TORCH,
        "gloo": Section(),
        "gpus": Section({"gpus": [H100, H100], "peers": [[0, 1], [1, 0]], "why": ""}),
        "pinned": Section(),
        "profiler": Section(),
        "nccl": Section(),
    },
    smi_gpus=("NVIDIA H100 80GB HBM3",) * 2,
    links=((0, 1, "NV18"),),
    cards=((0, "NIC0", "PIX"), (1, "NIC0", "PXB")),
    system=System(
        ports=(Port("mlx5_0", "InfiniBand", True, "400 Gb/sec (4X NDR)"),),
        modules=frozenset({"nvidia", "nvidia_peermem"}),
        driver="NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06",
        kernel=(5, 15),
        counters_restricted=False,
        locked_bytes=None,
        memory_bytes=512 * 2**30,
        shared_bytes=64 * 2**30,
        tools=("nsys", "ncu"),
    ),
)


def with_section(facts: Facts, **sections: Section) -> Facts:
    return replace(facts, sections={**facts.sections, **sections})


def statuses(checkup: Checkup) -> set[str]:
    return {remark.status for remark in checkup.remarks}


def said(checkup: Checkup, status: str) -> str:
    """The one remark of this status, as a line."""
    (remark,) = (r for r in checkup.remarks if r.status == status)
    return f"{remark.what} | {remark.means} | {remark.do}"
