"""What Linux says about a machine: network cards, drivers, limits.

Read from files below /proc and /sys. What cannot be read (another system, a
container that hides it) is None: unknown, which is not the same as absent. Judges
nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Port:
    """A port of an InfiniBand, RoCE or EFA card."""

    card: str  # "mlx5_0"
    link: str  # "InfiniBand", or "Ethernet" for RoCE
    is_active: bool  # a cable is in, and the network answers
    rate: str  # "400 Gb/sec (4X NDR)"


@dataclass(frozen=True, slots=True)
class System:
    """One look at what lies around the GPUs. None: unknown."""

    # of network cards that reach memory by themselves; () if there are none
    ports: tuple[Port, ...] | None = None
    modules: frozenset[str] | None = None  # of the kernel, by name
    peer_clients: tuple[str, ...] = ()  # drivers whose memory such a card may reach
    driver: str = ""  # what NVIDIA's driver says it is; "" without one
    kernel: tuple[int, int] | None = None  # (major, minor) of Linux
    counters_restricted: bool | None = None  # only root may read the GPU's counters
    # the limit on locked memory (ulimit -l); None also for no limit
    locked_bytes: int | None = None
    # of the machine, or as much as its container may use
    memory_bytes: int | None = None
    shared_bytes: int | None = None  # the size of /dev/shm
    is_container: bool = False  # of Docker, Podman or Kubernetes
    tools: tuple[str, ...] = ("nsys", "ncu")  # Nsight's commands that are on PATH


def look_at_system(root: Path = Path("/")) -> System:
    """Read what this machine says in the folder that has proc and sys."""
    nvidia = root / "proc/driver/nvidia"
    restricted = _number(nvidia / "params", r"^RmProfilingAdminOnly: (\d+)")
    return System(
        ports=_ports(root / "sys/class"),
        modules=_modules(root / "proc/modules"),
        peer_clients=tuple(_names(root / "sys/kernel/mm/memory_peers")),
        driver=_first_line(nvidia / "version"),
        kernel=major_minor(_first_line(root / "proc/sys/kernel/osrelease")),
        counters_restricted=None if restricted is None else bool(restricted),
        locked_bytes=_number(root / "proc/self/limits", r"^Max locked memory +(\d+)"),
        memory_bytes=_memory_bytes(root),
        shared_bytes=_shared_bytes(root / "dev/shm"),
        is_container=_is_container(root),
        tools=tuple(name for name in ("nsys", "ncu") if shutil.which(name)),
    )


def _ports(classes: Path) -> tuple[Port, ...] | None:
    if not classes.is_dir():
        return None
    cards = classes / "infiniband"
    return tuple(
        Port(
            card,
            _first_line(port / "link_layer"),
            _first_line(port / "state").endswith("ACTIVE"),  # "4: ACTIVE"
            _first_line(port / "rate"),
        )
        for card in _names(cards)
        for port in (cards / card / "ports" / n for n in _names(cards / card / "ports"))
    )


def _modules(path: Path) -> frozenset[str] | None:
    text = _text(path)
    if text is None:
        return None
    return frozenset(line.split()[0] for line in text.splitlines() if line.strip())


def major_minor(release: str) -> tuple[int, int] | None:
    """(2, 11) of "2.11.0+cu130"; None where it does not begin so."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else None


def _memory_bytes(root: Path) -> int | None:
    total = _number(root / "proc/meminfo", r"^MemTotal: +(\d+) kB")
    limits = [
        _number(root / "sys/fs/cgroup" / name, r"^(\d+)")
        for name in ("memory.max", "memory/memory.limit_in_bytes")  # cgroup v2, v1
    ]
    known = [total * 1024] if total is not None else []
    return min([*known, *(n for n in limits if n is not None)], default=None)


def _shared_bytes(folder: Path) -> int | None:
    try:
        size = os.statvfs(folder)
    except (OSError, AttributeError):  # absent, or no statvfs on this system
        return None
    return size.f_blocks * size.f_frsize


def _is_container(root: Path) -> bool:
    marks = (".dockerenv", "run/.containerenv")
    secrets = root / "var/run/secrets/kubernetes.io"
    return any((root / mark).exists() for mark in marks) or secrets.exists()


def _number(path: Path, pattern: str) -> int | None:
    """The number in the line of a file that begins with `pattern`."""
    found = re.search(pattern, _text(path) or "", re.MULTILINE)
    return int(found[1]) if found else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _first_line(path: Path) -> str:
    return ((_text(path) or "").splitlines() or [""])[0].strip()


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
