"""What lab 03 shows of real GPUs: streams, waits, copies, priorities, races.

Times are medians of many, the variants of a question in turn. On CPU processes streams
are no-ops: everything runs, and the numbers mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.bench.timing import Step, time_in_turn
from overlaplab_course.lab03 import reference
from overlaplab_course.lab03.jobs import (
    COMPUTE,
    INPUT,
    Job,
    Piece,
    Task,
    backward_job,
    one_stream,
)
from overlaplab_course.lab03.stream_races import races, sanitizer

ROUNDS, STEPS = 8, 4
CHAINS, LINKS = 8, 12
HOPS = 100


def measure() -> dict[str, Any]:
    """Everything the lesson prints of GPUs. Collective."""
    on_gpu = streams.device().type == "cuda"
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
            answers[name] = ask(on_gpu)
        except Exception as error:  # the other questions are worth their answers
            answers[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        streams.synchronize()
    return {"answers": answers}


def _medians(steps: Mapping[str, Step]) -> dict[str, float]:
    """Median ms of each, after one of each that is not counted."""
    for step in steps.values():
        step()
    streams.synchronize()
    timed = time_in_turn(steps, num_rounds=ROUNDS, steps_a_round=STEPS)
    return {name: round(samples.median_ns / 1e6, 4) for name, samples in timed.items()}


def _matrix(size: int) -> torch.Tensor:
    dtype = torch.bfloat16 if streams.device().type == "cuda" else torch.float32
    return torch.full((size, size), 0.01, dtype=dtype, device=streams.device())


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
    job, size = backward_job(), 4096 if on_gpu else 128
    unit_bytes = (64 if on_gpu else 1) * 2**20
    tasks = _tasks(job, size, unit_bytes)
    times = _medians(
        {
            "one stream": lambda: one_stream(tasks),
            "two streams that wait for each other": lambda: two_streams(tasks),
            "an event a task": lambda: reference.issue(tasks),
            "compute alone": lambda: one_stream([t for t in tasks if t.on == COMPUTE]),
            "messages alone": lambda: one_stream([t for t in tasks if t.on != COMPUTE]),
        }
    )
    return {
        "unit": f"a matmul of {size} x {size}; {unit_bytes // 2**20} MiB",
        "ms": times,
    }


def _tasks(job: Job, size: int, unit_bytes: int) -> list[Task]:
    a, b = _matrix(size), _matrix(size)
    most = max(p.ms for p in job.pieces if p.on != COMPUTE)
    buffers = {name: torch.empty_like(a) for name in {INPUT, *_writes(job)}}
    message = {
        p.name: torch.zeros(most * unit_bytes // 4, device=a.device)
        for p in job.pieces
        if p.on != COMPUTE
    }

    def task(piece: Piece) -> Task:
        def compute() -> None:
            for _ in range(piece.ms):
                torch.mm(a, b, out=buffers[piece.writes])

        def send() -> None:
            dist.all_reduce(message[piece.name][: piece.ms * unit_bytes // 4])

        launch = compute if piece.on == COMPUTE else send
        return Task(piece.name, piece.on, job.needs[piece.name], launch)

    return [task(piece) for piece in job.pieces]


def _writes(job: Job) -> set[str]:
    return {piece.writes for piece in job.pieces}


# -- how many streams are enough?


def independent_chains(on_gpu: bool) -> dict[str, Any]:
    """Chains of kernels on 1 to 8 streams; wide kernels fill the GPU, narrow do not."""
    wide = [_matrix(3072 if on_gpu else 64) for _ in range(CHAINS)]
    narrow = [
        torch.ones(16, 2**16 if on_gpu else 64, device=streams.device())
        for _ in range(CHAINS)
    ]
    kernels: Mapping[str, tuple[list[torch.Tensor], Callable[[torch.Tensor], Any]]] = {
        "narrow": (narrow, lambda x: torch.cumsum(x, 1)),
        "wide": (wide, lambda x: torch.mm(x, x)),
    }
    answer: dict[str, Any] = {"chains": CHAINS, "kernels a chain": LINKS}
    for name, (inputs, kernel) in kernels.items():
        steps = {
            str(n): _chains_on(n, inputs, kernel)
            for n in (1, 2, 3, 4, 8)
            if n <= CHAINS
        }
        answer[name] = _medians(steps)
    return answer


def _chains_on(
    num_streams: int,
    inputs: Sequence[torch.Tensor],
    kernel: Callable[[torch.Tensor], Any],
) -> Step:
    side = [streams.Stream() for _ in range(num_streams)]

    def step() -> None:
        main = streams.current_stream()
        for stream in side:
            stream.wait_stream(main)
        for _ in range(LINKS):  # launched in turn, so that no stream is ahead
            for number, x in enumerate(inputs):
                with streams.stream(side[number % num_streams]):
                    kernel(x)
        for stream in side:
            main.wait_stream(stream)

    return step


# -- a batch to the device


def feeds(on_gpu: bool) -> dict[str, Any]:
    """Section 5's loops, ms a batch; steps read their loss."""
    num, numel = 6, (2**24 if on_gpu else 2**14)  # 64 MiB a batch
    samples = [torch.full((numel,), float(i)) for i in range(num)]
    pinned = [s.pin_memory() for s in samples] if on_gpu else samples
    matrix = _matrix(4096 if on_gpu else 128)
    out = torch.empty_like(matrix)

    def step(batch: torch.Tensor) -> float:
        for _ in range(8):
            torch.mm(matrix, matrix, out=out)
        return float((out[0, 0] + batch[0]).item())

    def plain(source: Sequence[torch.Tensor]) -> None:
        for sample in source:
            step(sample.to(streams.device(), non_blocking=True))

    def ahead(source: Sequence[torch.Tensor]) -> None:
        """Samples are pinned already: 3.4 without the CPU's filling."""
        main, loading = streams.current_stream(), streams.Stream()

        def load(sample: torch.Tensor) -> tuple[torch.Tensor, Any]:
            with streams.stream(loading):
                batch = sample.to(streams.device(), non_blocking=True)
                return batch, loading.record_event()

        following = load(source[0])
        for number in range(len(source)):
            batch, copied = following
            main.wait_event(copied)
            if on_gpu:
                batch.record_stream(main)
            if number + 1 < len(source):
                following = load(source[number + 1])
            step(batch)

    def only_steps() -> None:
        for _ in samples:
            step(batch0)

    def only_copies() -> None:
        for sample in pinned:
            sample.to(streams.device(), non_blocking=True)

    batch0 = samples[0].to(streams.device())
    variants: dict[str, Step] = {
        "steps alone": only_steps,
        "copies alone, pinned": only_copies,
        "pageable, same stream": lambda: plain(samples),
        "pinned, same stream": lambda: plain(pinned),
        "pinned, own stream, ahead": lambda: ahead(pinned),
    }
    if on_gpu:  # a CPU process has no pinned memory
        variants["3.4: the CPU fills two pinned buffers"] = lambda: reference.feed(
            samples, step
        )
    times = {n: round(ms / num, 4) for n, ms in _medians(variants).items()}
    return {"MiB a batch": numel * 4 / 2**20, "ms a batch": times}


# -- what a wait costs


def cost_of_waits(on_gpu: bool) -> dict[str, Any]:
    """Two streams take turns, 100 hops of a tiny kernel: us a hop, by kind of wait."""
    x = torch.ones(64, device=streams.device())
    pair = [streams.Stream(), streams.Stream()]

    def hops(wait: Callable[[Any, Any], None]) -> Step:
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
            "event.synchronize": hops(
                lambda own, before: before.record_event().synchronize()
            ),
            "synchronize everything": hops(lambda own, before: streams.synchronize()),
        }
    )
    return {
        "us a hop": {name: round(1e3 * ms / HOPS, 3) for name, ms in times.items()},
        "us of CPU": _cpu_us(pair),
    }


def _cpu_us(pair: Sequence[Any]) -> float:
    """The CPU's time for one record and one wait, nothing behind it."""
    samples = []
    for _ in range(20):
        start = time.perf_counter_ns()
        for _ in range(100):
            pair[0].wait_event(pair[1].record_event())
        samples.append((time.perf_counter_ns() - start) / 100)
    return round(sorted(samples)[len(samples) // 2] / 1e3, 3)


# -- priorities


def priorities(on_gpu: bool) -> dict[str, Any]:
    """How long small kernels take beside many large ones, by stream priority."""
    if not on_gpu:
        return {"error": "needs a GPU"}
    matrix = _matrix(4096)
    out = [torch.empty_like(matrix) for _ in range(2)]
    small = torch.ones(2**20, device=matrix.device)
    load = streams.Stream()
    answer: dict[str, list[float]] = {}
    for _ in range(15):
        for name, priority in (("priority 0", 0), ("priority -1", -1)):
            other = streams.Stream(priority=priority)
            begin, end = (streams.Event(enable_timing=True) for _ in range(2))
            streams.synchronize()
            with streams.stream(load):
                for i in range(40):
                    torch.mm(matrix, matrix, out=out[i % 2])
            with streams.stream(other):
                begin.record()
                for _ in range(5):
                    small.mul_(1.0)
                end.record()
            streams.synchronize()
            answer.setdefault(name, []).append(begin.elapsed_time(end))
    alone = []
    for _ in range(15):
        begin, end = (streams.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            small.mul_(1.0)
        end.record()
        streams.synchronize()
        alone.append(begin.elapsed_time(end))
    return {
        "what": "five small kernels beside 40 matmuls of 4096",
        "ms": {
            n: round(sorted(v)[len(v) // 2], 4)
            for n, v in {**answer, "alone": alone}.items()
        },
    }


# -- what a stream's synchronize does not wait for


def synchronize_and_collectives(on_gpu: bool) -> dict[str, Any]:
    """An async all-reduce launched under a side stream: when does the CPU go on?"""
    numel = (2**27 if on_gpu else 2**16) // 4
    tensor = torch.zeros(numel * 4, device=streams.device())
    side = streams.Stream()
    rows: dict[str, list[float]] = {
        "stream.synchronize": [],
        "work and synchronize": [],
    }
    done: list[bool] = []
    for _ in range(10):
        for name in rows:
            streams.synchronize()
            dist.barrier()
            streams.synchronize()
            start = time.perf_counter_ns()
            with streams.stream(side):
                work = dist.all_reduce(tensor, async_op=True)
                if name != "stream.synchronize":
                    work.wait()
            side.synchronize()
            rows[name].append((time.perf_counter_ns() - start) / 1e6)
            if name == "stream.synchronize":
                done.append(bool(work.is_completed()))
                work.wait()
    return {
        "MiB": numel * 16 / 2**20,
        "ms": {n: round(sorted(v)[len(v) // 2], 4) for n, v in rows.items()},
        "ended when stream.synchronize returned": sum(done),
        "of": len(done),
    }
