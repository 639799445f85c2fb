"""Cost formulas: how long one operator takes with nothing beside it.

Roofline for kernels, alpha-beta for collectives (`overlaplab.hardware.collectives`).
Every result is in whole nanoseconds, *rounded up*, so nothing that does work is free.
What happens when operators run beside one another (contention) is not here: see
`overlaplab.program.rates`.

[Note: where the model lies]
- One rate a dtype: small and narrow matmuls are slower, and none knows its shape. One
  memory bandwidth: no caches, no strides. Measured `points` mend both by size, not by
  shape.
- The clock of a GPU falls when it is at its power cap; here it never does.
- Launching costs the same for every operator; Python between launches is free unless
  the program says so ("host"). What the CPU does to its own memory is free, too, unless
  the profile has a `cpu_bytes_per_s`: then it goes by bytes alone. The caching
  allocators' calls cost nothing, those for pinned memory neither.
- Contention is two factors a kind of kernel, the same for every size and for all
  collectives of one priority; two kernels
  on two streams share a GPU evenly, even where both would fit. Copies and kernels do
  not share memory bandwidth, both directions of PCIe run at once at full speed
  (NVIDIA/nvbandwidth issue 53 shows a machine where they do not), and so do those of 8
  GPUs.
- For collectives see [Note: where it lies] in `overlaplab.hardware.collectives`.
- Everything repeats exactly; machines do not. Ranks differ only where their programs
  do.
"""

from __future__ import annotations

from overlaplab.hardware.kinds import takes_lists
from overlaplab.hardware.model import LISTS, Hardware
from overlaplab.hardware.points import interpolate

NS_PER_S = 1_000_000_000


def compute_ns(
    hw: Hardware, flops: int, dtype: str = "", bytes: int = 0, name: str = ""
) -> int:
    """Time of one kernel alone: the larger of arithmetic and memory, never under floor.

    Args:
        hw: the profile.
        flops: floating point operations, multiply and add counted as two.
        dtype: of the arithmetic ("bfloat16"); one that is not listed in
            `hw.flops_per_s` runs at its "default".
        bytes: read and written through device memory.
        name: of the operator ("mm"), for curves of its own in `hw.points`.

    Returns:
        Nanoseconds, rounded up; at least `hw.kernel_floor_ns`. Arithmetic and memory
        go by the most specific of the profile's points, where it has any, else by its
        rates; no FLOPs and no bytes take no time.

    >>> from overlaplab.hardware import find_hardware
    >>> chalk = find_hardware("chalk")  # 1 TFLOP/s, 1 TB/s
    >>> compute_ns(chalk, flops=2_000_000)  # 2 MFLOP
    2000
    >>> compute_ns(chalk, flops=2_000_000, bytes=3_000_000)  # memory-bound
    3000
    >>> compute_ns(chalk, flops=1)  # rounded up
    1
    """
    arithmetic = memory = 0
    if flops:
        curve = hw.points.get(f"flops:{name}:{dtype}") or hw.points.get(
            f"flops:{dtype}"
        )
        if curve:
            arithmetic = interpolate(curve, flops)
        else:
            rate = hw.flops_per_s.get(dtype) or hw.flops_per_s["default"]
            arithmetic = -(-flops * NS_PER_S // rate)
    if bytes:
        curve = hw.points.get(f"bytes:{name}")
        if not curve and takes_lists(name):
            curve = hw.points.get(LISTS)
        curve = curve or hw.points.get("bytes")
        if curve:
            memory = interpolate(curve, bytes)
        else:
            memory = -(-bytes * NS_PER_S // hw.memory_bytes_per_s)
    return max(hw.kernel_floor_ns, arithmetic, memory)


def memcpy_ns(hw: Hardware, bytes: int, *, pinned: bool = True) -> int:
    """Time of one copy between host memory and the device, either way, rounded up.

    Args:
        pinned: whether the host's memory is page-locked. If not, the CPU has to copy
            it into memory that is, piece by piece: slower, and the CPU has no time for
            anything else.

    >>> from overlaplab.hardware import find_hardware
    >>> memcpy_ns(find_hardware("chalk"), 1000)  # 10 GB/s: 0.1 ns a byte
    100
    """
    rate = hw.host_bytes_per_s if pinned else hw.pageable_bytes_per_s
    return max(hw.kernel_floor_ns, -(-bytes * NS_PER_S // rate))


def host_ns(hw: Hardware, bytes: int) -> int:
    """Time of the CPU to read and write `bytes` of its own memory, rounded up.

    Filling a pinned buffer of n bytes from pageable memory is 2 n bytes.

    >>> from dataclasses import replace
    >>> from overlaplab.hardware import find_hardware
    >>> host_ns(find_hardware("chalk"), 1000)  # the profile does not say: free
    0
    >>> host_ns(replace(find_hardware("chalk"), cpu_bytes_per_s=10**10), 1000)
    100
    """
    rate = hw.cpu_bytes_per_s
    return -(-bytes * NS_PER_S // rate) if rate else 0


def pcie_shares(hw: Hardware, *, pinned: bool = True) -> tuple[int, int]:
    """What is left to a staged network, and to a copy, that run in one direction.

    Each may use half of PCIe (`host_bytes_per_s`) and what the other leaves of its
    half: max-min fair. In permille of their speed alone; (1000, 1000) where nothing is
    staged.

    Args:
        pinned: of the copy, as in `memcpy_ns`.

    >>> from dataclasses import replace
    >>> from overlaplab.hardware import Link, find_hardware
    >>> slow, fast = Link(1_000, 2 * 10**9), Link(1_000, 50 * 10**9)
    >>> nodes = replace(find_hardware("chalk"), gpus_per_node=8, network=slow)
    >>> pcie_shares(replace(nodes, network_staged=True))  # 2 of 10 GB/s are the network
    (1000, 800)
    >>> pcie_shares(replace(nodes, network=fast, network_staged=True))
    (500, 500)
    """
    if not hw.network_staged or hw.network is None:
        return 1000, 1000
    pcie = hw.host_bytes_per_s
    network = min(hw.network.bytes_per_s, pcie)
    copy = pcie if pinned else min(hw.pageable_bytes_per_s, pcie)
    left_to_network = max(pcie // 2, pcie - copy)
    left_to_copy = max(pcie - pcie // 2, pcie - network)
    return (
        min(1000, 1000 * left_to_network // network),
        min(1000, 1000 * left_to_copy // copy),
    )
