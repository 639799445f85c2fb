"""`overlaplab doctor`: what this machine is, and what that means for overlap.

Gathers facts (`doctor_facts`), then judges them: `judge` is a function of the facts
alone. A laptop without a GPU is a healthy machine. Measures no speed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from overlaplab.checkup.facts import (
    READ_AT_CUDA_START,
    Facts,
    Section,
    gather,
)
from overlaplab.checkup.machine import judge_machine, told_limits
from overlaplab.checkup.settings import Remark, judge_files, judge_settings

OLDEST_TORCH = (2, 11)
PYTHONS = ((3, 11), (3, 13))
_INSTALL = "https://pytorch.org/get-started/locally"
_WIDTH = 80
_INDENT = " " * 9


@dataclass(frozen=True, slots=True)
class Part:
    """A cluster of the course, and whether it runs here."""

    cluster: str
    runs: bool
    says: str


@dataclass(frozen=True, slots=True)
class Checkup:
    """What the doctor says; it prints.

    Args:
        machine: one line.
        remarks: in the order in which they were looked at.
        parts: what of the course runs here.
    """

    machine: str
    remarks: tuple[Remark, ...]
    parts: tuple[Part, ...]

    @property
    def broken(self) -> tuple[Remark, ...]:
        return tuple(r for r in self.remarks if r.status == "broken")

    @property
    def exit_code(self) -> int:
        """0, or 1 if something is broken."""
        return 1 if self.broken else 0

    def __str__(self) -> str:
        lines = [f"overlaplab doctor: {self.machine}", ""]
        for remark in self.remarks:
            lines += _paragraph(f"{remark.status:<9}", remark.what)
            lines += _paragraph(_INDENT, remark.means)
            lines += _paragraph(_INDENT + "-> ", remark.do)
        lines += ["", "What runs here"]
        for part in self.parts:
            runs = "yes" if part.runs else "no"
            lines += _paragraph(f"  {part.cluster:<8} {runs:<5}", part.says)
        return "\n".join([*lines, "", self._last_line()])

    def __repr__(self) -> str:
        return str(self)

    def _last_line(self) -> str:
        if self.broken:
            return f"Broken: {'; '.join(r.what for r in self.broken)}."
        warnings = sum(r.status == "warning" for r in self.remarks)
        if warnings:
            return f"Nothing is broken. Warnings: {warnings}."
        return "Nothing is broken."

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {**asdict(self), "exit_code": self.exit_code}


def doctor() -> Checkup:
    """Look at this machine: versions, GPUs, process groups, settings.

    Starts no CUDA in this process and ends within two minutes, whatever hangs.

    Returns:
        What was found, what it means and what to do; print it.
    """
    return judge(gather())


def judge(facts: Facts) -> Checkup:
    """What the facts mean."""
    has_gpus = bool(facts.gpus)
    remarks = [_versions(facts)]
    if _torch_works(facts):
        remarks += [
            _gloo(facts),
            *_graphics(facts),
            *_on_gpus(facts),
            *judge_machine(facts),
            *_changed_too_late(facts),
            *judge_settings(facts.environ, has_gpus=has_gpus),
            *judge_files(facts.system.nccl_settings, facts.environ, has_gpus=has_gpus),
        ]
    return Checkup(_machine(facts), tuple(remarks), _parts(facts, remarks))


def _machine(facts: Facts) -> str:
    gpus = _count_gpus([str(gpu["name"]) for gpu in facts.gpus])
    cores = f"{facts.cores} CPU core" + ("s" if facts.cores != 1 else "")
    return f"{facts.platform}, {cores}, {gpus or 'no GPU'}"


def _versions(facts: Facts) -> Remark:
    torch = facts.sections.get("torch", Section())
    python = ".".join(map(str, facts.python))
    what = f"Python {python}, overlaplab {facts.package}"
    if not torch.facts:
        why = torch.error or "it did not load in time"
        return Remark(
            "broken",
            f"torch does not load ({why})",
            f"{what}. Nothing of the course runs without torch.",
            f"Install it: {_INSTALL}",
        )
    found = str(torch.facts["torch"])
    what = f"Python {python}, torch {found}"
    is_rocm = bool(torch.facts.get("hip"))
    if is_rocm:
        what += f", ROCm {torch.facts['hip']}"
    if torch.facts.get("cuda"):
        what += f", CUDA {torch.facts['cuda']}"
    if torch.facts.get("nccl"):
        what += f", {'RCCL' if is_rocm else 'NCCL'} {torch.facts['nccl']}"
    what += f", overlaplab {facts.package}"
    if _numbers(found) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Remark(
            "broken",
            what,
            f"The package needs torch {oldest} or later.",
            f"pip install 'torch>={oldest}', or see {_INSTALL}",
        )
    low, high = PYTHONS
    if not low <= facts.python[:2] <= high:
        wanted = " to ".join(".".join(map(str, v)) for v in PYTHONS)
        return Remark("warning", what, f"Tested with Python {wanted} only.")
    return Remark("ok", what)


def _gloo(facts: Facts) -> Remark:
    gloo = facts.sections.get("gloo", Section(error="not reached"))
    if not gloo.error and not gloo.hung:
        return Remark("ok", "gloo: two ranks added two numbers")
    return Remark(
        "broken",
        f"gloo: two ranks could not meet ({gloo.error or 'no answer in time'})",
        'cluster="gloo" does not run here. Usually the host name leads to no address '
        "of this machine.",
        "export GLOO_SOCKET_IFNAME=lo (lo0 on macOS), then try again.",
    )


def _graphics(facts: Facts) -> list[Remark]:
    """GPUs, or why there are none."""
    section = facts.sections.get("gpus", Section(hung=True))
    if section.hung or section.error:
        return [
            Remark(
                "broken",
                f"CUDA does not start ({section.error or 'no answer in time'})",
                "Nothing that needs a GPU runs here.",
                "Does nvidia-smi answer? If not, driver or GPU need a restart.",
            )
        ]
    gpus = facts.gpus
    if gpus:
        names = _count_gpus([str(gpu["name"]) for gpu in gpus])
        gib = min(int(gpu["bytes"]) for gpu in gpus) / 2**30
        return [Remark("ok", f"{names}, {gib:.0f} GiB each")]
    if not facts.smi_gpus:
        return [
            Remark(
                "note",
                "no GPU",
                "None is needed: every lesson runs on the virtual cluster, every "
                "exercise is marked here. What GPUs did is stored in the lessons.",
                ""
                if facts.smi_gpus is None
                else "If there should be one: nvidia-smi is here and lists none; run "
                "it to see why.",
            )
        ]
    listed = f"nvidia-smi lists {_count_gpus(facts.smi_gpus)}"
    hidden = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if not facts.sections["torch"].facts.get("cuda"):
        return [
            Remark(
                "warning",
                f"{listed}, but this torch is built without CUDA",
                "The lessons run; nothing can be measured on these GPUs.",
                f"Install a build with CUDA: {_INSTALL}",
            )
        ]
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return [
            Remark(
                "warning",
                f"{listed}, but CUDA_VISIBLE_DEVICES={hidden!r} hides them",
                do="Unset it.",
            )
        ]
    return [
        Remark(
            "broken",
            f"{listed}, but CUDA does not start: {section.facts['why']}",
            "Nothing that needs a GPU runs here.",
            "Most often the driver is older than this torch's CUDA: update it, or "
            f"install a torch for it ({_INSTALL}).",
        )
    ]


def _on_gpus(facts: Facts) -> list[Remark]:
    """What has to work on GPUs."""
    said = {
        "pinned": (
            "copies from pinned memory",
            "Batches cannot be copied beside computation.",
            "Is there too little memory, or a limit on it (ulimit -l, or the "
            "container's) too low?",
        ),
        "profiler": (
            "torch.profiler sees kernels",
            "Timelines of real GPUs would have no lanes but the CPU's.",
            "Another profiler may hold the GPU; end it. In a container, CUPTI must "
            f"match the driver. A torch without CUPTI: install another ({_INSTALL}).",
        ),
        "nccl": (
            "NCCL: two GPUs added two numbers",
            'cluster="nccl" does not run here.',
            "NCCL_DEBUG=INFO overlaplab doctor shows where it stops. In a container, "
            "try more shared memory (--shm-size) and NCCL_P2P_DISABLE=1.",
        ),
    }
    limits = told_limits(facts.system)
    remarks = []
    for name, (what, means, do) in said.items():
        section = facts.sections.get(name)
        if section is None or "skipped" in section.facts or not facts.gpus:
            continue
        if name == "pinned" and limits:
            what += f" ({limits})"
        if section.error or section.hung:
            why = section.error or "no answer in time"
            remarks.append(Remark("broken", f"{what}: no ({why})", means, do))
        else:
            remarks.append(Remark("ok", what))
    return remarks


def _changed_too_late(facts: Facts) -> list[Remark]:
    """Variables that were changed after CUDA had read them."""
    if facts.seen_by_cuda is None:
        return []
    remarks = []
    for name in READ_AT_CUDA_START:
        now, then = facts.environ.get(name), facts.seen_by_cuda.get(name)
        if now == then:
            continue
        change = f"{name} was {_value(then)}, now {_value(now)}"
        if facts.seen_exactly:
            what = f"{change}; CUDA started before the change"
            means = f"It has no effect: CUDA goes on with {_value(then)}."
        else:
            what = f"{change}; CUDA runs in this process"
            means = (
                "It counts only if it was changed before CUDA started, which cannot "
                "be told afterwards."
            )
        do = "Set it in the shell, or before anything touches a GPU; restart."
        remarks.append(Remark("warning", what, means, do))
    return remarks


def _parts(facts: Facts, remarks: Sequence[Remark]) -> tuple[Part, ...]:
    works = _torch_works(facts)
    gloo = facts.sections.get("gloo", Section(error="not reached"))
    nccl = facts.sections.get("nccl", Section(hung=True))
    num_gpus = len(facts.gpus) if works else 0
    if num_gpus >= 2:
        runs = not nccl.error and not nccl.hung
        says = "every result measured here" if runs else "two GPUs do not meet"
    elif num_gpus == 1:
        runs, says = True, "one rank: launches, streams, traces; no messages"
    else:
        runs, says = False, "no GPU: lessons show what was measured on others"
    fails = "needs torch (see above)"
    alive = works and not gloo.error and not gloo.hung
    return (
        Part("virtual", works, "every lesson and every mark" if works else fails),
        Part(
            "gloo",
            alive,
            "real processes and messages, at the speed of this CPU"
            if alive
            else "see above",
        ),
        Part("nccl", runs, says),
    )


def _torch_works(facts: Facts) -> bool:
    torch = facts.sections.get("torch", Section()).facts
    return bool(torch) and _numbers(str(torch["torch"])) >= OLDEST_TORCH


def _count_gpus(names: Sequence[str]) -> str:
    """ "2 x NVIDIA H100, 1 x NVIDIA L4"."""
    return ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


def _value(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _paragraph(head: str, text: str) -> list[str]:
    if not text:
        return []
    indent = " " * len(head)
    return wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
