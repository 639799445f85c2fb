"""Each toy net has the trap that it claims to have."""

from __future__ import annotations

import pytest
import torch

from overlaplab.models import TOY_NETS
from overlaplab.models.toy_nets import BATCH


def missing(name: str, rank: int) -> set[str]:
    """Parameters without a gradient after one backward."""
    net = TOY_NETS[name]
    model = net.make_model()
    model(net.make_batch(rank, 0)).backward()
    return {
        n for n, p in model.named_parameters() if p.grad is None and p.requires_grad
    }


@pytest.mark.parametrize("name", TOY_NETS)
def test_the_mean_over_equal_batches_is_the_loss_of_their_concatenation(
    name: str,
) -> None:
    net = TOY_NETS[name]
    torch.manual_seed(0)
    model = net.make_model()
    batches = [net.make_batch(rank, 0) for rank in range(3)]
    assert all(len(batch) == BATCH for batch in batches)
    mean = torch.stack([model(batch) for batch in batches]).mean()
    tolerance = 2e-2 if name == "mixed_dtypes" else 1e-6
    torch.testing.assert_close(
        model(torch.cat(batches)), mean, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", TOY_NETS)
def test_ranks_and_steps_draw_different_batches(name: str) -> None:
    draw = TOY_NETS[name].make_batch
    assert torch.equal(draw(1, 2), draw(1, 2))
    assert not torch.equal(draw(0, 0), draw(1, 0))
    assert not torch.equal(draw(0, 0), draw(0, 1))


def test_unused_layers_get_no_gradient_on_any_rank() -> None:
    assert missing("unused", 0) == missing("unused", 1) == {"b.weight", "b.bias"}


def test_ranks_miss_different_experts() -> None:
    assert missing("uneven", 0) == {"experts.1.weight", "experts.1.bias"}
    assert missing("uneven", 1) == {"experts.0.weight", "experts.0.bias"}


def test_a_convolution_keeps_channels_last() -> None:
    weight = TOY_NETS["channels_last"].make_model().wide.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
