"""Mutated traces, timelines, profiles and notebooks: a result, or one error in words.

    python -m tests.fuzz.mutants [NUMBER] [FIRST SEED]

By hand, 20,000 of them; `test_mutants` runs a few, and every seed that failed once.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overlaplab as ol
from overlaplab.diagnosis.page import page
from overlaplab.diagnosis.text import text
from overlaplab.errors import OverlaplabError
from overlaplab.grading.cells import find_lab, read_notebook
from overlaplab.hardware import PROFILES, compute_ns, read_profile, write_profile
from tests.diagnosis.ten_traces import Rank, bucketed, loading, memcpy, steps

MOST_S = 60.0  # of CPU time
MOST_BYTES = 2 << 30
# They failed once: a traceback of ours, or too long.
FAILED = (148, 159, 1520, 2408, 3761, 3852, 4936, 5163)

ODD: list[Any] = [
    None, True, -1, 0, 1, 0.5, 1e300, 10**30, -(10**30), 2**63, "", "nan", "\x1b[31m",
    "\ud800", "$x^{$", "a" * 5000, [], {}, [[]], {"a": 1}, "ProfilerStep#3", "1e99",
]  # fmt: skip


def odd(draw: random.Random) -> Any:
    """A copy: later mutations change it, and a seed must not see another's."""
    return copy.deepcopy(draw.choice(ODD))


def mutate(value: Any, draw: random.Random) -> Any:
    """`value` with one place of it changed, removed, doubled or exchanged."""
    places: list[tuple[Any, Any]] = []

    def walk(of: Any) -> None:
        pairs = of.items() if isinstance(of, dict) else enumerate(of)
        for key, one in pairs:
            places.append((of, key))
            if isinstance(one, dict | list) and one:
                walk(one)

    walk(value)
    owner, key = draw.choice(places)
    how = draw.randrange(5)
    if how == 0:
        owner[key] = odd(draw)
    elif how == 1:
        del owner[key]
    elif how == 2 and isinstance(owner, list):
        owner.insert(draw.randrange(len(owner) + 1), owner[key])
    elif how == 3:
        other, at = draw.choice(places)
        if at in other if isinstance(other, dict) else at < len(other):
            owner[key] = json.loads(json.dumps(other[at]))
    elif isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
        owner[key] = owner[key] * draw.choice([-1, 0, 0.001, 1000, 10**9])
    else:
        owner[key] = odd(draw)
    return value


def spoil(data: bytes, draw: random.Random) -> bytes:
    """Cut off, or with some bytes changed."""
    if draw.random() < 0.5:
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(draw.randint(1, 5)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def trace(draw: random.Random) -> Any:
    events = steps(Rank(), draw.choice([bucketed, loading, memcpy])).events
    return {"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": events}


def own_timeline(draw: random.Random) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path, own = Path(folder, "a.json"), Path(folder, "own.json")
        path.write_text(json.dumps(trace(draw)))
        ol.read_trace(path).of_step(2).to_chrome(own)
        return json.loads(own.read_text())


def profile(draw: random.Random) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        write_profile(draw.choice([*PROFILES.values()]), Path(folder, "a.json"))
        return json.loads(Path(folder, "a.json").read_text())


def notebook(draw: random.Random) -> Any:
    labs = sorted((Path(__file__).parents[2] / "labs").glob("*.ipynb"))
    return json.loads(draw.choice(labs).read_text())


def use_trace(path: Path, draw: random.Random) -> None:
    found = ol.diagnose(ol.read_trace(path))
    text(found, details=True)
    json.dumps(found.to_dict())
    if draw.random() < 0.02:  # a figure takes a third of a second
        page(found)


def use_profile(path: Path, draw: random.Random) -> None:
    compute_ns(read_profile(path), 10**9, "bfloat16", 10**6, "mm")


def use_notebook(path: Path, draw: random.Random) -> None:
    find_lab(read_notebook(path), path)


KINDS: dict[str, tuple[Callable[[random.Random], Any], Callable[..., None]]] = {
    "trace": (trace, use_trace),
    "timeline": (own_timeline, use_trace),
    "profile": (profile, use_profile),
    "notebook": (notebook, use_notebook),
}


def fault(seed: int, folder: Path) -> str:
    """What is wrong with how the mutant of `seed` is taken; "" if nothing is."""
    draw = random.Random(seed)
    kind = draw.choice(["trace"] * 6 + ["timeline", "profile", "profile", "notebook"])
    make, use = KINDS[kind]
    value = make(draw)
    for _ in range(draw.randint(1, 4)):
        value = mutate(value, draw)
    data = json.dumps(value).encode()
    if draw.random() < 0.2:
        data = spoil(data, draw)
    if kind == "trace" and draw.random() < 0.2:
        data = gzip.compress(data, 1)
        data = spoil(data, draw) if draw.random() < 0.5 else data
    path = folder / ("a.ipynb" if kind == "notebook" else "a.json")
    path.write_bytes(data)
    begin = time.process_time()
    try:
        use(path, draw)
    except (OverlaplabError, ValueError) as error:
        if isinstance(error, UnicodeError) or path.name not in str(error):
            return f"{kind}: {type(error).__name__} that names no file: {error}"
    except Exception:
        return f"{kind}: {traceback.format_exc()[-1500:]}"
    took_s = time.process_time() - begin
    return f"{kind}: {took_s:.0f} s" if took_s > MOST_S else ""


def main(number: int, first: int) -> int:
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + number):
            if said := fault(seed, Path(folder)):
                failed.append(seed)
                print(f"seed {seed}: {said}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{number} mutants from {first}: {len(failed)} faults, {peak >> 20} MiB")
    print(f"seeds: {failed}")
    return 1 if failed or peak > MOST_BYTES else 0


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[1:]]
    sys.exit(main(*(arguments + [20_000, 0][len(arguments) :])))
