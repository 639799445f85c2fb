"""The 24 blocks of lab 16: one training step, its memory, its time and its gradients.

Small tensors with real values, on a GPU whose matmuls are as much slower as the model
is narrower: kernels take as long, relative to one another, as in a wide one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import plain
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.models import Transformer, TransformerConfig

Prepare = Callable[[Transformer], object]


def slowed(times: int) -> Hardware:
    """An H200 whose matmuls take `times` as long; launches cost nothing.

    In float32 and 64 wide, a model then spends its time as one in bfloat16 does that is
    512 * `times` wide.
    """
    h200 = find_hardware("h200-nvlink")
    return replace(
        h200,
        name=f"h200, matmuls {times} times as long",
        flops_per_s={d: rate // times for d, rate in h200.flops_per_s.items()},
        kernel_floor_ns=0,
        launch_ns=0,
        collective_launch_ns=0,
        workspace_bytes=0,
    )


NARROW, WIDE = slowed(2), slowed(16)


@plain.record
@dataclass(frozen=True)
class Trained:
    """What one step left.

    Args:
        curve: ((ns, bytes), ...): from each time until the next, so much lives.
        step_ns: how long it took.
        grads: of each parameter, by its name.
    """

    curve: tuple[tuple[int, int], ...]
    step_ns: int
    grads: Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A small GPT, 64 wide; the same weights each time.

    Args:
        gated: its MLP has a gate, and its matrices have no biases.
    """

    num_layers: int = 24
    vocab_size: int = 64
    gated: bool = False

    def make(self) -> Transformer:
        """It."""
        config = TransformerConfig(
            num_layers=self.num_layers,
            d_model=64,
            num_heads=4,
            vocab_size=self.vocab_size,
            gated=self.gated,
        )
        with torch.random.fork_rng([]):
            torch.manual_seed(24)
            model = Transformer(config)
        if self.gated:
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.register_parameter("bias", None)
        return model

    def sample(self) -> dict[str, Tensor]:
        """What its forward gets: 8 sequences of 64 tokens."""
        draw = torch.Generator().manual_seed(7)
        tokens = torch.randint(self.vocab_size, (8, 64), generator=draw)
        return {"tokens": tokens, "targets": tokens.roll(-1, 1)}


def train(
    prepare: Prepare | None = None,
    model: Model = Model(),
    hardware: Hardware = NARROW,
) -> Run:
    """One forward and backward; `prepare(model)` may change how it runs."""
    options: dict[str, Any] = {"world_size": 1, "hardware": hardware, "timeout_s": 90}
    return run(_step, prepare, model, **options)


def _step(prepare: Prepare | None, model: Model) -> dict[str, Tensor]:
    made = model.make()
    if prepare is not None:
        prepare(made)
    with streams.annotate("forward"):
        loss = made(**model.sample())
    with streams.annotate("backward"):
        loss.backward()
    named = made.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def seen(recorded: Run) -> Trained:
    """What 16.5 looks at."""
    (memory,) = recorded.timeline.memory
    return Trained(memory.steps, recorded.timeline.step_ns, recorded.values[0])


def again(numbers: Collection[int]) -> Prepare:
    """Blocks of these numbers compute again."""
    return partial(_checkpoint, numbers)


def checkpoint_every_block(model: Transformer) -> None:
    """Each block's forward is wrapped in `torch.utils.checkpoint`."""
    _checkpoint(range(len(model.blocks)), model)


def _checkpoint(numbers: Collection[int], model: Transformer) -> None:
    for number in numbers:
        block = model.blocks[number]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def selective(policy: Callable[..., Any]) -> Prepare:
    """All blocks compute again what `policy` does not keep."""
    return partial(_select, policy)


def _ask(policy: Callable[..., Any], ctx: Any, op: Any, *args: Any, **kw: Any) -> Any:
    """What `policy` answers; torch would take None or a text for "compute it again"."""
    answer = policy(ctx, op, *args, **kw)
    if not isinstance(answer, CheckpointPolicy | bool):
        raise TypeError(
            f"for {op} your policy returned {answer!r:.60}; a policy returns "
            "CheckpointPolicy.MUST_SAVE or CheckpointPolicy.PREFER_RECOMPUTE, "
            "for every operator"
        )
    return answer


def _select(policy: Callable[..., Any], model: Transformer) -> None:
    contexts = partial(create_selective_checkpoint_contexts, partial(_ask, policy))
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )
