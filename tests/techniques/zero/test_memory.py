"""What a step holds: less than FSDP2's, and what the summary says beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlaplab as ol
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import resolve
from overlaplab.techniques.zero import plan_memory
from tests.techniques.zero.test_schedule import NUM_LAYERS, steps

TOKENS = 16
# Of what sharding decides: the rest is the model's own.
KINDS = ("shards", "states", "gradients", "gathered", "communication")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 2},
    {"mixed_precision": torch.bfloat16},
    {"reshard_after_forward": False},
]


def gpt(vocab_size: int, num_layers: int = 8) -> Transformer:
    return Transformer(
        TransformerConfig(
            num_layers=num_layers,
            d_model=64,
            vocab_size=vocab_size,
            max_tokens=TOKENS,
        )
    )


def train(how: str, vocab_size: int, **settings: Any) -> None:
    """AdamW, whose states are there from the second step on."""
    model = gpt(vocab_size)
    model.positions = model.positions.to(settings.get("mixed_precision"))
    zero = None
    if how == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        parameters = list(model.parameters())
    else:
        zero = ol.Zero3(model, **settings)
        parameters = zero.shards()
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    tokens = torch.randint(vocab_size, (2, TOKENS))
    for step in range(2):
        with ol.annotate(f"step {step}"):
            model(tokens, tokens).backward()
            if zero:
                zero.wait()
            optimizer.step()
            optimizer.zero_grad()


def peak_of(run: ol.Run, *kinds: str) -> tuple[int, dict[str, int]]:
    """Bytes of these kinds (of all if none is given) where they are most, and each."""
    assert run.program is not None
    # Of a machine whose allocator gives what it is asked for.
    memory = resolve(run.program, "chalk").of_step(1).memory[0]
    parts = [
        {kind: sizes[i] for kind, sizes in memory.kinds if not kinds or kind in kinds}
        for i in range(len(memory.steps))
    ]
    most = max(parts, key=lambda part: sum(part.values()))
    return sum(most.values()), most


# A quarter of a block, five blocks.
@pytest.mark.parametrize("vocab_size", [192, 4000])
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_peak_of_a_gpt_is_below_that_of_fsdp2(
    world_size: int, vocab_size: int
) -> None:
    ours, fsdp2 = (
        peak_of(ol.run(train, how, vocab_size, world_size=world_size))
        for how in ("Zero3", "FSDP2")
    )
    print(f"{world_size} ranks, vocabulary {vocab_size}:", ours, fsdp2, sep="\n  ")
    assert ours[0] < fsdp2[0]


@pytest.mark.parametrize(
    ("vocab_size", "settings"),
    [(99, {}), (192, {}), *((4000, each) for each in SETTINGS)],
    ids=str,
)
def test_the_summary_is_the_peak_of_a_run(
    vocab_size: int, settings: dict[str, Any]
) -> None:
    found = peak_of(
        ol.run(train, "Zero3", vocab_size, world_size=3, **settings), *KINDS
    )
    expected = plan_memory(gpt(vocab_size).to("meta"), 3, **settings)
    assert found[0] == pytest.approx(expected.total_bytes, rel=0.01)


def test_a_step_allocates_gradients_and_no_weights() -> None:
    program = ol.run(steps, 1, 3).program
    *_, first = (op.index for op in program.ranks[0] if op.name == "randn")
    matrix = 512 * 512 * 4
    born = [
        life.bytes
        for life in program.storages
        if life.rank == 0 and life.born >= first and life.bytes in (matrix, matrix // 2)
    ]
    # Full ones, and this rank's half of each behind the next one.
    assert sorted(born) == [matrix // 2] * NUM_LAYERS + [matrix] * NUM_LAYERS
