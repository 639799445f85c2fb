"""Small models and steps on which learners' reducers run, with their oracle.

Each rank has data and an initial seed of its own, so that a missing broadcast shows.
A fixture trains by the learner's reducer and by nothing else of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.grading import origins, stage
from overlaplab.grading.evidence import Evidence
from overlaplab.grading.orders import disagree
from overlaplab.grading.reading import collect_evidence, watch
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.models.toy_nets import TOY_NETS
from overlaplab.program import resolve

LEARNING_RATE = 0.1

# `chalk` in slow motion, so that small nets with real values take milliseconds: 1 FLOP
# or byte of memory takes 1 ns; two ranks all-reduce n bytes in 0.1 ms + 25 n ns.
SLOW_CHALK: Hardware = replace(
    find_hardware("chalk"),
    name="chalk in slow motion",
    flops_per_s={"default": 10**9},
    memory_bytes_per_s=10**9,
    link=Link(latency_ns=100_000, bytes_per_s=40 * 10**6, source="round numbers"),
    source="no machine: round numbers for small nets",
)


class Reducer(Protocol):
    """What a learner's reducer must offer."""

    def wait(self) -> None: ...


MakeReducer = Callable[[torch.nn.Module], Reducer]


class Optimizer(Protocol):
    """What an optimizer of a learner's own must offer; the model's gradients are zeroed
    for it."""

    def step(self) -> Any: ...


# What `make_reducer` returned comes second: a sharded model's pieces are there.
MakeOptimizer = Callable[[torch.nn.Module, Reducer], Optimizer]


def make_sgd(model: torch.nn.Module, _: object = None) -> torch.optim.Optimizer:
    """Plain SGD over what trains."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=LEARNING_RATE)


def model_is_loss(model: torch.nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """The loss where the model's forward computes it."""
    loss: torch.Tensor = model(*batch)
    return loss


@dataclass(frozen=True, slots=True)
class Fixture:
    """A model, its data and how it is trained.

    Args:
        name: "tied", "frozen", ...
        make_model: builds it from torch's random state; copied per rank.
        make_batch: (rank, step) -> tensors of that rank's batch, step from 1; all ranks
            have batches of one size.
        loss: (model, *batch) -> scalar, a mean over the batch.
        same_seed: ranks build the same weights (else rank 0's must be broadcast).
        set_to_none: as in `zero_grad`.
    """

    name: str
    make_model: Callable[[], torch.nn.Module]
    make_batch: Callable[[int, int], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor] = model_is_loss
    same_seed: bool = False
    set_to_none: bool = True

    def build(self, rank: int) -> torch.nn.Module:
        """The model as `rank` initialises it."""
        # torch.manual_seed reads the stack for each kind of device, also where none is.
        torch.default_generator.manual_seed(100 if self.same_seed else 100 + rank)
        return self.make_model()


Gradients = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out of `train`.

    Args:
        run: the `ol.Run`.
        gradients: `[i][rank][name]` at the optimizer's i-th step, None where there is
            none: after each `wait()`, and after each `flush()` that was asked for.
        parameters: `[rank][name]` after the last step.
        evidence: of the run.
    """

    run: Any
    gradients: tuple[tuple[Gradients, ...], ...]
    parameters: tuple[Mapping[str, torch.Tensor], ...]
    evidence: Evidence

    def on(self, hardware: Hardware) -> Evidence:
        """The evidence of the same program on another clock."""
        program = self.evidence.program
        return collect_evidence(program, resolve(program, hardware))


class _Layers(torch.nn.Module):
    """Linear layers without bias, from width to width."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b, bias=False) for a, b in pairwise(widths)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _samples(batch: int, width: int, rank: int, step: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(batch, width, generator=generator),)


def layers_fixture(name: str, widths: Sequence[int], *, batch: int = 32) -> Fixture:
    """Linear layers without bias from `widths[0]` to `widths[-1]`, random samples."""
    make = partial(_Layers, tuple(widths))
    return Fixture(name, make, partial(_samples, batch, widths[0]))


def clean_fixture(num_layers: int = 8, width: int = 64, batch: int = 32) -> Fixture:
    """Equal layers, time enough to hide every bucket but the last: for timing laws.

    Every gradient takes as long as the others. On `SLOW_CHALK` a layer's backward
    takes about 0.55 ms, its gradient of 16 KiB about 0.5 ms on the wire.
    """
    return layers_fixture("clean", [width] * (num_layers + 1), batch=batch)


def layer_buckets(num_layers: int = 8, *, layers_a_bucket: int = 2) -> list[list[str]]:
    """The buckets of `clean_fixture` in reverse order, as `prompt_law` takes them."""
    names = [f"layers.{i}.weight" for i in reversed(range(num_layers))]
    return [
        names[i : i + layers_a_bucket] for i in range(0, num_layers, layers_a_bucket)
    ]


@dataclass(frozen=True, slots=True)
class _ToyBatch:
    make: Callable[[int, int], torch.Tensor]

    def __call__(self, rank: int, step: int) -> tuple[torch.Tensor, ...]:
        return (self.make(rank, step),)


def toy_fixture(name: str, *, set_to_none: bool = True) -> Fixture:
    """The net `name` of `overlaplab.models.toy_nets.TOY_NETS` as a fixture."""
    net = TOY_NETS[name]
    return Fixture(
        name, net.make_model, _ToyBatch(net.make_batch), set_to_none=set_to_none
    )


ADVERSARIAL = (
    "tied",
    "frozen",
    "unused",
    "uneven",
    "zero_element",
    "over_size",
    "mixed_dtypes",
    "channels_last",
    "branches",
)


def adversarial_fixtures() -> tuple[Fixture, ...]:
    """A net for each trap of reducers, and one with gradients zeroed in place."""
    nets = tuple(toy_fixture(name) for name in ADVERSARIAL)
    in_place = replace(toy_fixture("mlp", set_to_none=False), name="zeroed_in_place")
    return (*nets, in_place)


def train(
    fixture: Fixture,
    make_reducer: MakeReducer,
    *,
    make_optimizer: MakeOptimizer = make_sgd,
    steps: int = 3,
    world_size: int = 2,
    hardware: Any = SLOW_CHALK,
    timeout_s: float = 30.0,
    flush_after: Collection[int] = (),
    apart: bool = False,
) -> Trained:
    """Train `steps` steps on the virtual cluster with the learner's reducer.

    `make_reducer(model)` is called once on each rank, after the harness's own hooks;
    then `make_optimizer(model, reducer)`. `wait()` after each backward pass, then the
    optimizer's `step()`.

    Args:
        flush_after: steps after which `reducer.flush()` is called and the optimizer
            steps once more if that says True; for gradients that come a step late.
        apart: a set has another order on each rank, see `overlaplab.grading.orders`.

    Raises:
        Whatever the learner's code raises, as a `RankError`, and what the cluster
        finds: `DeadlockError`, `MismatchError`.
    """
    run = stage.run(
        _train_rank,
        fixture,
        make_reducer,
        make_optimizer,
        steps,
        flush_after,
        apart,
        world_size=world_size,
        hardware=hardware,
        timeout_s=timeout_s,
    )
    run = origins.release(run)
    assert run.program is not None
    by_rank = [gradients for gradients, _ in run.values]
    return Trained(
        run=run,
        gradients=tuple(zip(*by_rank, strict=True)),
        parameters=tuple(parameters for _, parameters in run.values),
        evidence=collect_evidence(run.program, run.timeline),
    )


def _train_rank(
    fixture: Fixture,
    make_reducer: MakeReducer,
    make_optimizer: MakeOptimizer,
    steps: int,
    flush_after: Collection[int],
    apart: bool,
) -> origins.Held:
    rank = dist.get_rank()
    if apart:
        make_reducer = disagree(make_reducer)
    model = fixture.build(rank)
    watch(model)
    notes = [*origins.given(model)]
    reducer: Any = make_reducer(model)
    optimizer = make_optimizer(model, reducer)
    gradients: list[Gradients] = []

    def note_gradients() -> None:
        nonlocal notes
        _let_ranks_meet()
        notes += origins.returned([p.grad for p in model.parameters()])
        gradients.append(_copy_gradients(model))

    for step in range(1, steps + 1):
        with streams.step(step):
            model.zero_grad(set_to_none=fixture.set_to_none)
            batch = fixture.make_batch(rank, step)
            notes += origins.given(batch)
            fixture.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
            reducer.wait()
            note_gradients()
            optimizer.step()
            if step in flush_after:
                there_was_one = reducer.flush()
                note_gradients()
                if there_was_one:
                    optimizer.step()
    return origins.Held((gradients, _copy_parameters(model)), tuple(notes))


def _let_ranks_meet() -> None:
    """Let what the reducer waited for get its values before they are copied.

    On the virtual cluster a wait binds the stream, not the CPU: the ranks meet when the
    next operator is dispatched. The harness's copies bypass the dispatcher.
    """
    from overlaplab.cluster.virtual.recorder import current_recorder

    recorder = current_recorder()
    if recorder is not None:
        recorder.settle(recorder.current())


def oracle(
    fixture: Fixture,
    *,
    make_optimizer: Callable[[torch.nn.Module], Optimizer] = make_sgd,
    steps: int = 3,
    world_size: int = 2,
) -> tuple[tuple[Gradients, ...], Mapping[str, torch.Tensor]]:
    """One process on the concatenated batch: (gradients by step, final parameters)."""
    with torch.random.fork_rng(devices=[]):
        model = fixture.build(0)
        optimizer = make_optimizer(model)
        gradients = []
        for step in range(1, steps + 1):
            model.zero_grad(set_to_none=fixture.set_to_none)
            _backward_of_all(fixture, model, step, world_size)
            gradients.append(_copy_gradients(model))
            optimizer.step()
        return tuple(gradients), _copy_parameters(model)


def late_oracle(
    fixture: Fixture,
    *,
    make_optimizer: Callable[[torch.nn.Module], Optimizer] = make_sgd,
    steps: int = 3,
    world_size: int = 2,
    flush_after: Collection[int] = (),
) -> tuple[tuple[Gradients, ...], Mapping[str, torch.Tensor]]:
    """As `oracle`, with every gradient one step late.

    Step n computes the gradient of its batch at its own weights, and the optimizer
    steps with that of step n - 1, which was computed at the weights of step n - 1:
    w_{n+1} = opt(w_n, g_{n-1}(w_{n-1})). In the first step, and in the one after a
    flush, there is none: every `.grad` is None and the optimizer's own rule for that
    holds.

    Args:
        flush_after: steps after which the optimizer steps once more, with the gradient
            that is left. With `(steps,)` none is lost at the end.

    Returns:
        What every `.grad` is at each of the optimizer's steps, flushes included, and
        the final parameters.
    """
    with torch.random.fork_rng(devices=[]):
        model = fixture.build(0)
        optimizer = make_optimizer(model)
        nothing: Gradients = dict.fromkeys(n for n, _ in model.named_parameters())
        pending, gradients = nothing, []

        def update(late: Gradients) -> None:
            for name, parameter in model.named_parameters():
                gradient = late[name]
                parameter.grad = None if gradient is None else gradient.clone()
            gradients.append(late)
            optimizer.step()

        for step in range(1, steps + 1):
            model.zero_grad(set_to_none=fixture.set_to_none)
            _backward_of_all(fixture, model, step, world_size)
            pending, late = _copy_gradients(model), pending
            update(late)
            if step in flush_after:
                pending, late = nothing, pending
                update(late)
        return tuple(gradients), _copy_parameters(model)


def _backward_of_all(
    fixture: Fixture, model: torch.nn.Module, step: int, world_size: int
) -> None:
    """The gradients of the batches of all ranks, concatenated."""
    batches = [fixture.make_batch(rank, step) for rank in range(world_size)]
    whole = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
    fixture.loss(model, *whole).backward()  # type: ignore[no-untyped-call]


def _copy_gradients(model: torch.nn.Module) -> Gradients:
    # Outside of the record: the copies are the harness's, not the learner's.
    with _disable_current_modes():
        return {
            name: None if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()
        }


def _copy_parameters(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    with _disable_current_modes():
        return {name: p.detach().clone() for name, p in model.named_parameters()}
