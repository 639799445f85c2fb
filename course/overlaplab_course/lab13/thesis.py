"""The thesis, timed: code that waits, hooks, and a compiler, on two links.

A small GPT is captured once for each batch size; its graph is then timed with its
messages handled in three ways. Launching costs nothing here, as in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.fx import Graph

from overlaplab.hardware import find_hardware
from overlaplab.techniques.compiler import (
    Costs,
    Found,
    Problem,
    capture_gradients,
    end_of,
    insert_all_reduces,
    merge,
    plan_merges,
    plan_schedule,
    predict,
    schedule,
    search,
    simplify,
)
from overlaplab.timeline import Timeline
from overlaplab_course import stored
from overlaplab_course.gpts import make_gpt
from overlaplab_course.lab13.graphs import GROUP

MIB = 2**20
NUM_RANKS = 8
SEQUENCE = 512
LINKS = {"NVLink": "h200-nvlink", "Ethernet": "ethernet-100g"}
BATCHES = (2, 16)
CAPS_MIB = (2, 8, 32, 128)
MAX_STATES = 2000


@lru_cache(maxsize=4)
def gpt_graph(batch: int) -> Graph:
    """Forward and backward of two layers, 768 wide, with a message per gradient."""
    model = make_gpt(2, vocab_size=4096, width=768, num_heads=12)
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    graph, gradients = capture_gradients(model, tokens, tokens)
    return insert_all_reduces(simplify(graph), gradients, GROUP)


def costs_of(link: str) -> Costs:
    """Of eight GPUs on a link, without launches."""
    hardware = find_hardware(LINKS[link])
    free = replace(hardware, launch_ns=0, collective_launch_ns=0)
    return Costs(free, NUM_RANKS)


def in_given_order(problem: Problem, max_states: int = 0) -> Found:
    """Launch early, wait late, and compute in the order of autograd, as hooks do."""
    order = tuple(range(len(problem.tasks)))
    end = end_of(problem, order)
    return Found(order, end, 0, end, "the given order")


@dataclass(frozen=True)
class Ways:
    """One link and batch size; the best cap for each of the last two.

    Args:
        serial: the graph as it was written: each message is waited for at once.
        hooks: launched early, waited for late.
        compiler: the order of computing searched, too.
        least_ns: nothing is shorter: all computing, or all gradients in one message.
    """

    serial: Timeline
    hooks: Timeline
    compiler: Timeline
    least_ns: int

    def percent(self, timeline: Timeline) -> float:
        """How much of what there is to win over `serial` a way wins."""
        possible = self.serial.step_ns - self.least_ns
        return 100 * (self.serial.step_ns - timeline.step_ns) / possible


@lru_cache(maxsize=8)
def ways(link: str, batch: int) -> Ways:
    """Time the three."""
    graph, costs = gpt_graph(batch), costs_of(link)
    best: dict[str, Timeline] = {}
    for mib in CAPS_MIB:
        merged = merge(graph, plan_merges(graph, mib * MIB, node_ns=costs))
        for name, find in (("hooks", in_given_order), ("compiler", search)):
            plan = plan_schedule(merged, costs, max_states=MAX_STATES, find=find)
            timeline = predict(schedule(merged, plan), costs)
            if name not in best or timeline.step_ns < best[name].step_ns:
                best[name] = timeline
    serial = predict(graph, costs)
    report = predict(merge(graph, plan_merges(graph, 2**40)), costs).report()
    least = max(serial.report().compute_ns, report.communication_ns)
    return Ways(serial, best["hooks"], best["compiler"], least)


def thesis_table() -> str:
    """ms per step, and what of the potential is won, for each link and batch size."""
    rows = []
    for link in LINKS:
        for batch in BATCHES:
            found = ways(link, batch)
            report = found.serial.report()
            ratio = report.communication_ns / report.compute_ns
            cells = [f"{found.serial.step_ns / 1e6:.2f}"]
            for timeline in (found.hooks, found.compiler):
                won = found.percent(timeline)
                cells.append(f"{timeline.step_ns / 1e6:.2f} ({won:.0f} %)")
            rows.append((f"{link}, batch {batch}", f"{ratio:.1f}", *cells))
    head = ("", "messages / computing", "waits at once", "hooks", "compiler")
    return stored.text_table(head, rows)


def spread() -> tuple[float, float, float, float, float]:
    """Of the potential in percent, least and most: of hooks, then of the compiler; and
    by how much the compiler is ahead where it is most."""
    found = [ways(link, batch) for link in LINKS for batch in BATCHES]
    hooks = [way.percent(way.hooks) for way in found]
    compiled = [way.percent(way.compiler) for way in found]
    lead = max(b - a for a, b in zip(hooks, compiled, strict=True))
    return min(hooks), max(hooks), min(compiled), max(compiled), lead
