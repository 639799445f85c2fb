"""The transformer: sizes, causality, ties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlaplab.bench.workload import MODELS
from overlaplab.models import LLAMA_70B, Transformer, TransformerConfig
from overlaplab.models.transformer import Block

SMALL = TransformerConfig(num_layers=2, d_model=32, num_heads=4, vocab_size=50)
SHARED = replace(SMALL, num_kv_heads=2, d_mlp=48, gated=True)


def test_the_benchmarks_gpt_has_738_million_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(MODELS["gpt-738m"])
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 738.5


def test_llama_70b_has_70_billion_parameters() -> None:
    with torch.device("meta"):
        model = Transformer(LLAMA_70B)
    # Meta states 70.6; it has no biases.
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == 70.6


def test_shared_heads_attend_as_repeated_ones_would() -> None:
    torch.manual_seed(0)
    shared, full = Block(SHARED), Block(replace(SHARED, num_kv_heads=None))
    weights = {name: value.clone() for name, value in shared.state_dict().items()}
    for name in ("qkv.weight", "qkv.bias"):
        heads = weights[name].view(8, 8, -1)
        query, key, value = heads.split([4, 2, 2])
        heads = torch.cat([query, *(x.repeat_interleave(2, 0) for x in (key, value))])
        weights[name] = heads.reshape(full.state_dict()[name].shape)
    full.load_state_dict(weights)
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(shared(x), full(x))


@pytest.mark.parametrize("config", [SMALL, SHARED])
def test_a_token_does_not_see_those_after_it(config: TransformerConfig) -> None:
    torch.manual_seed(0)
    model = Transformer(config)
    tokens = torch.randint(50, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-6)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


def test_the_order_of_tokens_matters() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    tokens = torch.tensor([[1, 2, 3], [2, 1, 3]])
    first, second = model(tokens)[:, -1]
    assert not torch.allclose(first, second, atol=1e-4)


def test_a_tied_head_is_the_embedding() -> None:
    untied = sum(p.numel() for p in Transformer(SMALL).parameters())
    config = TransformerConfig(
        num_layers=2, d_model=32, num_heads=4, vocab_size=50, tied=True
    )
    model = Transformer(config)
    assert model.head.weight is model.embedding.weight
    assert untied - sum(p.numel() for p in model.parameters()) == 50 * 32


def test_a_step_lowers_the_loss_from_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    text = torch.randint(50, (4, 17))
    tokens, targets = text[:, :-1], text[:, 1:]
    losses = []
    for _ in range(5):
        loss = model(tokens, targets)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(50.0).log().item(), rel=0.05)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_heads", 5, "multiple of num_heads"),
        ("num_layers", 0, "num_layers is 0"),
        ("num_kv_heads", 3, r"num_heads \(4\) must be a multiple of num_kv_heads \(3"),
        ("d_mlp", -1, "d_mlp is -1"),
    ],
)
def test_impossible_sizes_are_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{field: value})
