"""What a virtual run lends to operators is gone when it has ended."""

import pytest
import torch
import torch.nn.functional as F

import overlaplab as ol

X = torch.linspace(-1, 1, 32).view(4, 8)


def _dropped(x, weight):
    return F.dropout(F.gelu(x @ weight), 0.25, False)


def _normed(x, weight):
    return F.rms_norm(x @ weight, (8,))


def _attended(x, weight):
    q = (x @ weight).view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(q, q, q)


def _gradient(function):
    torch._dynamo.reset()
    weight = torch.linspace(0, 1, 64).view(8, 8).requires_grad_()
    compiled = torch.compile(function, backend="aot_eager")
    compiled(X, weight).square().sum().backward()
    return weight.grad


@pytest.mark.parametrize("function", [_dropped, _normed, _attended])
def test_what_is_compiled_after_a_run_has_its_backward(function):
    weight = torch.linspace(0, 1, 64).view(8, 8).requires_grad_()
    function(X, weight).square().sum().backward()
    ol.run(_gradient, function, world_size=1, hardware="chalk")
    found = _gradient(function)
    assert found is not None
    torch.testing.assert_close(found, weight.grad)


def test_a_run_launches_as_cuda_what_was_traced_before():
    def attend(x):
        q = x.view(1, 1, 4, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    def train(x):
        torch._dynamo.reset()
        return torch.compile(attend, backend="aot_eager")(x)

    x = X.clone().requires_grad_()
    train(x).sum().backward()
    program = ol.run(train, x.detach().requires_grad_(), world_size=1).program
    names = [getattr(op, "name", "") for op in program.ranks[0]]
    assert names == ["_scaled_dot_product_efficient_attention"]
