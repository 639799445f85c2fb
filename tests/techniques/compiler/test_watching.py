"""What reaches `.grad` is an average over the ranks, or it is refused."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.program import peak_bytes
from overlaplab.techniques.compiler import NotAveragedError, watch, watching
from tests.ranks import values_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using `torch.compile:UserWarning", "ignore:Dynamo does not:UserWarning"
)
each_cluster = pytest.mark.parametrize("cluster", ["virtual", "gloo"])


class Net(nn.Module):
    """Three layers of one width and their loss, of batches that differ by rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


class BreaksInALoop(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            torch._dynamo.graph_break()
        return x.square().mean()


class Block(nn.Module):
    """Dynamo compiles it alone where it skipped what calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class HalfCompiled(Net):
    """The loop is skipped, its blocks are not; the head is one of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return self.head(x).square().mean()


class PartlyDisabled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        x = _disabled(self.layers[1], x)
        return self.layers[2](x).square().mean()


class TiedToTheDisabled(PartlyDisabled):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight
        self.layers[1].bias = self.layers[0].bias


class SwitchedOff(Net):
    """Dynamo will not compile this code again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).square().mean()


@torch.compiler.disable
def _disabled(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, 8, generator=generator).to(ol.device())


def compiled(model: nn.Module, **kwargs: Any) -> Any:
    made = ol.compiler.backend(bucket_mib=0.0003, hardware="chalk")
    return torch.compile(model, backend=made, **kwargs)


def refused(step: Callable[[], Any]) -> str:
    with pytest.raises(NotAveragedError) as failure:
        step()
    return str(failure.value)


# -- what is not averaged is refused


def a_skipped_frame() -> str:
    model = watch(BreaksInALoop())
    text = refused(lambda: compiled(model)(batch()).backward())
    assert all(p.grad is None for p in model.layers[2].parameters())
    return text


def what_a_skipped_frame_calls() -> str:
    model = watch(HalfCompiled())
    return refused(lambda: compiled(model)(batch()).backward())


def a_disabled_part() -> str:
    model = watch(PartlyDisabled())
    return refused(lambda: compiled(model)(batch()).backward())


def dynamo_switched_off() -> str:
    config = importlib.import_module("torch._dynamo.config")  # else it is pickled
    model = watch(SwitchedOff())
    with config.patch(disable=True):
        return refused(lambda: compiled(model)(batch()).backward())


def the_original_called() -> str:
    model = watch(Net())
    run = compiled(model)
    run(batch()).backward()
    return refused(lambda: model(batch()).backward())


def a_weight_tied_to_a_disabled_part() -> str:
    model = watch(TiedToTheDisabled())
    return refused(lambda: compiled(model)(batch()).backward())


def a_penalty_outside() -> str:
    model = watch(Net())
    run = compiled(model)

    def step() -> None:
        (run(batch()) + model.layers[1].bias.square().sum()).backward()

    return refused(step)


def unfrozen_later() -> str:
    model = Net()
    model.layers[0].requires_grad_(False)
    watch(model)
    assert not any(p.requires_grad for p in model.layers[0].parameters())
    run = compiled(model)
    run(batch()).backward()
    model.layers[0].requires_grad_(True)
    return refused(lambda: model.layers[0](batch()).sum().backward())


def after_one_that_reached_an_input_alone() -> str:
    """What it had for all others is neither theirs in the next one nor held."""
    model = watch(Net())
    run = compiled(model)
    first = model.layers[0].weight
    (run(batch()) + run(batch())).backward(inputs=[first])
    run(batch()).backward(inputs=[first])
    assert all(watching._watch_of(p).given is None for p in model.parameters())
    (run(batch()) + run(batch())).backward(inputs=[first])
    return refused(lambda: model(batch()).backward())


@each_cluster
@pytest.mark.parametrize(
    ("step", "what"),
    [
        (a_skipped_frame, r"the gradient of layers\.2\.(weight|bias)"),
        (what_a_skipped_frame_calls, r"the gradient of head\.(weight|bias)"),
        (a_disabled_part, r"the gradient of layers\.1\.(weight|bias)"),
        (dynamo_switched_off, r"the gradient of layers\.0\.(weight|bias)"),
        (the_original_called, r"the gradient of layers\.2\.(weight|bias)"),
        (
            a_weight_tied_to_a_disabled_part,
            r"a part of the gradient of layers\.0\.(weight|bias)",
        ),
        (a_penalty_outside, r"a part of the gradient of layers\.1\.bias"),
        (unfrozen_later, r"the gradient of layers\.0\.(weight|bias)"),
        (
            after_one_that_reached_an_input_alone,
            r"the gradient of layers\.2\.(weight|bias)",
        ),
    ],
)
def test_every_rank_is_told_which_gradient_is_its_own(
    step: Callable[[], str], what: str, cluster: str
) -> None:
    for text in values_of(step, cluster=cluster):
        assert re.match(what + " is this rank's own and no average", text)
        assert "TORCH_LOGS=graph_breaks" in text and "fullgraph=True" in text
        assert "ol.BucketedReducer(model)" in text


# -- what is averaged is not


class BreaksBetweenTied(Net):
    """Two compiled graphs; the weights of the first are used in the other, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x).tanh()
        torch._dynamo.graph_break()
        x = self.layers[1](x).tanh()
        return self.layers[2](x).square().mean()


def gradients(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def of_two_backwards(model: nn.Module, run: Any) -> list[Any]:
    run(batch()).backward()
    run(batch(1)).backward()
    return gradients(model)


def of_two_calls(model: nn.Module, run: Any) -> list[Any]:
    (run(batch()) + run(batch(1))).backward()
    return gradients(model)


def of_a_frozen_layer(model: nn.Module, run: Any) -> list[Any]:
    """It stays so: torch 2.11 goes on with what it compiled if it trains again."""
    model.layers[1].requires_grad_(False)
    return of_two_backwards(model, run)


def of_any_size(model: nn.Module, run: Any) -> list[Any]:
    """The second is compiled as a number: one more input, and no tensor."""
    for rows in (4, 3, 2):
        run(batch()[:rows]).backward()
    return gradients(model)


def of_two_models(model: nn.Module, run: Any) -> list[Any]:
    """The other one shares a layer with the first, and runs in the same backward."""
    other = type(model)()
    other.layers[1] = model.layers[1]
    other_run = compiled(watch(other) if watching._watch_of(_any(model)) else other)
    (run(batch()) + other_run(batch(1))).backward()
    return gradients(model) + gradients(other)


def of_one_input(model: nn.Module, run: Any) -> list[Any]:
    """What else is computed reaches nobody; the next backward is as ever."""
    run(batch()).backward(inputs=[_any(model)])
    torch.autograd.grad(run(batch()), [_any(model)])
    return gradients(model) + of_two_backwards(model, run)


def returned(model: nn.Module, run: Any) -> list[Any]:
    """Who asks for gradients may do so without the compiler."""
    found = torch.autograd.grad(model(batch()), list(model.parameters()))
    return [*found, *of_two_backwards(model, run)]


def clamped(model: nn.Module, run: Any) -> list[Any]:
    return of_two_backwards(model, run)


def _any(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


def both(kind: type[Net], what: Callable[[nn.Module, Any], list[Any]]) -> Any:
    """What an unwatched model finds, and a watched one, and what each compiled."""
    made = ol.compiler.backend(bucket_mib=0.0003, hardware="chalk")
    found = []
    for is_watched in (False, True):
        model = kind()
        if what is clamped:
            _any(model).register_hook(lambda gradient: gradient.clamp(max=0))
        if is_watched:
            assert watch(watch(model)) is model
        found.append(what(model, torch.compile(model, backend=made)))
        found.append(made.explain())
    return found


@each_cluster
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((Net, of) for of in (of_two_backwards, of_two_calls, of_a_frozen_layer)),
        *((Net, of) for of in (of_two_models, of_one_input, returned, clamped)),
        (Net, of_any_size),
        (BreaksBetweenTied, of_two_backwards),
        (BreaksBetweenTied, of_two_calls),
    ],
)
def test_a_watched_model_finds_what_an_unwatched_one_does(
    kind: type[Net], what: Callable[[nn.Module, Any], list[Any]], cluster: str
) -> None:
    for plain, once, watched, twice in values_of(both, kind, what, cluster=cluster):
        assert once == twice  # nothing was compiled again
        assert any(gradient is not None for gradient in plain)
        for one, other in zip(plain, watched, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def step(is_watched: bool) -> int:
    made = ol.compiler.backend(bucket_mib=0.0003, hardware="chalk", max_states=999)
    model = watch(Net()) if is_watched else Net()
    run = torch.compile(model, backend=made)
    for _ in range(2):
        model.zero_grad()
        run(batch()).backward()
    return len(made.compilations)


def test_watching_takes_no_time_no_memory_and_no_compile() -> None:
    ol.run(step, False, world_size=2)  # compiles
    plain, watched = (ol.run(step, w, world_size=2) for w in (False, True))

    assert watched.values == plain.values == (1, 1)
    assert watched.timeline.spans == plain.timeline.spans
    assert watched.program is not None and plain.program is not None
    assert peak_bytes(watched.program) == peak_bytes(plain.program)
    assert watched.warnings == ()


def calls_in_a_backward(is_watched: bool) -> int:
    """Of Python functions of the file, after the first backward."""
    watching._Watch.exist = False
    model = watch(Net()) if is_watched else Net()
    run = compiled(model)
    run(batch()).backward()
    loss, found = run(batch()), []

    def noting(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == watching.__file__:
            found.append(frame.f_code.co_name)

    sys.setprofile(noting)
    loss.backward()
    sys.setprofile(None)
    return len(found)


@pytest.mark.parametrize(
    ("is_watched", "num_expected"), [(True, 3 * 6 + 2), (False, 1)]
)
def test_a_backward_calls_three_functions_a_watched_parameter(
    is_watched: bool, num_expected: int
) -> None:
    for num_calls in values_of(calls_in_a_backward, is_watched, cluster="gloo"):
        assert num_calls == num_expected


def test_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model is 1; expected a torch\.nn\.Module"):
        watch(1)  # type: ignore[type-var]
