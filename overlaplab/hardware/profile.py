"""The hardware model: one frozen dataclass a machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Link:
    """The wire between ranks, by the alpha-beta model.

    Args:
        latency_ns: alpha: fixed cost of one collective.
        bytes_per_s: beta's inverse: bandwidth of one rank's link, one direction, as
            collectives reach it ("bus bandwidth").
        algorithm: "ring" (bytes cross each link 2 (n-1)/n times in an all-reduce).
        source: where the numbers come from.
    """

    latency_ns: int
    bytes_per_s: int
    algorithm: str = "ring"
    source: str = ""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its CPU and its link.

    Args:
        name: as in `hardware="h100-nvlink"`.
        flops_per_s: matmul rate reached in practice, by dtype; "default" serves any
            dtype that is not listed.
        memory_bytes_per_s: device memory bandwidth reached in practice.
        kernel_floor_ns: the shortest kernel.
        launch_ns: CPU time of launching one operator.
        collective_launch_ns: CPU time of launching one collective.
        link: between ranks.
        compute_rate_permille: speed of a compute kernel while a collective is on the
            wire of the same GPU, 1000 = not slowed.
        wire_rate_permille: speed of the wire while a compute kernel runs beside it.
        source: where the numbers come from.
    """

    name: str
    flops_per_s: Mapping[str, int]
    memory_bytes_per_s: int
    kernel_floor_ns: int
    launch_ns: int
    collective_launch_ns: int
    link: Link
    compute_rate_permille: int = 1000
    wire_rate_permille: int = 1000
    source: str = ""
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
