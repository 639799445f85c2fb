"""What lab 01 shows of messages: their cost, their share, and what hides them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from overlaplab.grading.forms import KnobProgram, Settings
from overlaplab.hardware import Hardware, Link
from overlaplab.program import PayloadTensor, Program, ProgramBuilder, replay, resolve
from overlaplab.timeline import Timeline
from overlaplab.view import Knob
from overlaplab_course.lab01.given import CHALK, NS_PER_MS

# What a message takes

_NUM_CHUNKS = 1000
_TOTAL_BYTES = 10**9
_BACKWARD_MS = 100


def link_of(gbit_per_s: float, latency_us: float) -> Hardware:
    """`chalk` with this link."""
    rate = round(gbit_per_s * 10**9 / 8)
    link = Link(round(1000 * latency_us), rate, source="typed")
    return replace(CHALK, name=f"chalk, {gbit_per_s:g} Gbit/s", link=link)


@lru_cache(maxsize=1)
def _gigabyte() -> Program:
    """A backward pass that makes a gigabyte of gradients, evenly."""
    b = ProgramBuilder(num_ranks=1, represents=2)
    ns, size = _BACKWARD_MS * NS_PER_MS // _NUM_CHUNKS, _TOTAL_BYTES // _NUM_CHUNKS
    for chunk in range(_NUM_CHUNKS):
        ready = b.compute(0, f"backward {chunk}", ns=ns, phase="backward")
        part = PayloadTensor(size, "bfloat16", ready, f"gradient {chunk}")
        b.collective(0, "all_reduce", payload=[part])
    return b.build()


def a_gigabyte(num_messages: int) -> Timeline:
    """The backward pass with its gigabyte in that many equal messages."""
    cap = _TOTAL_BYTES // num_messages
    return replay(_gigabyte(), hardware=link_of(100, 100), buckets=cap)


class Counted(NamedTuple):
    """One number of messages: one of them, all in a row, and the step; times in ms."""

    num_messages: int
    one_ms: float
    all_ms: float
    step_ms: float


def count(numbers: Sequence[int]) -> list[Counted]:
    """The gigabyte in each number of messages."""
    found = []
    for timeline in map(a_gigabyte, numbers):
        sent = [s.duration_ns for s in timeline.spans if s.kind == "communication"]
        times_ns = sent[0], sum(sent), timeline.step_ns
        found.append(Counted(len(sent), *(ns / NS_PER_MS for ns in times_ns)))
    return found


# From 8 to 4,096 GPUs

PARAMETERS = 1_300_000_000
GPUS = (8, 16, 64, 512, 4096)
LINKS = ("h100-ib400", "ethernet-100g", "ethernet-25g")
GLOBAL_TOKENS = 4_194_304  # a batch of four million tokens, shared by all


def step_without_overlap(num_gpus: int, tokens: int, link: str | Hardware) -> Timeline:
    """Computing, then one message; one rank stands for all."""
    b = ProgramBuilder(num_ranks=1, represents=int(num_gpus))
    b.compute(0, "step", flops=int(6 * PARAMETERS * tokens), dtype="bfloat16")
    b.collective(0, "all_reduce", bytes=2 * PARAMETERS)
    return resolve(b.build(), link)


def share_of(timeline: Timeline) -> float:
    """Tm / (Tc + Tm)."""
    report = timeline.report()
    return report.communication_ns / report.serial_ns


def given_share(num_gpus: int, tokens: int, name: str) -> float:
    """The share on the profile called `name`."""
    return share_of(step_without_overlap(num_gpus, tokens, name))


# When does overlap matter? A GPT with knobs

_LAYER_PARAMETERS = 12 * 2048 * 2048
KNOBS: Mapping[str, Knob] = {
    "overlap": Knob(("no", "yes"), "no", "overlap"),
    "ktokens": Knob((1, 2, 4, 8, 16, 32, 64), 8, "tokens per GPU (thousands)"),
    "gbyte_per_s": Knob((1, 3, 12.5, 25, 50, 100, 340), 25, "bandwidth (GB/s)"),
    "gpus": Knob((2, 8, 64, 512, 4096), 8, "GPUs"),
    "teraflops": Knob((100, 200, 400, 800, 1600), 800, "GPU (TFLOP/s)"),
}
OVERLAP, WIDER, FASTER = "overlap", "twice the bandwidth", "a GPU twice as fast"


@lru_cache(maxsize=64)
def _gpt(ktokens: int, gpus: int, overlap: bool) -> Program:
    """Forward and backward pass of 24 layers; one message per layer, or one."""
    b = ProgramBuilder(num_ranks=1, represents=gpus)
    flops, size = 2 * _LAYER_PARAMETERS * 1024 * ktokens, 2 * _LAYER_PARAMETERS
    for _ in range(24):
        b.compute(0, "forward", flops=flops, phase="forward")
    for layer in reversed(range(24)):
        b.compute(0, "backward", flops=2 * flops, phase="backward")
        if overlap:
            b.collective(0, "all_reduce", bytes=size, label=f"layer {layer}")
    if not overlap:
        b.collective(0, "all_reduce", bytes=24 * size)
    return b.build()


def _timed(s: Settings) -> Timeline:
    gpu = replace(
        CHALK,
        flops_per_s={"default": s["teraflops"] * 10**12},
        link=Link(50_000, round(s["gbyte_per_s"] * 10**9), source="typed"),
    )
    return resolve(_gpt(s["ktokens"], s["gpus"], s["overlap"] == "yes"), gpu)


turn = KnobProgram(
    KNOBS,
    _timed,
    what_if={
        OVERLAP: lambda s: {"overlap": "yes"},
        WIDER: lambda s: {"gbyte_per_s": 2 * s["gbyte_per_s"]},
        FASTER: lambda s: {"teraflops": 2 * s["teraflops"]},
    },
)


# A calculator that promises too much


class Promise(NamedTuple):
    """Times alone in ms, and the fraction `a` that somebody promises to save."""

    tc: int
    tm: int
    a: float


@lru_cache(maxsize=64)
def jobs(number: int) -> Mapping[str, Promise]:
    """The five jobs of a learner's number; one cannot have its a."""
    draw = random.Random(f"repair {int(number)}")
    found = [
        Promise(draw.randrange(80, 160, 10), draw.randrange(20, 70, 10), a)
        for a in (0.5, 0.9)
    ]
    # More to send than to compute, and an a that can be had all the same.
    for a in (0.25, 0.4):
        tc = draw.randrange(60, 120, 10)
        found.append(Promise(tc, tc + draw.randrange(10, 50, 10), a))
    tc = draw.randrange(40, 100, 10)
    tm = 2 * tc + draw.randrange(0, 60, 20)
    found.append(Promise(tc, tm, draw.choice((0.75, 0.9))))
    draw.shuffle(found)
    return dict(zip("ABCDE", found, strict=True))
