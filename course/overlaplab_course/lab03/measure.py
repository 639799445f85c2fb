"""What lab 03 shows of real GPUs: streams, waits, copies, priorities, races.

Times are medians of many, the variants of a question in turn. On CPU processes streams
are no-ops: everything runs, and the numbers mean nothing.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from overlaplab import streams
from overlaplab.bench.timing import Step
from overlaplab_course import timing
from overlaplab_course.lab03 import four_races, reference
from overlaplab_course.lab03.jobs import COMPUTE, Piece, Task, backward_job, one_stream
from overlaplab_course.lab03.show import MATMUL, MESSAGE_BYTES
from overlaplab_course.timing import get_ready, matrix, medians_ms

ROUNDS, STEPS = 8, 4
CHAINS, LINKS = 8, 12
HOPS = 100
TRIES = 20
ON_GPU, NEEDS_GPU = ("priorities", "races", "sanitizer"), {"error": "needs a GPU"}


def measure() -> dict[str, Any]:
    """Everything the lesson prints of GPUs. Collective."""
    on_gpu = timing.on_gpu()
    questions: Mapping[str, Callable[[bool], dict[str, Any]]] = {
        "job": job_on_streams,
        "chains": independent_chains,
        "feeds": feeds,
        "waits": cost_of_waits,
        "priorities": priorities,
        "synchronize": synchronize_and_collectives,
        "races": races,
        "sanitizer": sanitizer,
    }
    answers: dict[str, Any] = {}
    for name, ask in questions.items():
        dist.barrier()
        try:
            answers[name] = ask(on_gpu) if on_gpu or name not in ON_GPU else NEEDS_GPU
        except Exception as error:  # the other questions are worth their answers
            answers[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        streams.synchronize()
    return {"answers": answers}


def _medians(steps: Mapping[str, Step], per: float = 1) -> dict[str, float]:
    """Median ms of each, divided by `per`."""
    return {n: round(ms / per, 4) for n, ms in medians_ms(steps, ROUNDS, STEPS).items()}


# -- the job of sections 1 and 2


def two_streams(tasks: Sequence[Task]) -> None:
    """Section 1's: each task's stream waits for all of the other."""
    compute, wire = streams.current_stream(), streams.Stream()
    for task in tasks:
        own, other = (compute, wire) if task.on == COMPUTE else (wire, compute)
        own.wait_stream(other)
        with streams.stream(own):
            task.run()
    compute.wait_stream(wire)


def job_on_streams(on_gpu: bool) -> dict[str, Any]:
    """Section 1's job: a unit is one large matmul, or a message as long as it."""
    size, unit_bytes = (MATMUL, MESSAGE_BYTES) if on_gpu else (128, 2**20)
    job, a, b = backward_job(), matrix(size), matrix(size)

    def task(piece: Piece) -> Task:
        out = torch.empty_like(a)
        sent = 0 if piece.on == COMPUTE else piece.ms * unit_bytes // 4
        message = torch.zeros(sent, device=a.device)

        def launch() -> None:
            if piece.on == COMPUTE:
                for _ in range(piece.ms):
                    torch.mm(a, b, out=out)
            else:
                dist.all_reduce(message)

        return Task(piece.name, piece.on, job.needs[piece.name], launch)

    tasks = [task(piece) for piece in job.pieces]
    times = _medians(
        {
            "one stream": lambda: one_stream(tasks),
            "two streams that wait for each other": lambda: two_streams(tasks),
            "an event per task": lambda: reference.issue(tasks),
            "compute alone": lambda: one_stream([t for t in tasks if t.on == COMPUTE]),
            "messages alone": lambda: one_stream([t for t in tasks if t.on != COMPUTE]),
        }
    )
    unit = f"a matmul of {size} x {size}; {unit_bytes // 2**20} MiB"
    return {"unit": unit, "ms": times}


# -- how many streams are enough?


def independent_chains(on_gpu: bool) -> dict[str, Any]:
    """Chains of kernels on 1 to 8 streams; wide kernels fill the GPU, narrow do not."""
    wide, numel, device = *((3072, 2**16) if on_gpu else (64, 64)), streams.device()
    chains = {
        "narrow": [torch.ones(16, numel, device=device) for _ in range(CHAINS)],
        "wide": [matrix(wide) for _ in range(CHAINS)],
    }

    def step(inputs: Sequence[torch.Tensor], side: Sequence[Any]) -> None:
        main = streams.current_stream()
        for stream in side:
            stream.wait_stream(main)
        for _ in range(LINKS):  # launched in turn, so that no stream is ahead
            for number, x in enumerate(inputs):
                with streams.stream(side[number % len(side)]):
                    torch.mm(x, x) if len(x) > 16 else torch.cumsum(x, 1)
        for stream in side:
            main.wait_stream(stream)

    answer: dict[str, Any] = {"chains": CHAINS, "kernels a chain": LINKS}
    for name, inputs in chains.items():
        answer[name] = _medians(
            {
                str(n): partial(step, inputs, [streams.Stream() for _ in range(n)])
                for n in (1, 2, 3, 4, CHAINS)
            }
        )
    return answer


# -- a batch to the device


def feeds(on_gpu: bool) -> dict[str, Any]:
    """Section 5's loops, ms per batch; steps read their loss."""
    num, numel = 6, (2**24 if on_gpu else 2**14)  # 64 MiB per batch
    samples = [torch.full((numel,), float(i)) for i in range(num)]
    pinned = [s.pin_memory() for s in samples] if on_gpu else samples
    factor = matrix(4096 if on_gpu else 128)
    out, batch0 = torch.empty_like(factor), samples[0].to(streams.device())

    def to_device(sample: torch.Tensor) -> torch.Tensor:
        return sample.to(streams.device(), non_blocking=True)

    def step(batch: torch.Tensor) -> float:
        for _ in range(8):
            torch.mm(factor, factor, out=out)
        return float((out[0, 0] + batch[0]).item())

    def ahead() -> None:
        """Samples are pinned already: 3.4 without the CPU's filling."""
        main, loading = streams.current_stream(), streams.Stream()

        def load(sample: torch.Tensor) -> tuple[torch.Tensor, Any]:
            with streams.stream(loading):
                return to_device(sample), loading.record_event()

        following = load(pinned[0])
        for number in range(num):
            batch, copied = following
            main.wait_event(copied)
            if on_gpu:
                batch.record_stream(main)
            if number + 1 < num:
                following = load(pinned[number + 1])
            step(batch)

    variants: dict[str, Step] = {
        "steps alone": lambda: [step(batch0) for _ in samples],
        "copies alone, pinned": lambda: [to_device(sample) for sample in pinned],
        "pageable, same stream": lambda: [step(to_device(s)) for s in samples],
        "pinned, same stream": lambda: [step(to_device(s)) for s in pinned],
        "pinned, own stream, ahead": ahead,
    }
    if on_gpu:  # a CPU process has no pinned memory
        variants["3.4: the CPU fills two pinned buffers"] = lambda: reference.feed(
            samples, step
        )
    return {"MiB per batch": numel * 4 / 2**20, "ms per batch": _medians(variants, num)}


# -- what a wait costs


def cost_of_waits(on_gpu: bool) -> dict[str, Any]:
    """Two streams take turns, 100 hops of a tiny kernel: us a hop, by kind of wait."""
    x = torch.ones(64, device=streams.device())
    pair = [streams.Stream(), streams.Stream()]

    def hops(wait: Callable[[Any, Any], object]) -> Step:
        def step() -> None:
            for hop in range(HOPS):
                own, before = pair[hop % 2], pair[1 - hop % 2]
                wait(own, before)
                with streams.stream(own):
                    x.add_(1)
            for stream in pair:
                streams.current_stream().wait_stream(stream)

        return step

    times = _medians(
        {
            "no wait": hops(lambda own, before: None),
            "event": hops(lambda own, before: own.wait_event(before.record_event())),
            "event.synchronize": hops(lambda _, b: b.record_event().synchronize()),
            "synchronize everything": hops(lambda own, before: streams.synchronize()),
        },
        per=HOPS / 1e3,
    )
    one = partial(lambda a, b: a.wait_event(b.record_event()), *pair)
    cpu_us = 1e4 * statistics.median(timeit.repeat(one, number=100, repeat=20))
    return {"us a hop": times, "us of CPU": round(cpu_us, 3)}


# -- priorities


def priorities(on_gpu: bool) -> dict[str, Any]:
    """How long small kernels take beside many large ones, by stream priority."""
    factor = matrix(4096)
    out = [torch.empty_like(factor) for _ in range(2)]
    small = torch.ones(2**20, device=factor.device)
    load = streams.Stream()

    def small_ms(stream: Any, num_large: int) -> float:
        begin, end = (streams.Event(enable_timing=True) for _ in range(2))
        streams.synchronize()
        with streams.stream(load):
            for i in range(num_large):
                torch.mm(factor, factor, out=out[i % 2])
        with streams.stream(stream):
            begin.record()
            for _ in range(5):
                small.mul_(1.0)
            end.record()
        streams.synchronize()
        return float(begin.elapsed_time(end))

    times: dict[str, list[float]] = {}
    for _ in range(15):
        for priority in (0, -1):
            ms = small_ms(streams.Stream(priority=priority), 40)
            times.setdefault(f"priority {priority}", []).append(ms)
    times["alone"] = [small_ms(streams.current_stream(), 0) for _ in range(15)]
    return {
        "what": "five small kernels beside 40 matmuls of 4096",
        "ms": {name: round(statistics.median(ms), 4) for name, ms in times.items()},
    }


# -- what a stream's synchronize does not wait for


def synchronize_and_collectives(on_gpu: bool) -> dict[str, Any]:
    """An async all-reduce launched under a side stream: when does the CPU go on?"""
    tensor = torch.zeros(2**27 if on_gpu else 2**16, device=streams.device())
    side = streams.Stream()
    times: dict[str, list[float]] = {}
    done = []
    for _ in range(10):
        for name in ("stream.synchronize", "work and synchronize"):
            get_ready()
            start = time.perf_counter_ns()
            with streams.stream(side):
                work = dist.all_reduce(tensor, async_op=True)
                if name != "stream.synchronize":
                    work.wait()
            side.synchronize()
            times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e6)
            if name == "stream.synchronize":
                done.append(bool(work.is_completed()))
                work.wait()
    return {
        "MiB": tensor.numel() * 4 / 2**20,
        "ms": {name: round(statistics.median(ms), 4) for name, ms in times.items()},
        "ended when stream.synchronize returned": sum(done),
        "of": len(done),
    }


# -- races: how often values are wrong, and what torch's stream sanitizer says


class _Busy(TorchDispatchMode):
    """A kernel that only waits, for about 2 ms, stands before the first `operator`."""

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operator, self._slept = operator, False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._slept and func.__name__.startswith(self._operator):
            torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]
            self._slept = True
        return func(*args, **(kwargs or {}))


def races(on_gpu: bool) -> dict[str, Any]:
    """Wrong results in 20 tries: broken and repaired, on a quiet and on a busy GPU."""
    twos, sums = torch.tensor([2.0]), torch.arange(3) * float(four_races.SIZE)
    answer: dict[str, Any] = {"tries": TRIES}
    for name, program, operator, right in (
        ("one event for two", four_races.event, "fill_", twos),
        ("memory given away", four_races.reuse, "sum", sums),
    ):
        counts = answer.setdefault(name, {})
        for variant, gpu in product(("broken", "repaired"), ("quiet", "busy")):
            wrong = 0
            for _ in range(TRIES):
                with _Busy(operator) if gpu == "busy" else nullcontext():
                    result = program(variant == "repaired")
                streams.synchronize()  # or a late write would mend the next try
                wrong += not bool((result.cpu() == right).all())
            counts[f"{variant}, {gpu}"] = wrong
    return answer


def sanitizer(on_gpu: bool) -> dict[str, Any]:
    """What TORCH_CUDA_SANITIZER=1 finds in `four_races`, and when repaired.

    In child processes, so that it slows nothing here.
    """
    variants = ("broken", "repaired") if dist.get_rank() == 0 else ()
    answer = {variant: _under_sanitizer(variant) for variant in variants}
    dist.barrier()
    return answer


def _under_sanitizer(variant: str) -> dict[str, Any]:
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    environment["TORCH_CUDA_SANITIZER"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    code = (
        f"from {four_races.__name__} import run_all; run_all({variant == 'repaired'})"
    )
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # the reports go there
            text=True,
            timeout=90,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "no answer in 90 s"}
    answer: dict[str, Any] = {}
    for part in ran.stdout.split("#### ")[1:]:
        name, _, text = part.partition("\n")
        answer[name.strip()] = _shortened(text)
    if ran.returncode:
        last = ran.stdout.strip().splitlines()[-1:] or ["nothing printed"]
        answer["error"] = f"exit status {ran.returncode}: {last[0][:200]}"
    return answer


def _shortened(text: str) -> str:
    """Without this machine's folders; the first report only."""
    ours = r'File "[^"]*/((torch|overlaplab(_course)?)/[^"]*)"'
    text = re.sub(ours, r'File "\1"', text)
    return "\n".join(line[:200] for line in text.strip().splitlines()[:40])
