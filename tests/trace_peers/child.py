"""A fresh process that reads one trace once and prints what that took, as JSON.

    PYTHON -I child.py {ours|WAY OF HTA} FILE [--all-steps]

Runs under our interpreter or under HTA's, which has no overlaplab: so this file
imports nothing but the standard library until it knows whose turn it is.
"""

from __future__ import annotations

import json
import logging
import platform
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OURS = "ours"
# How HTA can be told to work; the first is how it comes.
HTA_WAYS = ("json", "one-process", "ijson")
_PACKAGES = {
    True: ("overlaplab", "orjson", "msgspec"),
    False: ("HolisticTraceAnalysis", "pandas", "numpy", "ijson"),
}


def main(arguments: Sequence[str]) -> None:
    way, path = arguments[:2]
    begin_ns, begin_cpu_ns = time.perf_counter_ns(), _cpu_ns()
    if way == OURS:
        import_module("overlaplab.profiling.read")
    else:
        _import_hta(way)
    imported_bytes = _status_bytes("VmRSS")
    imported_ns, imported_cpu_ns = time.perf_counter_ns(), _cpu_ns()
    found: dict[str, Any]
    try:
        every = "--all-steps" in arguments  # ours always counts them all
        ours = way == OURS
        fractions = _read_ours(path) if ours else _read_hta(way, path, every)
        found = {"fractions": fractions}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".replace(path, "FILE")}
    found |= {
        "read_ns": time.perf_counter_ns() - imported_ns,
        "read_cpu_ns": _cpu_ns() - imported_cpu_ns,
        "import_ns": imported_ns - begin_ns,
        "import_cpu_ns": imported_cpu_ns - begin_cpu_ns,
        # The interpreter's own start included.
        "process_cpu_ns": _cpu_ns(),
        "imported_bytes": imported_bytes,
        "peak_bytes": _status_bytes("VmHWM"),
        "versions": _versions(_PACKAGES[way == OURS]),
    }
    print(json.dumps(found))


def _read_ours(path: str) -> list[float | None]:
    read_trace = import_module("overlaplab.profiling.read").read_trace
    return [rank.overlap_fraction for rank in read_trace(path).report().ranks]


def _import_hta(way: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    import_module("hta.trace_analysis")
    if way == "ijson":
        import_module("ijson")
        parser = import_module("hta.common.trace_parser")
        backend = parser.ParserBackend.IJSON_BATCH_AND_COMPRESS
        parser.set_default_trace_parsing_backend(backend)


def _read_hta(way: str, path: str, all_steps: bool) -> list[float | None]:
    """HTA's answer by rank, in per cent and rounded by it to two places."""
    files = {0: path}
    if way == "one-process":
        loaded = import_module("hta.common.trace").Trace(files)
        loaded.load_traces(all_steps, use_multiprocessing=False)
        by = import_module("hta.analyzers.communication_analysis").CommunicationAnalysis
        table = by.get_comm_comp_overlap(loaded, visualize=False)
    else:
        loaded = import_module("hta.trace_analysis").TraceAnalysis(
            trace_files=files, include_last_profiler_step=all_steps
        )
        table = loaded.get_comm_comp_overlap(visualize=False)
    percents = [float(x) for x in table["comp_comm_overlap_pctg"]]
    return [None if x != x else x / 100 for x in percents]  # NaN is no JSON


def _cpu_ns() -> int:
    """User and system time of this process and of the children it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, -1)]
    return round(sum(u.ru_utime + u.ru_stime for u in used) * 1e9)


def _status_bytes(field: str) -> int:
    """A line of Linux's account of this process's memory.

    Not `ru_maxrss`: that one remembers the parent's size from before the exec.
    """
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
