"""What torch, its process groups and CUDA do here, and what of the course runs.

Functions of the facts alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from overlaplab.checkup.facts import READ_AT_CUDA_START, Facts
from overlaplab.checkup.machine import describe_limits
from overlaplab.checkup.settings import Remark

OLDEST_TORCH = (2, 11)
PYTHONS = ((3, 11), (3, 13))
_INSTALL = "https://pytorch.org/get-started/locally"
# What has to work on GPUs, by the section of the probe: what, means, do.
_ON_GPUS = {
    "pinned": (
        "copies from pinned memory",
        "Batches cannot be copied beside computation.",
        "Is there too little memory, or a limit on it (ulimit -l, or the container's) "
        "too low?",
    ),
    "profiler": (
        "torch.profiler sees kernels",
        "Timelines of real GPUs would have no lanes but the CPU's.",
        "Another profiler may hold the GPU; end it. In a container, CUPTI must match "
        f"the driver. A torch without CUPTI: install another ({_INSTALL}).",
    ),
    "nccl": (
        "NCCL: two GPUs added two numbers",
        'cluster="nccl" does not run here.',
        "NCCL_DEBUG=INFO overlaplab doctor shows where it stops. In a container, try "
        "more shared memory (--shm-size) and NCCL_P2P_DISABLE=1.",
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A cluster of the course, and whether it runs here."""

    cluster: str
    runs: bool
    says: str


def torch_works(facts: Facts) -> bool:
    torch = facts.section("torch").facts
    return bool(torch) and _numbers(str(torch["torch"])) >= OLDEST_TORCH


def judge_versions(facts: Facts) -> Remark:
    """Python, torch and what it was built for."""
    section = facts.section("torch")
    torch = section.facts
    what = f"Python {_dotted(facts.python)}, "
    if not torch:
        return Remark(
            "broken",
            f"torch does not load ({section.error or 'it did not load in time'})",
            f"{what}overlaplab {facts.package}. Nothing of the course runs without "
            "torch.",
            f"Install it: {_INSTALL}",
        )
    ccl = "RCCL" if torch.get("hip") else "NCCL"
    builds = (("hip", "ROCm"), ("cuda", "CUDA"), ("nccl", ccl))
    what += f"torch {torch['torch']}, "
    what += "".join(f"{of} {torch[key]}, " for key, of in builds if torch.get(key))
    what += f"overlaplab {facts.package}"
    if not torch_works(facts):
        oldest = _dotted(OLDEST_TORCH)
        return Remark(
            "broken",
            what,
            f"The package needs torch {oldest} or later.",
            f"pip install 'torch>={oldest}', or see {_INSTALL}",
        )
    low, high = PYTHONS
    if not low <= facts.python[:2] <= high:
        wanted = f"{_dotted(low)} to {_dotted(high)}"
        return Remark("warning", what, f"Tested with Python {wanted} only.")
    return Remark("ok", what)


def judge_torch(facts: Facts) -> Iterator[Remark]:
    """Gloo, GPUs, and what has to work on them."""
    if why := facts.section("gloo").failure:
        yield Remark(
            "broken",
            f"gloo: two ranks could not meet ({why})",
            'cluster="gloo" does not run here. Usually the host name leads to no '
            "address of this machine.",
            "export GLOO_SOCKET_IFNAME=lo (lo0 on macOS), then try again.",
        )
    else:
        yield Remark("ok", "gloo: two ranks added two numbers")
    yield _graphics(facts)
    limits = describe_limits(facts.system)
    for name, (what, means, do) in _ON_GPUS.items():
        section = facts.sections.get(name)
        if section is None or "skipped" in section.facts or not facts.gpus:
            continue
        if name == "pinned" and limits:
            what += f" ({limits})"
        if why := section.failure:
            yield Remark("broken", f"{what}: no ({why})", means, do)
        else:
            yield Remark("ok", what)


def _graphics(facts: Facts) -> Remark:
    """GPUs, or why there are none."""
    section = facts.section("gpus")
    if section.failure:
        return Remark(
            "broken",
            f"CUDA does not start ({section.failure})",
            "Nothing that needs a GPU runs here.",
            "Does nvidia-smi answer? If not, driver or GPU need a restart.",
        )
    if facts.gpus:
        names = count_gpus(str(gpu["name"]) for gpu in facts.gpus)
        gib = min(int(gpu["bytes"]) for gpu in facts.gpus) / 2**30
        return Remark("ok", f"{names}, {gib:.0f} GiB each")
    if not facts.smi_gpus:
        return Remark(
            "note",
            "no GPU",
            "None is needed: every lesson runs on the virtual cluster, every exercise "
            "is marked here. What GPUs did is stored in the lessons.",
            ""
            if facts.smi_gpus is None
            else "If there should be one: nvidia-smi is here and lists none; run it to "
            "see why.",
        )
    listed = f"nvidia-smi lists {count_gpus(facts.smi_gpus)}"
    hidden = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if not facts.section("torch").facts.get("cuda"):
        return Remark(
            "warning",
            f"{listed}, but this torch is built without CUDA",
            "The lessons run; nothing can be measured on these GPUs.",
            f"Install a build with CUDA: {_INSTALL}",
        )
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        what = f"{listed}, but CUDA_VISIBLE_DEVICES={hidden!r} hides them"
        return Remark("warning", what, do="Unset it.")
    return Remark(
        "broken",
        f"{listed}, but CUDA does not start: {section.facts['why']}",
        "Nothing that needs a GPU runs here.",
        "Most often the driver is older than this torch's CUDA: update it, or "
        f"install a torch for it ({_INSTALL}).",
    )


def judge_late_changes(facts: Facts) -> Iterator[Remark]:
    """Variables that were changed after CUDA had read them."""
    if facts.seen_by_cuda is None:
        return
    for name in READ_AT_CUDA_START:
        values = facts.seen_by_cuda.get(name), facts.environ.get(name)
        then, now = ("unset" if v is None else repr(v) for v in values)
        if now == then:
            continue
        change = f"{name} was {then}, now {now}"
        if facts.seen_exactly:
            what = f"{change}; CUDA started before the change"
            means = f"It has no effect: CUDA goes on with {then}."
        else:
            what = f"{change}; CUDA runs in this process"
            means = (
                "It counts only if it was changed before CUDA started, which cannot "
                "be told afterwards."
            )
        do = "Set it in the shell, or before anything touches a GPU; restart."
        yield Remark("warning", what, means, do)


def judge_parts(facts: Facts) -> tuple[Part, ...]:
    """Which of the clusters run here."""
    works = torch_works(facts)
    gloo = works and not facts.section("gloo").failure
    num_gpus = len(facts.gpus) if works else 0
    if num_gpus >= 2:
        nccl = not facts.section("nccl").failure
        says = "every result measured here" if nccl else "two GPUs do not meet"
    elif num_gpus == 1:
        nccl, says = True, "one rank: launches, streams, traces; no messages"
    else:
        nccl, says = False, "no GPU: lessons show what was measured on others"
    return (
        Part(
            "virtual",
            works,
            "every lesson and every mark" if works else "needs torch (see above)",
        ),
        Part(
            "gloo",
            gloo,
            "real processes and messages, at the speed of this CPU"
            if gloo
            else "see above",
        ),
        Part("nccl", nccl, says),
    )


def count_gpus(names: Iterable[str]) -> str:
    """ "2 x NVIDIA H100, 1 x NVIDIA L4"."""
    return ", ".join(f"{n} x {name}" for name, n in Counter(names).items())


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
