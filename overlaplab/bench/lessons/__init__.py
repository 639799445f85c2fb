"""What the lessons show of real GPUs, measured.

One module a lesson, `labNN`, with `measure() -> dict`: called on every rank of an
initialised process group (NCCL, or gloo to rehearse); rank 0's answer is stored with
the card, the versions, the date and the command.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def known() -> tuple[str, ...]:
    """The lessons that measure something: "03", "04"."""
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(m[3:] for m in modules if m.startswith("lab")))


def measure(lesson: str) -> dict[str, Any]:
    """Measure what lesson "NN" shows. Collective: call it on all ranks together.

    Raises:
        ValueError: no such lesson measures anything.
    """
    if lesson not in known():
        raise ValueError(
            f"lesson {lesson!r} measures nothing; expected one of {', '.join(known())}"
        )
    module = importlib.import_module(f"{__name__}.lab{lesson}")
    answer: dict[str, Any] = module.measure()
    return answer
