"""The profiles that come with the package, each number with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from overlaplab.hardware.profile import Hardware, Link
from overlaplab.hardware.store import read_profile

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

PROFILES: Mapping[str, Hardware] = MappingProxyType(
    {hw.name: hw for hw in (CHALK, H100_NVLINK, H200_NVLINK, ETHERNET_100G)}
)


def profile(name: str | Hardware) -> Hardware:
    """The profile called `name`; a `Hardware` is returned as it is.

    Args:
        name: one of `PROFILES`, or the path of a profile file, which ends in ".json".

    Raises:
        ValueError: nobody knows the name (the message lists the known ones), there is
            no such file, or it holds no profile (see `read_profile`).
        TypeError: neither a name nor a `Hardware`.

    >>> profile("chalk").link.latency_ns
    1000
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"hardware is {type(name).__name__}; expected a name "
            f"({', '.join(PROFILES)}) or overlaplab.hardware.Hardware(...)"
        )
    if name.endswith(".json"):
        try:
            return read_profile(name)
        except OSError as error:
            raise ValueError(
                f"hardware {name!r} cannot be read: {error.strerror}; expected a "
                f"profile file, or one of {', '.join(PROFILES)}"
            ) from error
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown hardware {name!r}; known: {', '.join(PROFILES)}.{hint} Or give "
            "the path of a profile file (.json), or a Hardware(...), such as "
            "dataclasses.replace(profile('h100-nvlink'), ...)"
        )
    return PROFILES[name]


def with_link(
    hw: str | Hardware,
    *,
    latency_ns: int | None = None,
    bytes_per_s: int | None = None,
) -> Hardware:
    """`hw` with another link; its name gets a "+link" so that reports tell.

    A bandwidth stands instead of the link's measured points.

    >>> with_link("chalk", latency_ns=500).link.latency_ns
    500
    """
    hw = profile(hw)
    changes: dict[str, object] = {}
    if latency_ns is not None:
        changes["latency_ns"] = latency_ns
    if bytes_per_s is not None:
        changes["bytes_per_s"] = bytes_per_s
    if not changes:
        return hw
    edited = f"{hw.link.source}; edited: {changes}"
    if bytes_per_s is not None:
        changes["times"] = ()  # measured at the old bandwidth
    link = replace(hw.link, source=edited, **changes)  # type: ignore[arg-type]
    name = hw.name if hw.name.endswith("+link") else hw.name + "+link"
    return replace(hw, name=name, link=link)
