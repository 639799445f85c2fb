"""The doctor on what lies around the GPUs: each fact present, absent and unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlaplab.checkup import judge
from overlaplab.checkup.facts import Facts, Section
from overlaplab.checkup.remarks import Remark, judge_settings
from overlaplab.checkup.system import Port, System
from tests.checkup.machines import H100, LAPTOP, SERVER, with_section

UP = Port("mlx5_0", "InfiniBand", True, "400 Gb/sec (4X NDR)")
ROCE = Port("mlx5_1", "Ethernet", True, "100 Gb/sec (4X EDR)")
DOWN = Port("mlx5_2", "InfiniBand", False, "10 Gb/sec (4X)")
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"


def with_system(**changes: Any) -> Facts:
    return replace(SERVER, system=replace(SERVER.system, **changes))


def remark(facts: Facts, begins: str) -> Remark:
    """The one remark whose fact begins with these words."""
    (found,) = (r for r in judge(facts).remarks if r.what.startswith(begins))
    return found


def eight_gpus(**changes: Any) -> Facts:
    gpus = Section({"gpus": [H100] * 8, "peers": all_pairs(8), "why": ""})
    return replace(with_section(SERVER, gpus=gpus), **changes)


def all_pairs(count: int) -> list[list[int]]:
    return [[a, b] for a in range(count) for b in range(count) if a != b]


# Links


def test_the_pairs_of_each_link_are_listed() -> None:
    links = [(a, b, "NV4" if b == a + 4 else "SYS") for b in range(8) for a in range(b)]
    links = tuple(sorted(links, key=lambda link: link[:2]))

    found = remark(eight_gpus(links=links), "links between GPUs")

    assert "NV4 (4 NVLinks): 0-4, 1-5, 2-6, 3-7;" in found.what
    assert "SYS (PCIe and the link between two CPUs): 0-1, 0-2, " in found.what
    assert "and 18 more" in found.what
    assert "as fast as its slowest link" in found.means


def test_one_link_everywhere_is_described_in_a_word() -> None:
    links = tuple((a, b, "NV18") for b in range(8) for a in range(b))
    found = remark(eight_gpus(links=links), "links between GPUs")
    assert found.what == "links between GPUs: NV18 (18 NVLinks): all 28 pairs"
    assert found.means == ""


def test_pairs_without_peer_access_are_named() -> None:
    peers = [pair for pair in all_pairs(8) if sorted(pair) != [2, 5]]
    gpus = Section({"gpus": [H100] * 8, "peers": peers, "why": ""})
    found = remark(with_section(SERVER, gpus=gpus), "not every GPU can read")
    assert found.status == "warning"
    assert found.what.endswith("not 2-5")


# Network


def test_cards_are_listed_with_their_network_and_rate() -> None:
    found = remark(with_system(ports=(UP, UP, ROCE, DOWN)), "network between machines")
    assert found.what == (
        "network between machines: mlx5_0 (InfiniBand, 400 Gb/sec); "
        "mlx5_1 (RoCE, 100 Gb/sec)"
    )


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ((), "no InfiniBand or RoCE card"),
        ((DOWN,), "no InfiniBand or RoCE port is up (mlx5_2)"),
        (None, "cannot be seen"),
    ],
)
def test_without_a_card_that_works_gpudirect_is_not_judged(
    ports: tuple[Port, ...] | None, words: str
) -> None:
    checkup = judge(with_system(ports=ports, modules=frozenset(), locked_bytes=2**16))
    (found,) = (r for r in checkup.remarks if r.status != "ok")
    assert found.status == "note" and words in found.what


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"modules": frozenset({"nvidia_peermem"})}, "ok", "nvidia_peermem is loaded"),
        ({"modules": frozenset({"nv_peer_mem"})}, "ok", "nv_peer_mem is loaded"),
        ({"peer_clients": ("amdkfd",)}, "ok", "amdkfd is loaded"),
        ({"driver": OPEN}, "ok", "by dma-buf (open driver, Linux 5.15)"),
        ({"driver": OPEN, "kernel": (5, 4)}, "warning", "no module"),
        ({}, "warning", "no module"),
        ({"modules": None, "driver": ""}, "note", "cannot be seen"),
    ],
)
def test_gpudirect_is_there_or_not_or_cannot_be_seen(
    changes: dict[str, Any], status: str, words: str
) -> None:
    bare = {"modules": frozenset({"nvidia"}), "peer_clients": ()}
    found = remark(with_system(**{**bare, **changes}), "GPUDirect RDMA")
    assert found.status == status
    assert words in found.what
    assert found.status == "ok" or (found.means and found.do)


def test_a_gpu_far_from_every_card_is_named() -> None:
    cards = ((0, "NIC0", "NODE"), (0, "NIC1", "PIX"), (1, "NIC0", "SYS"))
    found = remark(replace(SERVER, cards=cards), "GPUs 1:")
    assert "(SYS)" in found.what and "NCCL_NET_GDR_LEVEL" in found.means


@pytest.mark.parametrize(
    ("is_container", "do"), [(True, "--ulimit memlock=-1"), (False, "limits.conf")]
)
def test_little_locked_memory_is_a_warning_where_cards_need_it(
    is_container: bool, do: str
) -> None:
    facts = with_system(locked_bytes=8 * 2**20, is_container=is_container)
    found = remark(facts, "limit on locked memory")
    assert found.status == "warning" and "8 MiB (ulimit -l)" in found.what
    assert do in found.do


# Cores and memory


def test_fewer_cores_than_gpus_is_a_warning() -> None:
    found = remark(replace(SERVER, cores=1), "1 CPU core(s) for 2 GPUs")
    assert found.status == "warning" and "launch-bound" in found.means


def test_more_threads_than_cores_is_a_warning() -> None:
    """A container of 16 cores on a host of 192: torch counts those of the host."""
    torch = {**SERVER.section("torch").facts, "threads": 96}
    facts = with_section(SERVER, torch=Section(torch))
    found = remark(facts, "torch works on the CPU with 96 threads, on 32 core(s)")
    assert found.status == "warning" and "pinned memory" in found.means
    assert "OMP_NUM_THREADS" in found.do and "no more than 32" in found.do
    few = with_section(SERVER, torch=Section({**torch, "threads": 32}))
    assert not any("threads, on" in r.what for r in judge(few).remarks)


def test_little_shared_memory_is_a_warning_where_gpus_share_it() -> None:
    facts = with_system(shared_bytes=64 * 2**20, is_container=True)
    found = remark(facts, "/dev/shm has 64 MiB")
    assert found.status == "warning" and "--shm-size" in found.do


def test_pinned_memory_is_reported_with_its_limits() -> None:
    facts = with_system(locked_bytes=2**40, memory_bytes=2**35, is_container=True)
    found = remark(facts, "copies from pinned memory")
    assert found.what.endswith("(ulimit -l 1024 GiB, memory of this container 32 GiB)")


# Profilers


def test_counters_for_root_only_leave_timelines_whole() -> None:
    found = remark(with_system(counters_restricted=True), "only root may read")
    assert found.status == "note"
    assert "torch.profiler and nsys see every kernel" in found.means
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.do


def test_nsys_that_is_missing_is_a_note() -> None:
    assert remark(with_system(tools=()), "nsys").status == "note"


# Whole machines


def test_a_machine_that_hides_all_of_it_is_no_alarm() -> None:
    checkup = judge(replace(SERVER, system=System(), cards=(), links=()))
    assert {r.status for r in checkup.remarks} == {"ok", "note"}


def test_nothing_around_gpus_is_reported_where_there_are_none() -> None:
    facts = replace(LAPTOP, system=System(ports=(DOWN,), locked_bytes=2**16))
    assert len(judge(facts).remarks) == len(judge(LAPTOP).remarks)


def test_a_machine_of_amd_is_described_in_its_own_words() -> None:
    mi300 = {"name": "AMD Instinct MI300X", "bytes": 192 * 2**30, "processors": 304}
    torch = {"torch": "2.11.0+rocm7.1", "cuda": None, "hip": "7.1", "nccl": "2.27.7"}
    facts = replace(
        with_section(
            SERVER,
            torch=Section({**torch, "gloo": True}),
            gpus=Section({"gpus": [mi300] * 2, "peers": all_pairs(2), "why": ""}),
        ),
        smi_gpus=None,
        links=(),
        cards=(),
        system=replace(
            SERVER.system,
            driver="",
            modules=frozenset({"amdgpu"}),
            peer_clients=("amdkfd",),
            counters_restricted=None,
        ),
        environ={"GPU_MAX_HW_QUEUES": "1", "AMD_SERIALIZE_KERNEL": "3"},
    )
    text = str(judge(facts))
    assert "ROCm 7.1, RCCL 2.27.7" in text and "2 x AMD Instinct MI300X" in text
    assert "GPUDirect RDMA: amdkfd is loaded" in text
    warned = {r.what for r in judge(facts).remarks if r.status == "warning"}
    assert warned == {"GPU_MAX_HW_QUEUES=1", "AMD_SERIALIZE_KERNEL=3"}


# Settings


@pytest.mark.parametrize(
    ("name", "value", "status", "word"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning", "waits for ever"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0", "warning", "waits for ever"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "note", "does not touch overlap"),
        ("TORCH_NCCL_ENABLE_TIMING", "1", "note", "CPU time"),
        ("TORCH_NCCL_NAN_CHECK", "1", "warning", "reads every tensor"),
        ("NCCL_NET_GDR_LEVEL", "LOC", "warning", "copied through the host"),
        ("NCCL_NET_GDR_LEVEL", "SYS", "note", "How far"),
        ("NCCL_DMABUF_ENABLE", "0", "note", "nvidia-peermem only"),
        ("NCCL_IB_HCA", "mlx5_0", "note", "Only these network cards"),
        ("HIP_LAUNCH_BLOCKING", "1", "warning", "Nothing overlaps"),
    ],
)
def test_more_settings_are_described_by_what_they_do(
    name: str, value: str, status: str, word: str
) -> None:
    (found,) = judge_settings({name: value}, has_gpus=True)
    assert (found.status, found.what) == (status, f"{name}={value}")
    assert word in found.means


def test_the_default_of_error_handling_is_not_reported() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert list(judge_settings(environ, has_gpus=True)) == []
