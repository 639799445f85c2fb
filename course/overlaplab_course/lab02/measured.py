"""What lab 02 shows of real GPUs: what `overlaplab_course.lab02.measure` stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

_STORED = Path(__file__).with_name("measured.json")
COMMAND = "python -m overlaplab_course.measure 02 --out mine.json"
NOTHING = f"Nothing is stored yet. On a machine with two GPUs or more:\n    {COMMAND}"


@lru_cache(maxsize=1)
def stored() -> Mapping[str, Any] | None:
    """What was measured on GPUs, None if nothing was."""
    if not _STORED.exists():
        return None
    found: Mapping[str, Any] = json.loads(_STORED.read_text(encoding="utf-8"))
    return found if found.get("backend") == "nccl" else None


def on_gpus() -> str:
    """What each stopwatch said, and what moves a step's time; lines, for a print."""
    found = stored()
    if found is None:
        return NOTHING
    return "\n".join([*_stopwatches(found), "", *_moved(found), "", _machine(found)])


def _stopwatches(found: Mapping[str, Any]) -> list[str]:
    sizes, kinds = found["sizes"], found["kinds"]
    head = ("around", "wait each", "events")
    lines = [f"{'ms a step':<24}" + "".join(f"{name:>11}" for name in head)]
    for kind, said in found["stopwatches"].items():
        row = f"{kind} ({kinds[kind][0]} + {kinds[kind][1]})"
        lines.append(f"{row:<24}" + "".join(f"{said[name]:>11.2f}" for name in head))
    return [
        *lines,
        f"(small products of {sizes['small']} + large of {sizes['large']}, bfloat16; "
        f"{sizes['mib']} MiB)",
    ]


def _moved(found: Mapping[str, Any]) -> list[str]:
    """The first against the tenth, and factors on the step's time by events."""
    steps, group = found["first steps"], found["new groups"]["made by the first call"]
    waits, lines = found["waits"], []
    firsts = {"step of the process": steps}
    if "error" not in group:
        firsts["message of a new group"] = group["calls"]
    for what, ms in firsts.items():
        lines.append(f"first {what}: {ms[0]:.1f} ms; the tenth: {ms[9]:.2f}")
    factor = waits["a wait after each operator"] / waits["as it is"]
    lines.append(f"small first, a wait after each operator: x {factor:.2f}")
    for kind, modes in found["profiles"].items():
        lines.append(
            f"{kind}, in ol.profile(): x {modes['kineto']['step_ratio']:.2f}; "
            f"with events=True: x {modes['events']['step_ratio']:.2f}"
        )
    return lines


def _machine(found: Mapping[str, Any]) -> str:
    return (
        f"{found['world_size']} x {found['card']}, torch {found['torch']}, NCCL "
        f"{found['nccl']}, {found['date'][:10]}; medians, the slowest rank's.\n"
        f"{found['command']}"
    )
