"""Looks at torch, GPUs and process groups, one section after the other.

Run as a script, in a process of its own, wherever there may be a GPU: a CUDA context
and a communicator must not stay in the caller's process, and what hangs can be killed.
Each section then prints a line of JSON when it begins and one when it ends, so that
whoever reads knows where it stopped. Where torch has no CUDA the sections may run in
the caller's process: they load nothing and end by themselves. Imports torch only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

Section = Callable[[], dict[str, Any]]

PINNED_BYTES = 2**20
GLOO_TIMEOUT_S = 10


def look_at_torch() -> dict[str, Any]:
    """Versions, and threads. Raises ImportError where there is no torch."""
    import torch

    dist = torch.distributed
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "nccl": _dotted(torch.cuda.nccl.version()) if has_nccl else None,  # type: ignore[no-untyped-call]
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "threads": torch.get_num_threads(),
    }


def look_at_gloo() -> dict[str, Any]:
    """Two ranks, as threads, add two numbers over the loopback."""
    import torch

    dist: Any = torch.distributed
    store, limit = dist.HashStore(), timedelta(seconds=GLOO_TIMEOUT_S)

    def add(rank: int) -> float:
        group = dist.ProcessGroupGloo(store, rank, 2, limit)
        tensor = torch.tensor([rank + 1.0])
        group.allreduce([tensor]).wait()
        return tensor.item()

    with ThreadPoolExecutor(2) as pool:
        _check_sums(list(pool.map(add, (0, 1))))
    return {}


def look_at_gpus() -> dict[str, Any]:
    """Names, memory, who reads whose memory; and why CUDA does not start, if so."""
    import torch

    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return {"gpus": [], "peers": [], "why": ""}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # no driver, or one that is too old
        return {"gpus": [], "peers": [], "why": _first_line(error)}
    count = torch.cuda.device_count()
    gpus = [
        {"name": p.name, "bytes": p.total_memory}
        for p in map(torch.cuda.get_device_properties, range(count))
    ]
    pairs = itertools.permutations(range(count), 2)
    peers = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    return {"gpus": gpus, "peers": peers, "why": ""}


def look_at_pinned() -> dict[str, Any]:
    """Copies from page-locked memory give the right bytes, and leave the CPU free."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    host = torch.arange(PINNED_BYTES, dtype=torch.int32).pin_memory()
    device = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    if not torch.equal(device.cpu(), host):
        raise RuntimeError("a copy from pinned memory gave other bytes")
    return {}


def look_at_profiler() -> dict[str, Any]:
    """torch.profiler sees a kernel of ours."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    from torch.profiler import ProfilerActivity, profile, supported_activities

    if ProfilerActivity.CUDA not in supported_activities():  # type: ignore[no-untyped-call]
        raise RuntimeError("this torch is built without CUPTI and sees the CPU only")
    a = torch.ones(64, 64, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.mm(a, a)
        torch.cuda.synchronize()
    kernels = sum("CUDA" in str(e.device_type) for e in profiler.events() or ())
    if not kernels:
        raise RuntimeError("torch.profiler saw a matmul launched and no kernel run")
    return {}


def look_at_nccl() -> dict[str, Any]:
    """The first two GPUs add a number over NCCL."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"skipped": "fewer than two GPUs"}
    tensors = [torch.full((1,), i + 1.0, device=f"cuda:{i}") for i in (0, 1)]
    torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]
    for i in (0, 1):
        torch.cuda.synchronize(i)
    _check_sums([tensor.item() for tensor in tensors])
    return {}


def _check_sums(sums: list[float]) -> None:
    if sums != [3.0, 3.0]:
        raise RuntimeError(f"the sum of 1 and 2 came back as {sums}; expected 3.0")


# Those that need no GPU first; NCCL, which may hang, last.
SECTIONS: dict[str, Section] = {
    "torch": look_at_torch,
    "gloo": look_at_gloo,
    "gpus": look_at_gpus,
    "pinned": look_at_pinned,
    "profiler": look_at_profiler,
    "nccl": look_at_nccl,
}


def look(name: str) -> dict[str, Any]:
    """Run one section: {"facts": ...}, or {"error": ...} if it raised."""
    try:
        return {"facts": SECTIONS[name]()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {_first_line(error)}"}


def main() -> None:
    for name in SECTIONS:
        print(json.dumps({"begin": name}), flush=True)
        seen = look(name)
        print(json.dumps({"end": name, **seen}), flush=True)
        if name == "torch" and "error" in seen:
            return


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _dotted(version: object) -> str:
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


if __name__ == "__main__":
    main()
