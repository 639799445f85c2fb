"""Models from the meta device get their values unit by unit, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.program import peak_bytes
from overlaplab.techniques.zero import Zero3
from tests.guards import GUARD_S
from tests.techniques.zero import saving

WIDTH, NUM_BLOCKS = 32, 16


class Tied(nn.Module):
    """Blocks with buffers between tied ends, one of them with a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(NUM_BLOCKS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks[3][0].bias.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()


def build(device: str, seeds: str) -> tuple[Tied, Zero3]:
    torch.manual_seed(1 + (dist.get_rank() if seeds == "differ" else 0))
    with torch.device(device) if device == "meta" else torch.device(ol.device()):
        model = Tied()
    return model, Zero3(model)


def train(device: str, seeds: str = "differ") -> tuple[Any, Any]:
    """Full values after construction, and after two steps."""
    model, zero = build(device, seeds)
    first = zero.full_state_dict()
    optimizer = torch.optim.AdamW(zero.shards())
    for _ in range(2):
        model(torch.arange(8)).backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return first, zero.full_state_dict()


def only_build(device: str) -> int:
    """The bytes of the full model."""
    model, _zero = build(device, "differ")
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize(("cluster", "size"), [("virtual", 3), ("gloo", 2)])
def test_it_is_the_model_that_rank_0_would_have_built(cluster: str, size: int) -> None:
    deferred, usual = (
        ol.run(train, device, cluster=cluster, world_size=size, timeout_s=GUARD_S)
        for device in ("meta", "cpu")
    )
    assert deferred.warnings == ()
    for states in deferred.values:
        for found, expected in zip(states, usual.values[0], strict=True):
            assert list(found) == list(expected)
            for name, want in expected.items():
                assert torch.equal(found[name], want), name


def test_no_rank_ever_holds_the_full_model() -> None:
    deferred, usual = (
        ol.run(only_build, device, world_size=8) for device in ("meta", "cpu")
    )
    full_bytes = usual.values[0]
    assert peak_bytes(usual.program) > full_bytes
    for rank in range(8):
        # A shard and its gradient are an eighth each. A unit is a sixteenth: there are
        # two slots, and a unit is there twice while it is sharded.
        assert peak_bytes(deferred.program, rank) < 0.75 * full_bytes


def fill(module: nn.Module) -> None:
    for index, tensor in enumerate(module.parameters(recurse=False)):
        tensor.fill_(index + 1 + dist.get_rank())


def build_with_init() -> list[float]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    model.gain = nn.Parameter(torch.full((2,), 7.0 + dist.get_rank()))
    state = Zero3(model, init=fill).full_state_dict()
    return [tensor.flatten()[0].item() for tensor in state.values()]


def test_init_gives_the_values_and_those_of_rank_0_count() -> None:
    for found in ol.run(build_with_init).values:
        assert found == [7.0, 1.0, 2.0, 1.0, 2.0]


def nothing(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.fill_(torch.nan)


def load_into_meta(folder: Path) -> Any:
    with torch.device("meta"):
        model = saving.Net()
    model.told = {"note": "none", "count": torch.zeros(2)}  # no tensor of the model
    zero = Zero3(model, init=nothing)
    optimizer = saving.make_optimizer("AdamW", zero.shards())
    zero.load_checkpoint(folder, optimizer)
    loaded = zero.full_state_dict()
    steps = range(saving.NUM_STEPS, 2 * saving.NUM_STEPS)
    saving.train(model, zero, optimizer, steps)
    return loaded, zero.full_state_dict()


def test_a_checkpoint_gives_all_values_to_a_model_from_meta(tmp_path: Path) -> None:
    expected = ol.run(saving.start_and_save, tmp_path / "saved").values[0]
    for states in ol.run(load_into_meta, tmp_path / "saved").values:
        for found, want in zip(states, expected, strict=True):
            tensors = [name for name in want if isinstance(want[name], Tensor)]
            assert all(torch.equal(found[name], want[name]) for name in tensors)


def build_what_cannot_be() -> None:
    with torch.device("meta"):
        Zero3(saving.Net())


def test_a_module_that_nothing_initialises_is_named() -> None:
    with pytest.raises(ol.RankError) as caught:
        ol.run(build_what_cannot_be)
    assert "module (the model), a Net, has frozen on the meta device" in str(
        caught.value
    )
    assert "Zero3 an init=" in str(caught.value)
