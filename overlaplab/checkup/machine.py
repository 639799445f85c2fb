"""What lies around the GPUs, and what it means for overlap: links, network, cores,
memory, profilers.

Functions of the facts alone. Says nothing about what is not known and would not be
missed; where it would be missed, says that it cannot be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from overlaplab.checkup.facts import Facts
from overlaplab.checkup.remarks import Remark, remark
from overlaplab.checkup.system import System

# How `nvidia-smi topo -m` calls the way between two devices, the shortest first.
_WAYS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe and the CPU",
    "NODE": "PCIe and the CPU",
    "SYS": "PCIe and the link between two CPUs",
}
_DIRECT = ("PIX", "PXB")  # as far as NCCL lets a card read a GPU by default
_MAX_PAIRS = 6
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_PEER_CLIENTS = ("nv_mem", "nv_mem_nc", "amdkfd")
_DMABUF_KERNEL = (5, 12)
_LEAST_LOCKED_BYTES = 2**30
_LEAST_SHARED_BYTES = 2**30


def judge_machine(facts: Facts) -> Iterator[Remark]:
    """Remarks on what lies around the GPUs; none where there is no GPU."""
    if facts.gpus:
        yield from _links(facts)
        yield from _peers(facts)
        yield from _network(facts)
        yield from _cores(facts)
        yield from _memory(facts)
        yield from _profilers(facts.system)


def _links(facts: Facts) -> Iterator[Remark]:
    """Which pairs of GPUs have which link."""
    pairs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for a, b, way in facts.links:
        pairs[way].append((a, b))
    if not pairs:
        return
    listed = "; ".join(
        f"{way} ({_way(way)}): {_pairs(found, len(facts.links))}"
        for way, found in sorted(pairs.items())
    )
    slow = [way for way in pairs if not way.startswith("NV")]
    means = ""
    if slow:
        means = "Slower than NVLink: there is more to hide, and messages should be "
        means += "fewer."
        if len(slow) < len(pairs):
            means += " One ring over all GPUs is as fast as its slowest link."
    yield Remark("ok", f"links between GPUs: {listed}", means)


def _pairs(found: list[tuple[int, int]], num_all: int) -> str:
    if len(found) == num_all > 1:
        return f"all {num_all} pairs"
    shown = ", ".join(f"{a}-{b}" for a, b in found[:_MAX_PAIRS])
    rest = len(found) - _MAX_PAIRS
    return shown + (f" and {rest} more" if rest > 0 else "")


def _way(link: str) -> str:
    if link.startswith("NV"):
        return f"{link[2:]} NVLinks"
    return _WAYS.get(link, "unknown")


def _peers(facts: Facts) -> Iterator[Remark]:
    count = len(facts.gpus)
    peers = {tuple(pair) for pair in facts.sections["gpus"].facts["peers"]}
    missing = [
        (a, b) for b in range(count) for a in range(b) if not {(a, b), (b, a)} <= peers
    ]
    if missing:
        pairs = _pairs(missing, count * (count - 1) // 2)
        yield remark("no peer access", pairs=pairs)


def _network(facts: Facts) -> Iterator[Remark]:
    """Cards that reach memory by themselves, and whether they reach the GPUs'."""
    system = facts.system
    if system.ports is None:
        yield remark("network unseen")
        return
    kinds: dict[str, list[str]] = defaultdict(list)
    for port in system.ports:
        name = {"Ethernet": "RoCE"}.get(port.link, port.link or "unknown link")
        rate = port.rate.partition(" (")[0] or "unknown rate"
        if port.is_active:
            kinds[f"{name}, {rate}"].append(port.card)
    if kinds:
        listed = "; ".join(
            f"{', '.join(dict.fromkeys(cards))} ({kind})"
            for kind, cards in kinds.items()
        )
        yield Remark("ok", f"network between machines: {listed}")
        yield _gpudirect(system)
        yield from _distance(facts)
        yield from _locked(system)
        return
    down = ", ".join(port.card for port in system.ports)
    yield remark("no port up", down=down) if down else remark("no network card")


def _gpudirect(system: System) -> Remark:
    modules = system.modules or frozenset()
    loaded = [name for name in _PEER_MODULES if name in modules]
    loaded += [name for name in _PEER_CLIENTS if name in system.peer_clients]
    if loaded:
        return Remark("ok", f"GPUDirect RDMA: {loaded[0]} is loaded")
    if "Open Kernel Module" in system.driver and (
        system.kernel is not None and system.kernel >= _DMABUF_KERNEL
    ):
        linux = "Linux {}.{}".format(*system.kernel)
        return Remark("ok", f"GPUDirect RDMA: by dma-buf (open driver, {linux})")
    if system.modules is None and not system.driver:
        return remark("gpudirect unseen")
    return remark("no gpudirect")


def _distance(facts: Facts) -> Iterator[Remark]:
    """GPUs from which every network card is far."""
    ways = list(_WAYS)
    nearest: dict[int, str] = {}
    for gpu, _, way in facts.cards:
        if way in ways:
            nearest[gpu] = min(nearest.get(gpu, way), way, key=ways.index)
    far = {gpu: way for gpu, way in nearest.items() if way not in _DIRECT}
    if far:
        ways_of_far = ", ".join(sorted(set(far.values())))
        yield remark("far cards", gpus=", ".join(map(str, far)), ways=ways_of_far)


def _locked(system: System) -> Iterator[Remark]:
    limit = system.locked_bytes
    if limit is not None and limit < _LEAST_LOCKED_BYTES:
        do = (
            "docker run --ulimit memlock=-1"
            if system.is_container
            else "ulimit -l unlimited, or memlock in /etc/security/limits.conf."
        )
        yield remark("little locked memory", limit=_bytes(limit), do=do)


def _cores(facts: Facts) -> Iterator[Remark]:
    """Whether each rank, and each thread of torch, can have a core of its own."""
    if facts.cores < len(facts.gpus):
        yield remark("few cores", cores=facts.cores, gpus=len(facts.gpus))
    threads = facts.section("torch").facts.get("threads", 0)
    if threads > facts.cores:
        yield remark("many threads", threads=threads, cores=facts.cores)


def _memory(facts: Facts) -> Iterator[Remark]:
    """Memory that ranks share."""
    shared = facts.system.shared_bytes
    if shared is not None and shared < _LEAST_SHARED_BYTES and len(facts.gpus) > 1:
        do = (
            "docker run --shm-size=8g, or --ipc=host"
            if facts.system.is_container
            else "sudo mount -o remount,size=8g /dev/shm"
        )
        yield remark("little shared memory", size=_bytes(shared), do=do)


def _profilers(system: System) -> Iterator[Remark]:
    if system.counters_restricted:
        yield remark("counters for root")
    if "nsys" not in system.tools:
        yield remark("no nsys")


def describe_limits(system: System) -> str:
    """Limits that bear on pinned memory, as a clause; "" if none is known."""
    memory = "memory of this container" if system.is_container else "memory"
    limits = (("ulimit -l", system.locked_bytes), (memory, system.memory_bytes))
    return ", ".join(f"{name} {_bytes(n)}" for name, n in limits if n is not None)


def _bytes(number: int) -> str:
    """ "64 MiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:.0f} {unit}"
    return f"{number // 1024} KiB"
