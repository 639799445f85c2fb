"""`ol.doctor()` and `overlaplab doctor`: what this machine means for overlap.

Gathers facts (`facts`, `system` and, in a process of its own, `probe`), then judges
them: `judge` is a function of the facts alone. A laptop without a GPU is a healthy
machine. Measures no speed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from overlaplab.checkup import software
from overlaplab.checkup.facts import Facts, gather
from overlaplab.checkup.machine import judge_machine
from overlaplab.checkup.remarks import Remark, judge_settings
from overlaplab.checkup.software import Part
from overlaplab.errors import plural

__all__ = ["Checkup", "Part", "Remark", "doctor", "judge"]

_WIDTH = 80
_INDENT = " " * 9


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

    __repr__ = __str__

    def _last_line(self) -> str:
        if self.broken:
            return f"Broken: {'; '.join(r.what for r in self.broken)}."
        warnings = sum(r.status == "warning" for r in self.remarks)
        return "Nothing is broken." + (f" Warnings: {warnings}." if warnings else "")

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
    remarks = [software.judge_versions(facts)]
    if software.torch_works(facts):
        remarks += [
            *software.judge_torch(facts),
            *judge_machine(facts),
            *software.judge_late_changes(facts),
            *judge_settings(facts.environ, has_gpus=has_gpus),
        ]
    gpus = software.count_gpus(str(gpu["name"]) for gpu in facts.gpus) or "no GPU"
    machine = f"{facts.platform}, {plural(facts.cores, 'CPU core')}, {gpus}"
    return Checkup(machine, tuple(remarks), software.judge_parts(facts))


def _paragraph(head: str, text: str) -> list[str]:
    return wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )
