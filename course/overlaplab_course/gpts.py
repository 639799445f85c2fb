"""The lessons' GPTs in bfloat16, and steps of them recorded as shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.cluster.run import Run, run
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import Program, only_step
from overlaplab.streams import annotate, name_gradients
from overlaplab.timeline import Timeline

SEQUENCE = 1024
# From a model to what is called after its backward pass.
Attach = Callable[[nn.Module], Callable[[], Any]]


@contextlib.contextmanager
def in_bfloat16() -> Iterator[None]:
    """Parameters that are made in the `with` block are bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make_gpt(
    num_layers: int, vocab_size: int = 256, width: int = 1024, num_heads: int = 16
) -> Transformer:
    """In bfloat16."""
    config = TransformerConfig(
        num_layers=num_layers, d_model=width, num_heads=num_heads, vocab_size=vocab_size
    )
    with in_bfloat16():
        return Transformer(config)


def send_each(model: nn.Module) -> Callable[[], Any]:
    """One message per gradient, as soon as it is there; the answer waits for all."""
    works: list[Any] = []

    def send(param: Tensor) -> None:
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
    return lambda: [work.wait() for work in works]


def record_step(
    attach: Attach,
    sequences: int,
    *,
    num_layers: int,
    width: int,
    vocab_size: int,
    world_size: int,
) -> Program:
    """Forward, backward and messages of a GPT: shapes only, one rank stands for all."""
    model = (num_layers, vocab_size, width)
    recorded = run(
        _step, attach, sequences, *model, world_size=world_size, fake=True, timeout_s=90
    )
    assert recorded.program is not None
    return only_step(recorded.program)


def _step(
    attach: Attach, sequences: int, num_layers: int, vocab_size: int, width: int
) -> None:
    model = make_gpt(num_layers, vocab_size, width)
    name_gradients(model, prefix="")
    finish = attach(model)
    tokens = torch.randint(vocab_size, (sequences, SEQUENCE))
    with annotate("step"):
        model(tokens, targets=tokens).backward()
        finish()


def step_of(recorded: Run, step: int = 1) -> Timeline:
    """The second step: the first makes the optimizer's states, and a plan."""
    timeline = recorded.timeline.of_step(step)
    # Kinds are what is looked at here, not single tensors.
    memory = tuple(replace(of_rank, holders=()) for of_rank in timeline.memory)
    return replace(timeline, memory=memory)
