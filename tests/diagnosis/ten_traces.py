"""Ten traces of a small training step, each slow for one known reason.

Three steps of six layers, as torch.profiler writes them: the main thread launches the
forward pass and the optimizer, autograd's thread the backward pass, and streams work
in order. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20
MAIN, AUTOGRAD = 100, 200
COMPUTE, COMM = 7, 20
LAYERS = 6
STEPS = 3


@dataclass
class Rank:
    """A CPU that launches and a device whose streams work in order."""

    rank: int = 0
    pace: int = 5  # us that a launch costs the CPU
    slower: float = 1.0  # computation of this rank
    crowded: float = 1.0  # computation beside a collective
    events: list[dict[str, Any]] = field(default_factory=list)
    cpu: float = 0.0
    free: dict[int, float] = field(default_factory=dict)  # a stream -> its last end
    sent: list[float] = field(default_factory=list)  # ends of collectives
    peer: Sequence[float] = ()  # those of the rank that comes last

    def row(self, cat: str, name: str, tid: int, start: float, us: float, **args: Any):
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid}
            | {"ts": round(start, 3), "dur": round(us, 3), "args": args}
        )

    def launch(
        self,
        name: str,
        us: float,
        *,
        thread: int = MAIN,
        stream: int = COMPUTE,
        after: float = 0.0,
        cat: str = "kernel",
        **args: Any,
    ) -> float:
        """Launch it behind what its stream has, and behind `after`; its end."""
        number = len(self.events) + 1
        call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync"
        self.row("cuda_runtime", call, thread, self.cpu, self.pace, correlation=number)
        self.cpu += self.pace
        start = max(self.cpu + 2, self.free.get(stream, 0.0), after)
        args |= {"device": 0, "stream": stream, "correlation": number}
        self.row(cat, name, stream, start, us, **args)
        self.free[stream] = start + us
        return start + us

    def compute(self, name: str, us: float, **more: Any) -> float:
        start = max(self.cpu + self.pace + 2, self.free.get(COMPUTE, 0.0))
        beside = start < self.free.get(COMM, 0.0)
        return self.launch(
            name, us * self.slower * (self.crowded if beside else 1.0), **more
        )

    def all_reduce(self, mib: float, us: float, **more: Any) -> float:
        number = len(self.sent)
        stream = more.setdefault("stream", COMM)
        own = max(self.cpu + self.pace + 2, self.free.get(stream, 0.0))
        own = max(own, more.get("after", 0.0))
        if number < len(self.peer):  # it spins until the other rank is there
            us = max(us, self.peer[number] - own)
        end = self.launch(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            us,
            **more,
            **{
                "Collective name": "allreduce",
                "In msg nelems": round(mib * MIB / 4),
                "Out msg nelems": round(mib * MIB / 4),
                "dtype": "Float",
                "Group size": 2,
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
            },
        )
        self.sent.append(end)
        return end

    def forward(self) -> None:
        for _ in range(LAYERS):
            self.compute("gemm", 400)

    def backward(self, ready: Callable[[int, float], None] | None = None) -> None:
        """Each layer from the last on; `ready(layer, end)` is its hook."""
        for layer in reversed(range(LAYERS)):
            before = self.cpu
            end = self.compute("gemm_backward", 800, thread=AUTOGRAD)
            if ready is not None:
                ready(layer, end)
            name = "autograd::engine::evaluate_function: MmBackward0"
            self.row("cpu_op", name, AUTOGRAD, before, self.cpu - before)

    def optimizer(self, after: float = 0.0) -> None:
        self.launch("adam", 200, after=after)

    def end_of_step(self) -> None:
        """The CPU runs one step ahead at most."""
        self.cpu = max(self.cpu, max(self.free.values()) - 1000)


def steps(one: Rank, step: Callable[[Rank], None]) -> Rank:
    for number in range(1, STEPS + 1):
        start = one.cpu
        step(one)
        one.end_of_step()
        name = f"ProfilerStep#{number}"
        one.row("user_annotation", name, MAIN, start, one.cpu - start)
    return one


def bucketed(one: Rank, *, mib: Sequence[float] = (25, 25, 1), us: int = 500) -> None:
    """Two layers a bucket, sent when its gradients are there; the last is small."""
    one.forward()

    def ready(layer: int, end: float) -> None:
        if layer % 2 == 0:
            size = mib[2 - layer // 2]
            one.all_reduce(size, us * size / 25, thread=AUTOGRAD, after=end)

    one.backward(ready)
    one.optimizer(after=one.free[COMM])


def launched_late(one: Rank) -> None:
    one.forward()
    one.backward()
    for _ in range(3):
        one.all_reduce(25, 500, after=one.free[COMPUTE])
    one.optimizer(after=one.free[COMM])


def launched_late_and_divided(one: Rank) -> None:
    """Each is waited for in turn, and its gradients divided."""
    one.forward()
    one.backward()
    ready = one.free[COMPUTE]
    ends = [one.all_reduce(25, 500, after=ready) for _ in range(3)]
    for end in ends:
        one.launch("div", 20, after=end)
    one.optimizer()


def launched_late_and_blocking(one: Rank) -> None:
    one.forward()
    one.backward()
    for _ in range(3):
        one.all_reduce(25, 500, stream=COMPUTE)
        one.launch("div", 20)
    one.optimizer()


def loading(one: Rank) -> None:
    one.cpu = max(one.cpu, max(one.free.values(), default=0.0))
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    one.row("user_annotation", name, MAIN, one.cpu, 9000)
    one.cpu += 9000
    bucketed(one)


def loading_unmarked(one: Rank) -> None:
    """As `loading`, by a loader that marks no range."""
    one.cpu = max(one.cpu, max(one.free.values(), default=0.0)) + 9000
    bucketed(one)


def one_bucket(one: Rank) -> None:
    one.forward()

    def ready(layer: int, end: float) -> None:
        if layer == 0:
            one.all_reduce(75, 1500, thread=AUTOGRAD, after=end)

    one.backward(ready)
    one.optimizer(after=one.free[COMM])


def launch_bound(one: Rank) -> None:
    """Many kernels of 4 us, each launched in 12."""
    for _ in range(60):
        one.launch("small", 4)
    for _ in range(60):
        one.launch("small_backward", 4, thread=AUTOGRAD)
    one.row(
        "cpu_op", "autograd::engine::evaluate_function: M", AUTOGRAD, one.cpu - 700, 700
    )
    one.all_reduce(0.1, 20, thread=AUTOGRAD, after=one.free[COMPUTE])
    one.optimizer(after=one.free[COMM])


def same_stream(one: Rank) -> None:
    """async_op=False in the hooks: on the stream that computes."""
    one.forward()

    def ready(layer: int, end: float) -> None:
        one.all_reduce(12, 300, thread=AUTOGRAD, stream=COMPUTE)

    one.backward(ready)
    one.optimizer()


def waited_for_at_once(one: Rank) -> None:
    """async_op=True and work.wait() right behind it."""
    one.forward()
    end = [0.0]

    def ready(layer: int, computed: float) -> None:
        end[0] = one.all_reduce(12, 300, thread=AUTOGRAD, after=computed)
        one.free[COMPUTE] = end[0]

    one.backward(ready)
    one.optimizer()


def memcpy(one: Rank) -> None:
    one.launch("Memcpy HtoD (Pageable -> Device)", 3000, cat="gpu_memcpy", bytes=MIB)
    bucketed(one)


def last_bucket(one: Rank) -> None:
    bucketed(one, mib=(25, 25, 100))


def stragglers() -> list[Rank]:
    late = steps(Rank(1, slower=1.4), bucketed)
    return [steps(Rank(0, peer=late.sent), bucketed), late]


# The cause, and who shows it. "" is: nothing is wrong.
TEN: dict[str, tuple[str, Callable[[], list[Rank]]]] = {
    "late launch": ("launched-late", lambda: [steps(Rank(), launched_late)]),
    "loading": ("input-bound", lambda: [steps(Rank(), loading)]),
    "stragglers": ("straggler", stragglers),
    "one bucket": ("one-bucket", lambda: [steps(Rank(), one_bucket)]),
    "launch-bound": ("launch-bound", lambda: [steps(Rank(pace=12), launch_bound)]),
    "same stream": ("same-stream", lambda: [steps(Rank(), same_stream)]),
    "contention": ("contention", lambda: [steps(Rank(crowded=1.5), bucketed)]),
    "memcpy": ("memcpy-in-the-way", lambda: [steps(Rank(), memcpy)]),
    "last bucket": ("last-bucket", lambda: [steps(Rank(), last_bucket)]),
    "nothing wrong": ("", lambda: [steps(Rank(), bucketed)]),
}
VARIANTS: dict[str, tuple[str, Callable[[], list[Rank]]]] = {
    "late, divided": (
        "launched-late",
        lambda: [steps(Rank(), launched_late_and_divided)],
    ),
    "late, blocking": (
        "launched-late",
        lambda: [steps(Rank(), launched_late_and_blocking)],
    ),
    "loading, unmarked": ("cpu-elsewhere", lambda: [steps(Rank(), loading_unmarked)]),
    "waited for at once": ("same-stream", lambda: [steps(Rank(), waited_for_at_once)]),
}


def write(folder: Path, ranks: Sequence[Rank]) -> Path:
    """A folder of one file a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in ranks:
        info = {"rank": one.rank, "world_size": 2}
        trace = {"distributedInfo": info, "traceEvents": one.events}
        (folder / f"rank_{one.rank}.json").write_text(json.dumps(trace))
    return folder
