"""The hardware model: one frozen dataclass a machine. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from overlaplab.hardware.kinds import CONTENTION_KEYS, DTYPES, contention_key
from overlaplab.hardware.points import Points, check_points

ALGORITHMS = ("ring",)
LISTS = "bytes:lists of tensors"
_MOST = 10**18  # nanoseconds: 31 years; of rates: a million TFLOP/s


@dataclass(frozen=True, slots=True)
class Link:
    """The wire between ranks, by the alpha-beta model.

    Args:
        latency_ns: alpha: fixed cost of one collective; 0 is allowed.
        bytes_per_s: beta's inverse: bandwidth of one rank's link, one direction, as
            collectives reach it ("bus bandwidth").
        algorithm: "ring" (bytes cross each link 2 (n-1)/n times in an all-reduce).
        source: where the numbers come from.
        hop_ns: added to `latency_ns` for each doubling of the ranks beyond 2 (3 and 4
            ranks once, 5 to 8 twice); 0 is allowed.
        times: measured points (bytes that cross one rank's link, ns on the wire); where
            there are any they stand instead of `bytes_per_s`, see
            `overlaplab.hardware.interpolate`.

    Raises:
        ValueError: a number is missing, negative or zero, or points do not ascend; the
            message names it.
    """

    latency_ns: int
    bytes_per_s: int
    algorithm: str = "ring"
    source: str = ""
    hop_ns: int = 0
    times: Points = ()

    def __post_init__(self) -> None:
        _check_number("link.latency_ns", self.latency_ns, least=0)
        _check_number("link.bytes_per_s", self.bytes_per_s, least=1)
        _check_number("link.hop_ns", self.hop_ns, least=0)
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"link.algorithm is {self.algorithm!r}; expected one of {ALGORITHMS}"
            )
        _check_text("link.source", self.source)
        # A file has lists, and none is as good as ().
        times = () if self.times in ((), []) else check_points("link.times", self.times)
        object.__setattr__(self, "times", times)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its CPU and its links. Immutable; edit with `dataclasses.replace`.

    Args:
        name: as in `hardware="h100-nvlink"`.
        flops_per_s: matmul rate reached in practice, by dtype; "default" serves any
            dtype that is not listed and must be there.
        memory_bytes_per_s: device memory bandwidth reached in practice.
        kernel_floor_ns: the shortest kernel; 0 is allowed.
        launch_ns: CPU time of launching one operator; 0 is allowed.
        collective_launch_ns: CPU time of launching one collective; 0 is allowed.
        link: between ranks; with `gpus_per_node`, between those of one node.
        compute_rate_permille: speed of a compute kernel while a collective is on the
            wire of the same GPU, 1000 = not slowed; of kinds that `contention` lacks.
        wire_rate_permille: speed of the wire while such a kernel runs beside it.
        source: where the numbers come from.
        notes: for each key, how its number was derived.
        host_bytes_per_s: copies between pinned host memory and the device, each way.
        pageable_bytes_per_s: the same where the host's memory is not pinned.
        cpu_bytes_per_s: what the CPU reads and writes in its own memory, where it
            fills or collates a batch, say; 0: such work is free.
        points: measured curves that stand instead of a rate, see
            `overlaplab.hardware.interpolate`. Keys, the most specific first:
            "flops:NAME:DTYPE" (of one operator, "flops:mm:bfloat16"), "flops:DTYPE",
            both (FLOPs, ns); "bytes:NAME", "bytes:lists of tensors" (of operators that
            step optimizers), "bytes", all three (bytes through memory, ns).
        backward_launch_ns: CPU time of launching one operator in the backward pass,
            which no Python slows; None: `launch_ns`.
        collective_part_launch_ns: CPU time of each tensor after the first of a
            coalesced collective.
        contention: both speeds for kinds of kernels, (the kernel's, the wire's) in
            permille, by `overlaplab.hardware.contention_key`: "matmul" beside a
            collective of default priority, "matmul, high priority" of a high one.
            Where a kind has only the first it serves for both.
        allocation_bytes: the device's allocator gives memory in multiples of this.
        workspace_bytes: what the matmul library takes on a stream at its first matmul
            there, and keeps; 0: nothing.
        waits_for_room: a collective that finds kernels running on its ranks is sent
            when those have ended: a kernel that fills its GPU lets nobody in before.
        gpus_per_node: ranks 0 to this - 1 are one node, and so on; 0: all ranks share
            `link` and there are no nodes.
        network: between nodes, of one GPU's own network card; None without nodes.
        network_staged: between nodes bytes go through the host's memory, over PCIe
            down and up again, instead of from GPU to GPU (GPUDirect RDMA).

    Raises:
        ValueError: a number is missing, negative or zero where it must not be, or
            not an integer; nodes without a network or the other way round; a key of
            `points` of which nobody makes use. The message names the key.
        TypeError: `link` or `network` is no `Link`.
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
    pageable_bytes_per_s: int = 6_000_000_000
    points: Mapping[str, Points] = field(default_factory=dict)
    backward_launch_ns: int | None = None
    collective_part_launch_ns: int = 0
    gpus_per_node: int = 0
    network: Link | None = None
    network_staged: bool = False
    waits_for_room: bool = False
    cpu_bytes_per_s: int = 0
    contention: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    allocation_bytes: int = 1
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        for key, none in (("link", False), ("network", True)):
            value = getattr(self, key)
            if not isinstance(value, Link) and not (none and value is None):
                raise TypeError(
                    f"hardware {self.name!r}: {key} is {type(value).__name__}; "
                    "expected overlaplab.hardware.Link(latency_ns=..., bytes_per_s=...)"
                )
        _check_mapping("flops_per_s", self.flops_per_s)
        if "default" not in self.flops_per_s:
            raise ValueError(
                "flops_per_s has no 'default', the rate of dtypes that are not listed "
                f"(listed: {sorted(self.flops_per_s)})"
            )
        for dtype, rate in self.flops_per_s.items():
            if dtype != "default":
                _check_dtype(f"flops_per_s[{dtype!r}]", dtype)
            _check_number(f"flops_per_s[{dtype!r}]", rate, least=1)
        for key in (
            *("memory_bytes_per_s", "host_bytes_per_s", "pageable_bytes_per_s"),
            "allocation_bytes",
        ):
            _check_number(key, getattr(self, key), least=1)
        for key in (
            "kernel_floor_ns",
            "launch_ns",
            "collective_launch_ns",
            "collective_part_launch_ns",
            "gpus_per_node",
            "cpu_bytes_per_s",
            "workspace_bytes",
        ):
            _check_number(key, getattr(self, key), least=0)
        if self.backward_launch_ns is not None:
            _check_number("backward_launch_ns", self.backward_launch_ns, least=0)
        for key in ("compute_rate_permille", "wire_rate_permille"):
            _check_permille(key, getattr(self, key))
        self._check_nodes()
        _check_text("source", self.source)
        _check_mapping("notes", self.notes)
        for key, note in self.notes.items():
            _check_text(f"notes[{key!r}]", note)
        # Own copies: whoever built it cannot change a profile behind our back.
        for key, mapping in (
            ("flops_per_s", self.flops_per_s),
            ("notes", self.notes),
            ("points", _checked_points(self.points)),
            ("contention", _checked_contention(self.contention)),
        ):
            object.__setattr__(self, key, MappingProxyType(dict(mapping)))

    def speeds(self, kind: str, *, high_priority: bool) -> tuple[int, int]:
        """Permille of (a kernel of `kind`, the wire) while both run beside one another.

        Args:
            kind: of `overlaplab.hardware.kernel_kind`.
            high_priority: the collective's.
        """
        key = contention_key(kind, high_priority=high_priority)
        both = self.compute_rate_permille, self.wire_rate_permille
        return self.contention.get(key) or self.contention.get(kind) or both

    def _check_nodes(self) -> None:
        if (self.gpus_per_node > 0) != (self.network is not None):
            found = "is given" if self.network else "is None"
            raise ValueError(
                f"gpus_per_node is {self.gpus_per_node} and network {found}; nodes "
                "need both: gpus_per_node of at least 1 and the network's Link"
            )
        for key in ("network_staged", "waits_for_room"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(
                    f"{key} is {getattr(self, key)!r}; expected true or false"
                )
        if self.network_staged and self.network is None:
            raise ValueError(
                "network_staged is true, but network is None: only what goes from node "
                "to node can go through the host's memory"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # MappingProxyType does not pickle, and profiles travel to worker processes.
        values = (getattr(self, name) for name in self.__slots__)
        return Hardware, tuple(
            dict(value) if isinstance(value, MappingProxyType) else value
            for value in values
        )


def _checked_points(points: Any) -> dict[str, Points]:
    _check_mapping("points", points)
    checked: dict[str, Points] = {}
    for key, value in points.items():
        kind, *rest = key.split(":")
        places = {"flops": (1, 2), "bytes": (0, 1)}.get(kind, ())
        if len(rest) not in places or not all(rest):
            raise ValueError(
                f"points[{key!r}]: expected a key 'flops:NAME:DTYPE', 'flops:DTYPE', "
                "'bytes:NAME' or 'bytes'"
            )
        if kind == "flops":
            _check_dtype(f"points[{key!r}]", rest[-1])
        checked[key] = check_points(f"points[{key!r}]", value)
    return checked


def _checked_contention(contention: Any) -> dict[str, tuple[int, int]]:
    _check_mapping("contention", contention)
    for key, speeds in contention.items():
        if key not in CONTENTION_KEYS:
            raise ValueError(
                f"contention[{key!r}]: no kind of kernel; known: "
                f"{'; '.join(CONTENTION_KEYS)}"
            )
        if not isinstance(speeds, Sequence) or len(speeds) != 2:
            raise ValueError(
                f"contention[{key!r}] is {speeds!r}; expected a pair: the speeds of "
                "the kernel and of the wire, in permille"
            )
        for speed in speeds:
            _check_permille(f"contention[{key!r}]", speed)
    return {key: (speeds[0], speeds[1]) for key, speeds in contention.items()}


def _check_dtype(key: str, dtype: str) -> None:
    """One that no operator has would never be looked up."""
    if dtype not in DTYPES:
        near = get_close_matches(dtype.replace("bf", "bfloat"), DTYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{key}: unknown dtype; {hint}known: {', '.join(DTYPES)}")


def _check_permille(key: str, value: object) -> None:
    _check_number(key, value, least=1)
    if value > 1000:  # type: ignore[operator]
        raise ValueError(
            f"{key} is {value}; expected 1..1000 (1000: work on the other side does "
            "not slow it)"
        )


def _check_number(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}; expected an integer of at least {least}")
    if value < least:
        raise ValueError(f"{key} is {value}; expected at least {least}")
    if value > _MOST:
        digits = value.bit_length() * 3 // 10
        raise ValueError(f"{key} has about {digits} digits; expected at most {_MOST}")


def _check_text(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}; expected text")


def _check_mapping(key: str, value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise ValueError(f"{key} is {value!r}; expected a mapping by name")
