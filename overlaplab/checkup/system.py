"""What Linux says about a machine: network cards, drivers, cores, limits.

Read from files below /proc, /sys and /etc. What cannot be read (another system, a
container that hides it) is None: unknown, which is not the same as absent. Judges
nothing.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

NCCL_FILE = "etc/nccl.conf"  # NCCL reads it, and ~/.nccl.conf (or NCCL_CONF_FILE)


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
    # of each NUMA node: its number and its cores
    node_cores: tuple[tuple[int, frozenset[int]], ...] = ()
    # the NUMA node of each GPU, in the order of CUDA's numbers
    gpu_nodes: tuple[int | None, ...] = ()
    cores: frozenset[int] = frozenset()  # those that this process may use, by number
    tools: tuple[str, ...] = ("nsys", "ncu")  # Nsight's commands that are on PATH
    # (name, value, file) of NCCL's configuration files
    nccl_settings: tuple[tuple[str, str, str], ...] = ()


def look_at_system(pci: Sequence[str], root: Path = Path("/")) -> System:
    """Read what this machine says in the folder that has proc, sys and etc.

    `pci` has the address of each GPU on its bus ("0000:19:00.0"), "" if unknown.
    """
    nodes = root / "sys/devices/system/node"
    nvidia = root / "proc/driver/nvidia"
    restricted = _number(nvidia / "params", r"^RmProfilingAdminOnly: (\d+)")
    return System(
        ports=_ports(root / "sys/class"),
        modules=_modules(root / "proc/modules"),
        peer_clients=tuple(_names(root / "sys/kernel/mm/memory_peers")),
        driver=_first_line(nvidia / "version"),
        kernel=_kernel(_first_line(root / "proc/sys/kernel/osrelease")),
        counters_restricted=None if restricted is None else bool(restricted),
        locked_bytes=_number(root / "proc/self/limits", r"^Max locked memory +(\d+)"),
        memory_bytes=_memory_bytes(root),
        shared_bytes=_shared_bytes(root / "dev/shm"),
        is_container=_is_container(root),
        node_cores=tuple(
            (int(name[4:]), parse_cores(_first_line(nodes / name / "cpulist")))
            for name in _names(nodes)
            if re.fullmatch(r"node\d+", name)
        ),
        gpu_nodes=tuple(_node(root / "sys/bus/pci/devices", at) for at in pci),
        cores=usable_cores(),
        tools=tuple(name for name in ("nsys", "ncu") if shutil.which(name)),
        nccl_settings=_nccl_settings(root),
    )


def parse_cores(listed: str) -> frozenset[int]:
    """Numbers from Linux's notation of a set.

    >>> sorted(parse_cores("0-2,8"))
    [0, 1, 2, 8]
    """
    cores: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", listed):
        cores |= set(range(int(low), int(high or low) + 1))
    return frozenset(cores)


def format_numbers(numbers: Iterable[int]) -> str:
    """Linux's notation of a set.

    >>> format_numbers({0, 1, 2, 8})
    '0-2,8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


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


def _kernel(release: str) -> tuple[int, int] | None:
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


def _node(devices: Path, address: str) -> int | None:
    """The NUMA node of a device; None if the firmware does not say (-1)."""
    at = devices / address.lower() / "numa_node"
    return _number(at, r"^(\d+)") if address else None


def _nccl_settings(root: Path) -> tuple[tuple[str, str, str], ...]:
    """What NCCL's files set; the user's goes before the machine's."""
    mine = os.environ.get("NCCL_CONF_FILE") or str(Path.home() / ".nccl.conf")
    found: dict[str, tuple[str, str, str]] = {}
    for shown, path in ((mine, Path(mine)), ("/" + NCCL_FILE, root / NCCL_FILE)):
        for line in (_text(path) or "").splitlines():
            name, equals, value = line.partition("=")
            name = name.strip()
            if equals and name and not name.startswith("#"):
                found.setdefault(name, (name, value.strip(), shown))
    return tuple(found.values())


def usable_cores() -> frozenset[int]:
    """The cores of this process's affinity; none where the system has no such thing."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0)) if has_affinity else frozenset()


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
