"""What lab 05 gives: a board, nets, steps on it, a GPT to time on other hardware."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overlaplab.grading import fixtures
from overlaplab.grading.evidence import Evidence
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab.grading.gradients import wrong_gradients
from overlaplab.hardware import Hardware, Link, collective_ns, find_hardware
from overlaplab.program import Finding, Program
from overlaplab.timeline import Span, Timeline
from overlaplab_course.gpts import record_step

MakeReducer = Callable[[nn.Module], Any]
MIB = 2**20

# Only matrix products and messages take time, so that times are round.
BOARD: Hardware = replace(
    find_hardware("chalk"),
    name="board",
    flops_per_s={"default": 10**9},
    memory_bytes_per_s=10**15,
    link=Link(latency_ns=0, bytes_per_s=30 * 10**6, source="round numbers"),
    source="no machine: 1 FLOP takes 1 ns, a byte 33 ns on the wire, all else nothing",
)


class Net(nn.Module):
    """A table that is looked up, matrices, and a head: a GPT without its attention.

    Args:
        layers: the name of each layer's weight, in the order of the forward. The same
            name twice is one weight, used twice. The first layer looks rows up; the
            last multiplies with its table; those between with a matrix.
        rows, width: of the tables; a matrix is (width, width).
        unused: weights that the forward never touches.
    """

    def __init__(
        self, layers: Sequence[str], rows: int, width: int, unused: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.layers = tuple(layers)
        for name in dict.fromkeys((*layers, *unused)):
            height = rows if name in (layers[0], layers[-1]) else width
            weight = torch.randn(height, width) / width**0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, tokens: Tensor) -> Tensor:
        first, *middle, last = (self.get_parameter(name) for name in self.layers)
        x = F.embedding(tokens, first)
        for weight in middle:
            x = torch.tanh(x @ weight)
        return (x @ last.t()).square().mean()


@dataclass(frozen=True)
class Model:
    """A `Net` and how it is trained on the board.

    Args:
        layers: see `Net`.
        rows, width: see `Net`.
        tokens: so many a rank.
        ranks: so many.
        unused: see `Net`.
    """

    layers: tuple[str, ...]
    rows: int = 300
    width: int = 100
    tokens: int = 50
    ranks: int = 4
    unused: tuple[str, ...] = ()

    @property
    def fixture(self) -> Fixture:
        """The same for graders."""
        make = partial(Net, self.layers, self.rows, self.width, self.unused)
        batch = partial(_tokens, self.rows, self.tokens)
        return Fixture("model", make, batch, same_seed=True)

    @property
    def names(self) -> tuple[str, ...]:
        """Each weight that is used, once, in the order of first use."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def backward_ms(self) -> list[float]:
        """The backward pass of each layer, in the order of `layers`: two products."""
        heights = [self.width] * (len(self.layers) - 2) + [self.rows]
        flops = (4 * self.tokens * self.width * height for height in heights)
        return [0.0, *(number / 1e6 for number in flops)]  # a look-up has no product

    @property
    def products(self) -> tuple[str, ...]:
        """The products of a step, in order: a forward, then a backward of two."""
        multiplied = self.layers[1:]
        backward = [f"B {name}" for name in reversed(multiplied) for _ in range(2)]
        return (*(f"F {name}" for name in multiplied), *backward)

    @property
    def message_ms(self) -> dict[str, float]:
        """What each gradient's message takes."""
        ends = (self.layers[0], self.layers[-1])
        heights = {n: self.rows if n in ends else self.width for n in self.names}
        sizes = {name: 4 * h * self.width for name, h in heights.items()}
        return {name: self._wire_ms(size) for name, size in sizes.items()}

    def _wire_ms(self, num_bytes: int) -> float:
        return sum(collective_ns(BOARD, "all_reduce", self.ranks, num_bytes)) / 1e6


def _tokens(rows: int, number: int, rank: int, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randint(rows, (number,), generator=generator),)


_MATRICES = ("w0", "w1", "w2", "w3")
UNTIED = Model(("embedding", *_MATRICES, "head"))
TIED = Model(("embedding", *_MATRICES, "embedding"))


# -- steps on the board


@dataclass(frozen=True)
class Played:
    """Three steps of a model, as figures and graders look at them."""

    trained: Trained
    fixture: Fixture
    ranks: int
    products: tuple[str, ...] = ()

    @property
    def evidence(self) -> Evidence:
        return self.trained.evidence

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Races and the like."""
        found: tuple[Finding, ...] = self.trained.run.warnings
        return found

    @property
    def step_ms(self) -> float:
        """The second step."""
        return self.evidence.step_ns[1] / 1e6

    @property
    def timeline(self) -> Timeline:
        """Rank 0 in step 2: kernels by layer, messages by whose gradient they carry."""
        return drawn(self.evidence, self.products)

    def wrong(self) -> bool:
        """Whether a gradient differs from one process on the whole batch."""
        return bool(wrong_gradients(self.trained, self.fixture, self.ranks))

    def windows_ms(self) -> dict[str, float]:
        """What was left of the backward pass when each gradient's hook ran, step 2."""
        end = backward_end_ns(self.evidence, 2)
        names = [g.name for g in self.evidence.gradients_of(0, 2)]
        armed = {name: self.evidence.bucket([name], 2) for name in names}
        left_ns = {n: end - b.armed_ns for n, b in armed.items() if b is not None}
        return {name: round(ns / 1e6, 3) for name, ns in left_ns.items()}


def play(
    make_reducer: MakeReducer,
    model: Model | Fixture = UNTIED,
    ranks: int = 3,
    products: tuple[str, ...] = (),
    apart: bool = False,
) -> Played:
    """Train a model for three steps on the board with this reducer.

    `make_reducer(model)` on each rank; after each backward pass its `wait()`, then the
    optimizer. A `Model` brings its own number of ranks and names its products.
    With `apart` a set has another order on each rank, see `overlaplab.grading.orders`.
    """
    if isinstance(model, Model):
        ranks, products, model = model.ranks, model.products, model.fixture
    trained = fixtures.train(
        model, make_reducer, world_size=ranks, hardware=BOARD, apart=apart
    )
    return Played(trained, model, ranks, products)


def backward_end_ns(evidence: Evidence, step: int) -> int:
    """When the last kernel of a step's backward pass ends, over all ranks."""
    return max(
        span.end_ns
        for span in evidence.step_timeline(step).spans
        if span.kind == "compute" and span.attributes.get("phase") == "backward"
    )


def named(evidence: Evidence, step: int) -> Timeline:
    """One step on all ranks; each message has the name of its gradients."""
    whose = {
        (send.rank, send.op): " ".join(name for name, _ in send.covers)
        for rank in range(evidence.num_ranks)
        for send in evidence.sends_of(rank, step)
    }
    timeline = evidence.step_timeline(step)
    names = (whose.get((s.rank, s.attributes.get("op", -1))) for s in timeline.spans)
    pairs = zip(timeline.spans, names, strict=True)
    return Timeline.of([replace(s, name=name or s.name) for s, name in pairs])


def drawn(evidence: Evidence, products: Sequence[str] = (), step: int = 2) -> Timeline:
    """Rank 0 of one step, in whole microseconds; what takes less is left out.

    On the board that is all but products and messages.

    Args:
        products: names of the step's products, in order; equal neighbours become one.
    """
    names = list(products)
    spans: list[Span] = []
    for span in named(evidence, step).of_rank(0).spans:
        start_ns, end_ns = (round(ns, -3) for ns in (span.start_ns, span.end_ns))
        name, attributes = span.name, dict(span.attributes)
        if span.kind == "communication":
            attributes |= {"ready_ns": start_ns, "wire_ns": end_ns - start_ns}
        elif start_ns == end_ns:
            continue
        elif names and span.kind == "compute":
            name = names.pop(0)
            if spans and spans[-1].name == name:
                spans[-1] = replace(spans[-1], end_ns=end_ns)
                continue
        span = replace(span, name=name, attributes=attributes)
        spans.append(replace(span, start_ns=start_ns, end_ns=end_ns))
    return Timeline.of(spans)


# -- section 5: what arrives differs from rank to rank


class Detour(nn.Module):
    """Rank 0's data take a way that no other rank's data take."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Parameter(torch.randn(8, 8) / 3)
        self.extra = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.trunk)
        loss, mine = hidden.square().mean(), x[:, 0] >= 0
        if bool(mine.any()):
            loss = loss + (hidden[mine] @ self.extra).square().sum() / x.numel()
        return loss


def _detour() -> Fixture:
    toy = fixtures.toy_fixture("branches")
    return replace(toy, name="detour", make_model=Detour, same_seed=True)


def _toy(name: str) -> Fixture:
    return replace(fixtures.toy_fixture(name), same_seed=True)


SITUATIONS: Mapping[str, Fixture] = {
    "two layers share a weight": _toy("tied"),
    "no rank uses a layer": _toy("unused"),
    "only rank 0 uses a layer": _detour(),
    "rank 0 uses two layers in the other order": _toy("branches"),
}


# -- section 3: what a hook is given


@dataclass(frozen=True)
class HookCase:
    """Numbers for one experiment: a weight that is used twice.

    Args:
        weight: its value.
        grad: what `.grad` holds from a backward pass before.
        factors: what it is multiplied with, so the gradient of each use.
    """

    weight: float
    grad: float
    factors: tuple[float, float]


@lru_cache(maxsize=16)
def hook_case(number: int) -> HookCase:
    """The experiment of a learner's number; no two of its numbers can be mixed up."""
    draw = random.Random(int(number))
    weight, grad, first = draw.sample(range(2, 9), 3)
    return HookCase(float(weight), 20.0 + grad, (float(first), 10.0))


@dataclass
class Seen:
    """What the hooks of one experiment saw: one entry a call."""

    register_hook: list[tuple[float, float | None]] = field(default_factory=list)
    post_accumulate: list[tuple[float, float | None]] = field(default_factory=list)
    module: list[tuple[float, float | None]] = field(default_factory=list)


# -- section 6: a GPT on other hardware


@lru_cache(maxsize=8)
def record_gpt(make_reducer: MakeReducer, sequences: int) -> Program:
    """Forward, backward and messages of a GPT of 738.5 M parameters on two GPUs.

    Shapes only: nothing is computed, one rank stands for both.
    """

    def attach(model: nn.Module) -> Callable[[], object]:
        wait: Callable[[], object] = make_reducer(model).wait
        return wait

    sizes = {"num_layers": 12, "width": 2048, "vocab_size": 32_768}
    return record_step(attach, sequences, world_size=2, **sizes)
