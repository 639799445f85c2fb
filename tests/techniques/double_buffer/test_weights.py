"""Two sets of weights: one serves, whole, while the other is updated, whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.models import TOY_NETS
from overlaplab.techniques.double_buffer import DoubleBufferedWeights

WIDTH = 8


class Net(nn.Module):
    """Tied weights, one frozen, running means, and a table that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.decode.weight = self.encode.weight
        self.decode.bias.requires_grad_(False)
        self.register_buffer("table", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.decode(self.norm(self.encode(x)))
        return found


def filled(value: float, net: nn.Module | None = None) -> nn.Module:
    """A net whose whole state is `value`."""
    net = Net() if net is None else net
    for tensor in net.state_dict().values():
        tensor.fill_(value)
    return net


def values(net: nn.Module) -> set[float]:
    return {float(x) for t in net.state_dict().values() for x in t.flatten().float()}


def test_a_swap_gives_the_whole_state_of_the_source() -> None:
    weights = DoubleBufferedWeights(filled(1.0))
    weights.update_from(filled(2.0))
    assert values(weights.model) == {1.0}
    weights.swap()
    assert values(weights.model) == {2.0}


def test_a_swap_goes_by_reference_between_two_sets_of_memory() -> None:
    weights = DoubleBufferedWeights(filled(0.0))

    def places() -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in weights.model.state_dict().values())

    seen = [places()]
    for number in range(1, 5):
        weights.update_from(filled(float(number)))
        weights.swap()
        seen.append(places())
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3]
    assert not set(seen[0]) & set(seen[1])


def test_what_the_model_is_made_of_stays() -> None:
    net = Net()
    weights = DoubleBufferedWeights(net)
    calls: list[str] = []
    net.encode.weight.register_hook(lambda _: calls.append("tensor"))
    net.encode.register_forward_hook(lambda *_: calls.append("module"))

    def parts() -> list[tuple[str, int, bool]]:
        return [(n, id(p), p.requires_grad) for n, p in net.named_parameters()]

    before = parts()
    table = net.table.data_ptr()
    for value in (1.0, 2.0):
        weights.update_from(filled(value))
        weights.swap()
    assert parts() == before
    assert net.decode.weight is net.encode.weight
    assert net.table.data_ptr() == table and not net.table.any()
    net(torch.randn(4, WIDTH)).sum().backward()
    assert calls == ["module", "tensor"]


def test_tensors_that_share_memory_share_it_in_the_second_set() -> None:
    net = nn.Linear(4, 4)
    flat = torch.arange(20.0)
    net.weight.data, net.bias.data = flat[:16].view(4, 4).t(), flat[16:]
    weights = DoubleBufferedWeights(net)
    assert weights.extra_bytes == 80
    weights.update_from(nn.Linear(4, 4))
    weights.swap()
    assert net.weight.untyped_storage().data_ptr() == (
        net.bias.untyped_storage().data_ptr()
    )
    assert net.weight.stride() == (1, 4)


@pytest.mark.parametrize("name", TOY_NETS)
def test_every_kind_of_net_serves_what_its_source_has(name: str) -> None:
    net = TOY_NETS[name]
    source = net.make_model()
    weights = DoubleBufferedWeights(copy.deepcopy(source))
    for _ in range(2):
        weights.wait()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(torch.randn_like(parameter))
        weights.update_from(source)
        weights.swap()
        for mine, its in zip(
            weights.model.state_dict().values(),
            source.state_dict().values(),
            strict=True,
        ):
            assert torch.equal(mine, its) and mine.stride() == its.stride()
    batch = net.make_batch(0, 0)
    assert torch.equal(weights.model(batch), source(batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_an_update_converts(dtype: torch.dtype) -> None:
    source = Net()
    weights = DoubleBufferedWeights(copy.deepcopy(source).to(dtype))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter))
    weights.update_from(source)
    weights.swap()
    for name, got in weights.model.state_dict().items():
        want = source.state_dict()[name]
        assert torch.equal(got, want.to(got.dtype))
        assert got.dtype is (dtype if want.is_floating_point() else torch.int64)


def test_a_state_dict_is_a_source_and_one_name_of_what_is_tied_is_enough() -> None:
    weights = DoubleBufferedWeights(filled(1.0))
    state = filled(2.0).state_dict()
    del state["decode.weight"]
    weights.update_from(state)
    weights.swap()
    assert values(weights.model) == {2.0}


def test_a_second_update_before_a_swap_replaces_the_first() -> None:
    weights = DoubleBufferedWeights(filled(1.0))
    for value in (2.0, 3.0):
        weights.update_from(filled(value))
    weights.swap()
    assert values(weights.model) == {3.0}


ACTIONS = st.lists(st.sampled_from(["update", "swap", "fail", "write early"]))


@settings(max_examples=50, deadline=None)
@given(ACTIONS)
def test_the_front_is_always_one_whole_update(actions: list[str]) -> None:
    weights = DoubleBufferedWeights(filled(0.0))
    served, ready = 0.0, None
    for number, action in enumerate(actions, start=1):
        source = filled(float(number))
        if action == "update":
            weights.update_from(source)
            ready = float(number)
        elif action == "fail":
            fails_in_the_middle(weights, source)
            ready = None
        elif action == "write early":
            weights.update_from(source)
            filled(-1.0, source)
            with pytest.raises(RuntimeError, match="was written before wait"):
                weights.swap()
            ready = None
        elif ready is None:
            with pytest.raises(RuntimeError, match="without a complete update"):
                weights.swap()
        else:
            weights.swap()
            served, ready = ready, None
        assert weights.is_updated is (ready is not None)
        assert values(weights.model) == {served}


def fails_in_the_middle(weights: DoubleBufferedWeights, source: nn.Module) -> None:
    """Copies the first tensor, then memory runs out."""
    real = torch._foreach_copy_

    def copies_one(into: list[Tensor], tensors: list[Tensor], **kw: Any) -> None:
        if into is weights._back:
            real(into[:1], tensors[:1], **kw)
            raise MemoryError
        real(into, tensors, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", copies_one)
        with pytest.raises(MemoryError):
            weights.update_from(source)


def test_the_source_may_be_written_after_wait() -> None:
    weights, source = DoubleBufferedWeights(filled(1.0)), filled(2.0)
    weights.update_from(source)
    weights.wait()
    filled(-1.0, source)
    weights.swap()
    assert values(weights.model) == {2.0}


def test_running_means_of_the_source_may_be_written_at_once() -> None:
    weights, source = DoubleBufferedWeights(filled(1.0)), filled(2.0)
    weights.update_from(source)
    source(torch.randn(4, WIDTH))  # in training
    weights.swap()
    assert values(weights.model) == {2.0}


def test_a_source_that_is_written_before_wait_is_refused_and_so_is_its_swap() -> None:
    weights, source = DoubleBufferedWeights(filled(1.0)), filled(2.0)
    weights.update_from(source)
    torch.optim.SGD(source.parameters(), 0.1, weight_decay=0.1).zero_grad()
    with torch.no_grad():
        source.encode.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"before optimizer\.step\(\)"):
        weights.wait()
    with pytest.raises(RuntimeError, match="without a complete update"):
        weights.swap()


def test_a_backward_whose_forward_was_before_a_swap_is_refused() -> None:
    weights = DoubleBufferedWeights(Net())
    loss = weights.model(torch.randn(4, WIDTH)).sum()
    weights.update_from(Net())
    weights.swap()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def state(**changes: Tensor | None) -> dict[str, Tensor]:
    found = dict(filled(2.0).state_dict())
    for name, tensor in changes.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    return found


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (lambda: state(decode__bias=None), "has no decode.bias.*drift apart"),
        (lambda: state(strange=torch.ones(1)), "has strange, which the serving module"),
        (lambda: state(encode__bias=torch.ones(3)), r"encode.bias.*\(3,\).*\(8,\)"),
        (
            lambda: state(encode__bias=torch.ones(WIDTH, dtype=torch.complex64)),
            "complex64, which cannot become torch.float32",
        ),
        (
            lambda: state(decode__weight=torch.ones(WIDTH, WIDTH)),
            "decode.weight is tied.*two tensors",
        ),
        (lambda: state(encode__bias=torch.ones(WIDTH, device="meta")), "on meta"),
        (lambda: state(encode__bias=torch.eye(WIDTH).to_sparse()), "shape"),
        (lambda: {**state(), "encode.bias": 3}, "encode.bias of the source is 3"),
    ],
)
def test_a_source_that_does_not_fit_changes_nothing(
    source: Callable[[], Any], says: str
) -> None:
    weights = DoubleBufferedWeights(filled(1.0))
    weights.update_from(filled(5.0))
    with pytest.raises(ValueError, match=says):
        weights.update_from(source())
    assert values(weights.model) == {1.0}
    weights.swap()  # the update before is whole
    assert values(weights.model) == {5.0}


def test_the_serving_module_is_no_source_of_its_own() -> None:
    """Errata 28: two sets that each get every other update are two models."""
    weights = DoubleBufferedWeights(Net())
    with pytest.raises(ValueError, match="every other update"):
        weights.update_from(weights.model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda net: net.encode.double(), "encode.weight has left the memory"),
        (
            lambda net: setattr(net, "encode", nn.Linear(WIDTH, WIDTH)),
            "encode.weight was replaced",
        ),
        (
            lambda net: net.register_buffer("more", torch.ones(1)),
            "more was replaced, added",
        ),
    ],
)
@pytest.mark.parametrize("call", ["update_from", "swap"])
def test_a_module_that_has_changed_is_refused(
    change: Callable[[nn.Module], Any], says: str, call: str
) -> None:
    weights = DoubleBufferedWeights(Net())
    weights.update_from(Net())
    change(weights.model)
    with pytest.raises(RuntimeError, match=f"{call}.*: {says}.*anew"):
        weights.swap() if call == "swap" else weights.update_from(Net())


def test_what_cannot_serve_is_refused() -> None:
    with pytest.raises(TypeError, match="model is a dict"):
        DoubleBufferedWeights({})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Tanh has no parameter and no buffer"):
        DoubleBufferedWeights(nn.Tanh())
    with pytest.raises(ValueError, match="weight is a UninitializedParameter"):
        DoubleBufferedWeights(nn.LazyLinear(3))


def test_what_cannot_be_written_later_cannot_serve() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("table", torch.zeros(1).expand(4))
    with pytest.raises(ValueError, match=r"table is expanded; its clone\(\)"):
        DoubleBufferedWeights(net)
    with torch.inference_mode():
        net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="weight was made in inference mode"):
        DoubleBufferedWeights(net)


def test_who_serves_may_be_in_inference_mode() -> None:
    net = Net()
    with torch.inference_mode():
        weights = DoubleBufferedWeights(net)
        weights.update_from(filled(2.0))
        weights.swap()
    assert values(net) == {2.0}
    for value in (3.0, 4.0):
        weights.update_from(filled(value))
        weights.swap()
        assert values(net) == {value}


@pytest.mark.parametrize("source", [None, 5, [torch.ones(1)]])
def test_what_has_no_names_is_no_source(source: Any) -> None:
    with pytest.raises(TypeError, match="expected a module or a state dict"):
        DoubleBufferedWeights(Net()).update_from(source)


def test_what_it_costs_is_printed() -> None:
    weights = DoubleBufferedWeights(nn.Linear(256, 256, bias=False))
    assert weights.extra_bytes == 256 * 1024
    assert re.search("256.0 KiB for a second set, not updated", repr(weights))


LARGE = 512


def serve_under_an_update() -> tuple[Tensor, Tensor]:
    source = nn.Sequential(*(nn.Linear(LARGE, LARGE) for _ in range(4)))
    weights = DoubleBufferedWeights(copy.deepcopy(source).bfloat16())
    x = torch.ones(LARGE, LARGE, dtype=torch.bfloat16)
    for _ in range(3):
        weights.wait()
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(1.5)
        weights.update_from(source)
        with ol.annotate("serve"), torch.no_grad():
            found = weights.model(x)
        with ol.annotate("swap"):
            weights.swap()
    return found, weights.model[0].bias - source[0].bias.bfloat16()


def dropped_under_its_update() -> Tensor:
    source = nn.Linear(LARGE, LARGE)
    weights = DoubleBufferedWeights(nn.Linear(LARGE, LARGE))
    weights.update_from(source)
    del weights, source
    return torch.ones(LARGE, LARGE) + torch.ones(LARGE, LARGE)


def test_memory_that_is_dropped_under_a_copy_is_not_handed_out_before_its_end() -> None:
    run = ol.run(dropped_under_its_update, world_size=1, hardware="chalk")
    assert run.warnings == ()


def test_a_forward_runs_beside_the_copy_and_a_swap_moves_nothing() -> None:
    run = ol.run(serve_under_an_update, world_size=1, hardware="chalk")
    assert run.warnings == ()
    assert not run.values[0][1].any()
    spans = [s for s in run.timeline.spans if s.kind != "launch"]
    labels = [str(s.attributes.get("label")) for s in spans]
    copies = [s for s, label in zip(spans, labels, strict=True) if "update of" in label]
    served = [s for s, label in zip(spans, labels, strict=True) if label == "serve"]
    assert "swap" not in labels
    assert len(copies) == 3
    for number, copied in enumerate(copies):
        beside = served[number * len(served) // 3 : (number + 1) * len(served) // 3]
        assert min(s.start_ns for s in beside) < copied.end_ns
        assert copied.start_ns < max(s.end_ns for s in beside)
    assert streams.device().type == "cpu"
