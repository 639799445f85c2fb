"""An embedding's gradient as a table and as rows: what is sent, and what steps take."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.fx import Graph

from overlaplab.techniques.compiler import (
    Settings,
    capture_gradients,
    compile_inserted,
    insert_averages,
    show,
    simplify,
)
from overlaplab_course import stored
from overlaplab_course.gpts import make_gpt
from overlaplab_course.lab13.graphs import GROUP
from overlaplab_course.lab13.measured import ms_of_rows
from overlaplab_course.lab13.thesis import (
    BATCHES,
    LINKS,
    MAX_STATES,
    MIB,
    NUM_RANKS,
    SEQUENCE,
    costs_of,
)

VOCABULARY, WIDTH = 32_768, 768
_BFLOAT16, _TOKEN = 2, 8


@lru_cache(maxsize=2)
def _step(batch: int) -> tuple[Graph, dict[int, str]]:
    """A step of a GPT of two layers as one graph, and its gradients."""
    model = make_gpt(2, vocab_size=VOCABULARY, width=WIDTH, num_heads=12)
    tokens = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    graph, gradients = capture_gradients(model, tokens, tokens)
    return simplify(graph), gradients


@lru_cache(maxsize=8)
def step_ms(link: str, batch: int, by_rows: bool) -> tuple[float, int]:
    """The predicted step of a GPT of two layers, and how many tables went as rows.

    Args:
        link: of `LINKS`.
        batch: sequences of 512 tokens on each of eight ranks.
        by_rows: whether tables may; then `plan_lookups` decides.
    """
    graph, gradients = _step(batch)
    rows = batch * SEQUENCE if by_rows else None
    inserted, found = insert_averages(graph, gradients, GROUP, NUM_RANKS, rows)
    settings = Settings(max_states=MAX_STATES)
    made = compile_inserted(inserted, costs_of(link), settings)
    return made.step_ns / 1e6, len(found)


def rows_table() -> str:
    """What a rank receives of the table either way, on a ring, and the steps."""
    lines = []
    others = NUM_RANKS - 1
    whole = 2 * others * VOCABULARY * WIDTH * _BFLOAT16 / NUM_RANKS
    for batch in BATCHES:
        rows = others * batch * SEQUENCE * (WIDTH * _BFLOAT16 + _TOKEN)
        for link in LINKS:
            table_ms, _ = step_ms(link, batch, False)
            rows_ms, number = step_ms(link, batch, True)
            lines.append(
                (
                    f"{link}, batch {batch}",
                    *(f"{size / MIB:.1f}" for size in (whole, rows)),
                    f"{table_ms:.2f}",
                    f"{rows_ms:.2f}" if number else "stays a table",
                )
            )
    head = ("", "as a table, MiB", "as rows, MiB", "table, ms", "rows, ms")
    return stored.text_table(head, lines)


def rows_on_gpus() -> str:
    """Stored: DDP, this compiler, and this compiler with rows, on two GPUs."""
    lines = []
    for name, ms in ms_of_rows().items():
        ddp, whole, rows = (
            ms[way] for way in ("ddp 100 views static", "ours", "ours, rows")
        )
        shares = f"{whole / ddp:.2f}", f"{rows / ddp:.2f}"
        lines.append((name, *(f"{each:.1f}" for each in (ddp, whole, rows)), *shares))
    head = ("ms per step", "DDP", "inserted", "with rows", "inserted / DDP")
    return stored.text_table((*head, "with rows / DDP"), lines)


def last_operators(number: int = 4) -> str:
    """Of the step of the GPT, and what they give."""
    graph, _ = _step(BATCHES[0])
    return "\n".join(show(graph).split("\n")[-number - 1 : -1])
