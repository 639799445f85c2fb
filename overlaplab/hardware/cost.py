"""Cost formulas: how long one operator takes with nothing beside it.

Roofline for kernels, alpha-beta for collectives. Every result is in whole nanoseconds,
*rounded up*, so nothing that does work is free. What happens when operators run beside
one another (contention) is not here: see `overlaplab.program.resolve`.
"""

from __future__ import annotations

from collections.abc import Callable

from overlaplab.hardware.profile import Hardware

NS_PER_S = 1_000_000_000

# Times that the payload crosses one rank's link, as (numerator, denominator) of n, by
# the ring algorithm (Patarasuk and Yuan 2009; the "bus bandwidth" of nccl-tests).
_CROSSINGS: dict[str, Callable[[int], tuple[int, int]]] = {
    "all_reduce": lambda n: (2 * (n - 1), n),  # a reduce-scatter and an all-gather
    "all_gather": lambda n: (n - 1, n),
    "reduce_scatter": lambda n: (n - 1, n),
    "all_to_all": lambda n: (n - 1, n),  # 1/n of it stays at home
    "gather": lambda n: (n - 1, n),  # what passes the root's link
    "scatter": lambda n: (n - 1, n),
    "broadcast": lambda n: (1, 1),  # pipelined round the ring
    "reduce": lambda n: (1, 1),
    "send": lambda n: (1, 1),
    "recv": lambda n: (1, 1),
    "barrier": lambda n: (0, 1),  # latency only
}
OPERATIONS: tuple[str, ...] = tuple(_CROSSINGS)


def compute_ns(hw: Hardware, flops: int, dtype: str = "", bytes: int = 0) -> int:
    """Time of one kernel alone: the larger of arithmetic and memory, never under floor.

    Args:
        hw: the profile.
        flops: floating point operations, multiply and add counted as two.
        dtype: of the arithmetic ("bfloat16"); one that is not listed in
            `hw.flops_per_s` runs at its "default".
        bytes: read and written through device memory.

    Returns:
        Nanoseconds, rounded up; at least `hw.kernel_floor_ns`.

    >>> from overlaplab.hardware import profile
    >>> chalk = profile("chalk")  # 1 TFLOP/s, 1 TB/s
    >>> compute_ns(chalk, flops=2_000_000)  # 2 MFLOP
    2000
    >>> compute_ns(chalk, flops=2_000_000, bytes=3_000_000)  # memory-bound
    3000
    >>> compute_ns(chalk, flops=1)  # rounded up
    1
    """
    rate = hw.flops_per_s.get(dtype) or hw.flops_per_s["default"]
    arithmetic = -(-flops * NS_PER_S // rate)
    memory = -(-bytes * NS_PER_S // hw.memory_bytes_per_s)
    return max(hw.kernel_floor_ns, arithmetic, memory)


def memcpy_ns(hw: Hardware, bytes: int) -> int:
    """Time of one copy between pinned host memory and the device, rounded up.

    >>> from overlaplab.hardware import profile
    >>> memcpy_ns(profile("chalk"), 1000)  # 10 GB/s: 0.1 ns a byte
    100
    """
    return max(hw.kernel_floor_ns, -(-bytes * NS_PER_S // hw.host_bytes_per_s))


def collective_ns(
    hw: Hardware, operation: str, num_ranks: int, bytes: int
) -> tuple[int, int]:
    """Latency and wire time of one collective alone, once all ranks have arrived.

    Args:
        hw: the profile; its link gives alpha and beta.
        operation: one of `OPERATIONS`.
        num_ranks: ranks of the communicator; one rank sends nothing and costs nothing.
        bytes: payload: the full tensor for all_reduce, broadcast and reduce, what one
            rank sends in all for send and all_to_all, the gathered size (ranks times
            shard) for all_gather, reduce_scatter, gather and scatter.

    Returns:
        (latency_ns, wire_ns), the second rounded up.

    Raises:
        ValueError: unknown operation, fewer than one rank, negative bytes.

    A gigabyte crosses 100 Gbit/s in 80 ms; two ranks all-reduce it in the same time,
    many in nearly twice that:

    >>> from overlaplab.hardware import profile
    >>> ethernet = profile("ethernet-100g")
    >>> collective_ns(ethernet, "send", 2, 10**9)
    (100000, 80000000)
    >>> collective_ns(ethernet, "all_reduce", 2, 10**9)
    (100000, 80000000)
    >>> collective_ns(ethernet, "all_reduce", 4, 10**9)
    (100000, 120000000)
    >>> collective_ns(ethernet, "all_gather", 4, 10**9)
    (100000, 60000000)
    >>> collective_ns(ethernet, "all_reduce", 1, 10**9)
    (0, 0)
    """
    if operation not in _CROSSINGS:
        raise ValueError(
            f"unknown collective {operation!r}; expected one of {', '.join(OPERATIONS)}"
        )
    if num_ranks < 1 or bytes < 0:
        raise ValueError(
            f"{operation}: num_ranks is {num_ranks} and bytes {bytes}; expected at "
            "least 1 rank and 0 bytes"
        )
    if num_ranks == 1:
        return 0, 0
    numerator, denominator = _CROSSINGS[operation](num_ranks)
    crossing = bytes * numerator * NS_PER_S
    return hw.link.latency_ns, -(-crossing // (denominator * hw.link.bytes_per_s))
