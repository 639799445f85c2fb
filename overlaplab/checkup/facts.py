"""What the doctor looks at: this machine, gathered as data. Judges nothing.

Everything that may hang runs in a child with a deadline, and is left behind if it does
not even die.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from overlaplab.checkup import probe
from overlaplab.checkup.system import System, look_at_system
from overlaplab.version import find_version

PROBE_TIMEOUT_S = 80.0  # a cold CUDA context and a communicator on eight GPUs
SMI_TIMEOUT_S = 15.0
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
# Read once, when CUDA starts in a process; a later change is ignored.
READ_AT_CUDA_START = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_KERNEL",
    "GPU_MAX_HW_QUEUES",
)


@dataclass(frozen=True, slots=True)
class Section:
    """What one section of the probe found."""

    # its answer; empty where it did not end well
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""  # what it raised, "" if nothing
    hung: bool = False  # it began and did not end in time

    @property
    def failure(self) -> str:
        """Why it did not end well; "" if it did."""
        return self.error or ("no answer in time" if self.hung else "")


_ABSENT = {"torch": Section(), "gloo": Section(error="not reached")}


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at a machine."""

    python: tuple[int, int, int]  # (major, minor, micro)
    package: str  # version of overlaplab
    platform: str  # "Linux x86_64"
    cores: int  # that this process may use
    environ: Mapping[str, str]  # the environment of this process, now
    # the environment that CUDA read when it started in this process; None where it is
    # not running here, so that what is set still counts
    seen_by_cuda: Mapping[str, str] | None
    # `seen_by_cuda` was kept at that moment; else it is the environment with which the
    # process was started
    seen_exactly: bool
    # of the probe, by name; one is absent if an earlier one hung
    sections: Mapping[str, Section]
    smi_gpus: tuple[str, ...] | None  # GPUs by `nvidia-smi -L`, None without nvidia-smi
    # (GPU, GPU, "NV18") by `nvidia-smi topo -m`
    links: tuple[tuple[int, int, str], ...]
    # (GPU, network card, "PIX") by the same
    cards: tuple[tuple[int, str, str], ...] = ()
    system: System = field(default_factory=System)  # what Linux says

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        """Those that CUDA or ROCm sees, in its order."""
        found: Sequence[Mapping[str, Any]] = self.section("gpus").facts.get("gpus", ())
        return found

    def section(self, name: str) -> Section:
        """One that is absent was not reached, or is what hung."""
        return self.sections.get(name, _ABSENT.get(name, Section(hung=True)))


def gather(*, command: Sequence[str] | None = None) -> Facts:
    """Look at this machine; the children end by their deadlines.

    `command` runs the probe: by default this interpreter does, or no child at all where
    torch is loaded here and has no CUDA.
    """
    running = cuda_runs_here()
    seen, exactly = _seen_by_cuda() if running else (None, False)
    if not running:
        remember_cuda_start()
    listed = output_of(["nvidia-smi", "-L"], SMI_TIMEOUT_S)
    topology = output_of(["nvidia-smi", "topo", "-m"], SMI_TIMEOUT_S) if listed else ""
    if command is None and _torch_without_cuda_is_loaded():
        sections = {name: Section(**probe.look(name)) for name in probe.SECTIONS}
    else:
        command = command or [sys.executable, "-P", probe.__file__]
        sections = read_probe(output_of(command, PROBE_TIMEOUT_S) or "")
    return Facts(
        python=sys.version_info[:3],
        package=find_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cores=count_cores(),
        environ=dict(os.environ),
        seen_by_cuda=seen,
        seen_exactly=exactly,
        sections=sections,
        smi_gpus=None if listed is None else parse_gpus(listed),
        links=parse_topology(topology or ""),
        cards=parse_cards(topology or ""),
        system=look_at_system(),
    )


def output_of(command: Sequence[str], timeout_s: float) -> str | None:
    """Standard output of a command, as far as it came in time; None if there is none.

    Never waits longer: a child that a broken driver holds cannot even be killed.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        out, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as late:
        child.kill()
        try:
            out, _ = child.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            out = late.stdout or b""
    return out.decode("utf-8", "replace")


class _Line(msgspec.Struct):
    begin: str = ""
    end: str = ""
    facts: dict[str, Any] = {}
    error: str = ""


def read_probe(printed: str) -> dict[str, Section]:
    """The sections of the probe from what it printed; a begun one that has no end hung.

    Lines that are not the probe's (a library that greets) are skipped.

    >>> read_probe('{"begin": "torch"}\\nhello\\n{"end": "torch", "facts": {"a": 1}}')
    {'torch': Section(facts={'a': 1}, error='', hung=False)}
    """
    sections: dict[str, Section] = {}
    for line in printed.splitlines():
        try:
            said = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            continue
        if said.begin:
            sections[said.begin] = Section(hung=True)
        elif said.end:
            sections[said.end] = Section(said.facts, said.error)
    return sections


def parse_gpus(listed: str) -> tuple[str, ...]:
    """Names from `nvidia-smi -L`.

    >>> parse_gpus("GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)")
    ('NVIDIA H100 80GB HBM3',)
    """
    return tuple(re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listed, re.MULTILINE))


def parse_topology(printed: str) -> tuple[tuple[int, int, str], ...]:
    """Links between GPUs from `nvidia-smi topo -m`, each pair once.

    >>> parse_topology("      GPU0 GPU1 NIC0\\nGPU0  X  NV18 SYS\\nGPU1 NV18 X  SYS")
    ((0, 1, 'NV18'),)
    """
    return tuple(
        (a, int(name[3:]), way)
        for a, name, way in _matrix(printed)
        if name.startswith("GPU") and a < int(name[3:])
    )


def parse_cards(printed: str) -> tuple[tuple[int, str, str], ...]:
    """The way from each GPU to each network card by `nvidia-smi topo -m`.

    >>> parse_cards("      GPU0 NIC0 CPU Affinity\\nGPU0  X  PIX  0-47")
    ((0, 'NIC0', 'PIX'),)
    """
    return tuple(row for row in _matrix(printed) if not row[1].startswith("GPU"))


def _matrix(printed: str) -> list[tuple[int, str, str]]:
    """(GPU, other device, way) for each cell of the rows of GPUs."""
    rows = [_ESCAPE.sub("", line).split() for line in printed.splitlines()]
    heads = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    if "CPU" in heads:  # "CPU Affinity" and what follows it are no devices
        heads = heads[: heads.index("CPU")]
    return [
        (int(row[0][3:]), name, way)
        for row in rows
        if row and row[: len(heads)] != heads and re.fullmatch(r"GPU\d+", row[0])
        for name, way in zip(heads, row[1:], strict=False)
    ]


def count_cores() -> int:
    """Cores of this process: its affinity, and no more than its container may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup, or "max": no quota
        return cores


def cuda_runs_here() -> bool:
    """Whether CUDA has started in this process. Does not load torch."""
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


_at_cuda_start: dict[str, str] | None = None


def remember_cuda_start() -> None:
    """Keep what the environment says at the moment when CUDA starts in this process.

    Does nothing where torch is not loaded, or CUDA is running already.
    """
    torch = sys.modules.get("torch")
    if torch and hasattr(torch.cuda, "_lazy_call") and not cuda_runs_here():
        torch.cuda._lazy_call(_keep_environment)


def _keep_environment() -> None:
    global _at_cuda_start
    if _at_cuda_start is None:
        _at_cuda_start = dict(os.environ)


def _seen_by_cuda() -> tuple[dict[str, str] | None, bool]:
    if _at_cuda_start is not None:
        return _at_cuda_start, True
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None, False
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}, False


def _torch_without_cuda_is_loaded() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.cuda is None and not torch.version.hip
