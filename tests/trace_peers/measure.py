"""Runs ours and HTA in turn, each in a fresh process, and puts the two side by side.

The time that counts is the CPU's (user + system): it is the same on a busy machine.
HTA works in every way that `child.HTA_WAYS` knows, and its best counts: the fastest
for time, the leanest for memory.
"""

from __future__ import annotations

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from overlaplab.errors import OverlaplabError
from overlaplab.profiling.read import read_trace
from overlaplab.timeline.intervals import Interval
from tests.trace_peers import child
from tests.trace_peers.growth import grow, read_unpacked
from tests.trace_peers.hta_rules import agrees, explain

KNOWN = Path(__file__).parents[1] / "traces" / "hta"
GROWN_FROM = "hta_trace_diff_control.json.gz"
TIMED = ("read_ns", "read_cpu_ns", "import_ns", "import_cpu_ns", "process_cpu_ns")
SIZED = ("imported_bytes", "peak_bytes")
_NUMBER = rb"([0-9.]+)"
_DEVICE_STEP = re.compile(
    rb'"gpu_user_annotation", *"name": *"ProfilerStep#[^}]*?"ts": *%b, *"dur": *%b'
    % (_NUMBER, _NUMBER)
)
_BASE = re.compile(rb'"baseTimeNanoseconds": *([0-9]+)')

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Args:
        hta_python: the interpreter of an environment with HTA; None: ours only.
        rounds: processes a side and way; the medians count.
        large_mib: also a file of this size, made of a known one, in one round and as
            HTA comes; 0: none.
        limit_bytes: of address space a process; one that needs more fails, and that
            is its result.
        ways: of HTA's.
        all_steps: ask HTA for its answer with the last step, too.
    """

    hta_python: str | None = None
    rounds: int = 5
    large_mib: int = 0
    limit_bytes: int = 12 * 2**30
    ways: Sequence[str] = child.HTA_WAYS
    all_steps: bool = True


def measure(files: Sequence[Path], plan: Plan, say: Say) -> dict[str, Any]:
    """Read every file on both sides.

    Args:
        files: traces of one rank each, .json or .json.gz.
        say: gets a line for a file that begins and for its result.

    Returns:
        The machine, each side's versions and, in "files", a row a file.

    Raises:
        ValueError: that interpreter has no HTA.
    """
    if plan.hta_python:
        _refuse_without_hta(plan.hta_python)
    with tempfile.TemporaryDirectory() as folder:
        rows = [_measure_file(file, plan, say) for file in files]
        if plan.large_mib:
            large = Path(folder) / f"{GROWN_FROM.partition('.')[0]}_grown.json"
            say(f"writing {large.name}")
            times = grow(KNOWN / GROWN_FROM, large, plan.large_mib * 2**20)
            once = replace(plan, rounds=1, ways=child.HTA_WAYS[:1], all_steps=False)
            row = _measure_file(large, once, say)
            rows.append(row | {"made_of": GROWN_FROM, "times": times})
    versions = [row.pop("versions") for row in rows]
    return {
        "machine": f"{os.cpu_count()} CPU cores",
        "rounds": plan.rounds,
        "versions": versions[0] if versions else {},
        "files": rows,
    }


def _refuse_without_hta(python: str) -> None:
    try:
        tried = subprocess.run([python, "-I", "-c", "import hta"], capture_output=True)
    except OSError as error:
        raise ValueError(f"--hta-python {python}: {error.strerror}") from error
    if tried.returncode:
        raise ValueError(
            f"--hta-python {python}: its environment has no HTA; "
            f"{python} -m pip install HolisticTraceAnalysis==0.5.0"
        )


def _measure_file(file: Path, plan: Plan, say: Say) -> dict[str, Any]:
    say(f"{file.name}:")
    ways = [child.OURS, *(plan.ways if plan.hta_python else ())]
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(plan.rounds):
        for way in ways:
            samples[way].append(run_child(way, file, plan))
    row: dict[str, Any] = {"file": file.name, "bytes": file.stat().st_size}
    row["versions"] = {
        way: of_way[0].get("versions", {}) for way, of_way in samples.items()
    }
    row |= summarise(samples)
    if plan.hta_python and "error" not in row["ours"]:
        if plan.all_steps:
            every = run_child(ways[1], file, plan, "--all-steps")
            row["hta_all_steps"] = answer(every)
        row["explained"] = explain_file(file, row)
    say(line(row))
    return row


def run_child(way: str, file: Path, plan: Plan, *more: str) -> dict[str, Any]:
    """What one fresh process says of one reading."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (plan.limit_bytes, plan.limit_bytes))

    python = sys.executable if way == child.OURS else str(plan.hta_python)
    done = subprocess.run(
        [python, "-I", child.__file__, way, str(file.resolve()), *more],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    try:
        sample: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"exit {done.returncode}: {last}"}
    return sample


def answer(sample: dict[str, Any]) -> Any:
    """The share of hidden communication in per cent, None for NaN, or the error."""
    if "error" in sample:
        return sample["error"]
    fractions = sample["fractions"]
    fraction = fractions[0] if fractions else None
    return None if fraction is None else round(100 * fraction, 4)


def summarise(samples: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side, HTA's best of its ways, and the ratios HTA / ours."""
    sides = {way: _median(of_way) for way, of_way in samples.items() if of_way}
    row: dict[str, Any] = {"ours": sides.pop(child.OURS)}
    if not sides:
        return row
    row["hta_ways"] = sides
    whole = {way: side for way, side in sides.items() if "error" not in side}
    if not whole:
        row["hta"] = next(iter(sides.values()))
        return row
    fastest = min(whole, key=lambda way: whole[way]["read_cpu_ns"])
    leanest = min(whole, key=lambda way: whole[way]["peak_bytes"])
    best = whole[fastest] | {key: whole[leanest][key] for key in SIZED}
    row["hta"] = {"fastest": fastest, "leanest": leanest} | best
    if "error" not in row["ours"]:
        row["ratios"] = ratios(row["ours"], row["hta"])
    return row


def _median(samples: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [s for s in samples if "error" in s]
    if failed:
        return failed[0]
    middle = {
        key: round(statistics.median(s[key] for s in samples))
        for key in (*TIMED, *SIZED)
    }
    kept = {key: [s[key] for s in samples] for key in ("read_cpu_ns", "peak_bytes")}
    return {"overlap_percent": answer(samples[0])} | middle | {"samples": kept}


def ratios(ours: dict[str, Any], hta: dict[str, Any]) -> dict[str, float]:
    """HTA's number over ours; above 1 ours is faster, or smaller."""

    def grown(side: dict[str, Any]) -> float:
        return float(max(1, side["peak_bytes"] - side["imported_bytes"]))

    return {
        "cpu": round(hta["read_cpu_ns"] / ours["read_cpu_ns"], 2),
        "cpu_with_imports": round(hta["process_cpu_ns"] / ours["process_cpu_ns"], 2),
        "wall": round(hta["read_ns"] / ours["read_ns"], 2),
        "peak": round(hta["peak_bytes"] / ours["peak_bytes"], 2),
        "peak_over_imports": round(grown(hta) / grown(ours), 2),
    }


def explain_file(file: Path, row: dict[str, Any]) -> dict[str, Any]:
    """HTA's two answers, computed from our timeline, rule by rule."""
    try:
        timeline = read_trace(file)
    except OverlaplabError as error:
        return {"error": str(error).replace(str(file), file.name)}
    found = {}
    marks = device_steps(file)
    asked = [("default", row["hta"].get("overlap_percent"), False)]
    if "hta_all_steps" in row:
        asked.append(("all_steps", row["hta_all_steps"], True))
    for name, printed, all_steps in asked if timeline.spans else ():
        rank = timeline.spans[0].rank
        steps = explain(timeline, rank, all_steps=all_steps, device_steps=marks)
        found[name] = {
            "rules": [[step.rule, step.percent] for step in steps],
            "hta": printed,
            "equal": not isinstance(printed, str) and agrees(steps, printed),
        }
    return found


def device_steps(file: Path) -> list[Interval]:
    """The marks of profiler steps in the GPU's rows, on the trace's clock, in ns."""
    data = read_unpacked(file)
    base = _BASE.search(data)
    base_ns = int(base[1]) if base else 0
    marks = []
    for found in _DEVICE_STEP.finditer(data):
        start, length = (Decimal(number.decode()) for number in found.groups())
        start_ns = base_ns + int(start * 1000)
        marks.append((start_ns, start_ns + int(length * 1000)))
    return marks


def line(row: dict[str, Any]) -> str:
    """One file's result for the terminal."""
    ours = row["ours"]
    if "error" in ours:
        return f"  ours: {ours['error']}"
    said = (
        f"  ours {ours['overlap_percent']} %, {ours['read_cpu_ns'] / 1e9:.2f} s CPU, "
        f"{ours['peak_bytes'] / 2**20:.0f} MiB"
    )
    if ratios := row.get("ratios"):
        return (
            f"{said}; HTA {row['hta']['overlap_percent']} %, {ratios['cpu']}x the CPU, "
            f"{ratios['peak']}x the memory"
        )
    return f"{said}; HTA {row['hta']['error']}" if "hta" in row else said


def known_files() -> list[Path]:
    """The six public traces of the repository."""
    return sorted(KNOWN.glob("*.json.gz"))
