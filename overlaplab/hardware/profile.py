"""The hardware model: one frozen dataclass a machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ALGORITHMS = ("ring",)


@dataclass(frozen=True, slots=True)
class Link:
    """The wire between ranks, by the alpha-beta model.

    Args:
        latency_ns: alpha: fixed cost of one collective; 0 is allowed.
        bytes_per_s: beta's inverse: bandwidth of one rank's link, one direction, as
            collectives reach it ("bus bandwidth").
        algorithm: "ring" (bytes cross each link 2 (n-1)/n times in an all-reduce).
        source: where the numbers come from.

    Raises:
        ValueError: a number is missing, negative or zero; the message names it.
    """

    latency_ns: int
    bytes_per_s: int
    algorithm: str = "ring"
    source: str = ""

    def __post_init__(self) -> None:
        _check_number("link.latency_ns", self.latency_ns, least=0)
        _check_number("link.bytes_per_s", self.bytes_per_s, least=1)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"link.algorithm is {self.algorithm!r}; expected one of {ALGORITHMS}"
            )


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its CPU and its link. Immutable; edit with `dataclasses.replace`.

    Args:
        name: as in `hardware="h100-nvlink"`.
        flops_per_s: matmul rate reached in practice, by dtype; "default" serves any
            dtype that is not listed and must be there.
        memory_bytes_per_s: device memory bandwidth reached in practice.
        kernel_floor_ns: the shortest kernel; 0 is allowed.
        launch_ns: CPU time of launching one operator; 0 is allowed.
        collective_launch_ns: CPU time of launching one collective; 0 is allowed.
        link: between ranks.
        compute_rate_permille: speed of a compute kernel while a collective is on the
            wire of the same GPU, 1000 = not slowed.
        wire_rate_permille: speed of the wire while a compute kernel runs beside it.
        host_bytes_per_s: copies between pinned host memory and the device.
        source: where the numbers come from.
        notes: for each key, how its number was derived.

    Raises:
        ValueError: a number is missing, negative or zero where it must not be, or
            not an integer; the message names the key.
        TypeError: `link` is no `Link`.
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
    notes: Mapping[str, str] = field(default_factory=dict)
    host_bytes_per_s: int = 25_000_000_000

    def __post_init__(self) -> None:
        if not isinstance(self.link, Link):
            raise TypeError(
                f"hardware {self.name!r}: link is {type(self.link).__name__}; expected "
                "overlaplab.hardware.Link(latency_ns=..., bytes_per_s=...)"
            )
        if "default" not in self.flops_per_s:
            raise ValueError(
                f"hardware {self.name!r}: flops_per_s has no 'default', the rate of "
                f"dtypes that are not listed (listed: {sorted(self.flops_per_s)})"
            )
        for dtype, rate in self.flops_per_s.items():
            _check_number(f"flops_per_s[{dtype!r}]", rate, least=1)
        for key in ("memory_bytes_per_s", "host_bytes_per_s"):
            _check_number(key, getattr(self, key), least=1)
        for key in ("kernel_floor_ns", "launch_ns", "collective_launch_ns"):
            _check_number(key, getattr(self, key), least=0)
        for key in ("compute_rate_permille", "wire_rate_permille"):
            _check_number(key, getattr(self, key), least=1)
            if getattr(self, key) > 1000:
                raise ValueError(
                    f"{key} is {getattr(self, key)}; expected 1..1000 (1000: work on "
                    "the other side does not slow it)"
                )
        # Own copies: whoever built it cannot change a profile behind our back.
        for name in ("flops_per_s", "notes"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # MappingProxyType does not pickle, and profiles travel to worker processes.
        values = (getattr(self, name) for name in self.__slots__)
        return Hardware, tuple(
            dict(value) if isinstance(value, MappingProxyType) else value
            for value in values
        )


def _check_number(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}; expected an integer of at least {least}")
    if value < least:
        raise ValueError(f"{key} is {value}; expected at least {least}")
