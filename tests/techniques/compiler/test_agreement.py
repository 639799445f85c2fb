"""What ranks send if each would plan it otherwise: as the first of them does."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.errors import DeadlockError, MismatchError, RunTimeoutError
from overlaplab.hardware import find_hardware, with_link
from overlaplab.techniques.compiler.agreement import agree, collectives_text
from overlaplab.techniques.compiler.backend import forget
from tests.ranks import values_of

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
RUNS = [(cluster, n) for cluster in ("virtual", "gloo") for n in (2, 3)]
each_run = pytest.mark.parametrize(("cluster", "world_size"), RUNS)
each_cluster = pytest.mark.parametrize("cluster", ["virtual", "gloo"])

CHALK = find_hardware("chalk")
FREE = replace(
    with_link(CHALK, latency_ns=0, bytes_per_s=10**15),
    launch_ns=0,
    collective_launch_ns=0,
)
ROWS = (16, 1024, 48)  # by rank; the second has another order of messages


class Siblings(nn.Module):
    """Five weights of one shape whose gradients need each other not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: list[Any] = [layer.weight for layer in self.layers]
        outs = [x @ (w if i == 1 else w.relu()).t() for i, w in enumerate(weights)]
        whole = outs[0] + outs[1] + outs[2] + outs[3] + outs[4]
        return (x + whole.tanh() + whole).square().mean()


class Chain(nn.Module):
    """A graph break behind the first of three layers, if somebody asks for it."""

    def __init__(self, breaks: bool = False, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.one, self.two = nn.Linear(8, width), nn.Linear(width, 8)
        self.three = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.three(torch.tanh(self.two(x))).square().mean()


def batch(rank: int, rows: int, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, width, generator=generator).to(ol.device())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trained(rows: int, **settings: Any) -> tuple[list[torch.Tensor], str]:
    """Gradients of a step of the calling rank, and what it sent."""
    made = ol.compiler.backend(**{"hardware": "chalk", "bucket_mib": 0.01} | settings)
    model = Siblings()
    torch.compile(model, backend=made)(batch(dist.get_rank(), rows)).backward()
    return gradients(model), collectives_text(made.compilations[-1].graph)


def averages(*rows: int) -> list[torch.Tensor]:
    """One process', of the mean of the ranks' losses."""
    model = Siblings()
    for rank, number in enumerate(rows):
        (model(batch(rank, number)) / len(rows)).backward()
    return gradients(model)


def check(values: tuple[Any, ...], *rows: int) -> None:
    first, *others = (grads for grads, _ in values)
    torch.testing.assert_close(first, averages(*rows))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def fresh_values_of(
    fn: Callable[..., Any], *args: Any, cluster: str = "virtual", world_size: int = 2
) -> tuple[Any, ...]:
    """As `values_of`, each size and machine compiled for itself again."""
    values_of(torch._dynamo.reset, cluster=cluster, world_size=world_size)
    return values_of(fn, *args, cluster=cluster, world_size=world_size)


def batches_of_other_sizes(**settings: Any) -> Any:
    return trained(ROWS[dist.get_rank()], **settings)


def of_rank_1_alone(**settings: Any) -> str:
    ((_, sent),) = fresh_values_of(partial(trained, ROWS[1], **settings), world_size=1)
    return str(sent)


@each_run
def test_first_batches_of_other_sizes_are_sent_as_the_first_rank_sends(
    cluster: str, world_size: int
) -> None:
    values = fresh_values_of(
        batches_of_other_sizes, cluster=cluster, world_size=world_size
    )

    check(values, *ROWS[:world_size])
    (sent,) = {sent for _, sent in values}
    assert sent != of_rank_1_alone()


def on_machines_of_their_own(machines: str, **settings: Any) -> Any:
    """ "cf": the first rank on chalk, the second on one where launches are free."""
    machine = CHALK if machines[dist.get_rank()] == "c" else FREE
    return trained(256, hardware=machine, **settings)


@each_run
def test_the_first_ranks_machine_decides(cluster: str, world_size: int) -> None:
    machines = "cfc"[:world_size]
    values = fresh_values_of(
        on_machines_of_their_own, machines, cluster=cluster, world_size=world_size
    )

    check(values, *[256] * world_size)
    assert len({sent for _, sent in values}) == 1


def test_what_an_earlier_run_compiled_is_compiled_again_if_ranks_agree_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks of one process share what is compiled, and so do runs."""
    torch._dynamo.reset()
    ran: list[str] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = agree(*args, **kwargs)
        ran.append(collectives_text(made.graph))
        return made

    module = importlib.import_module("overlaplab.techniques.compiler.backend")
    monkeypatch.setattr(module, "agree", noting)
    sent = {}
    for machines in ("ff", "cf", "fc", "cc"):
        step = partial(on_machines_of_their_own, machines, max_states=1_001)
        check(values_of(step), 256, 256)
        (sent[machines],) = set(ran)
        ran.clear()

    assert sent["ff"] == sent["fc"] != sent["cc"] == sent["cf"]


def within_five_us() -> Any:
    """In the first rank's backward all is ready, in the second's a gradient or two."""
    return batches_of_other_sizes(bucket_mib=1, max_delay_ms=0.005)


@each_cluster
def test_what_travels_together_is_the_first_ranks_choice(cluster: str) -> None:
    values = fresh_values_of(within_five_us, cluster=cluster)

    check(values, *ROWS[:2])
    (sent,) = {sent for _, sent in values}
    alone = of_rank_1_alone(bucket_mib=1, max_delay_ms=0.005)
    assert len(sent.splitlines()) == 1 < len(alone.splitlines())


def one_model_after_another() -> Any:
    return [on_machines_of_their_own(m, max_states=1_000) for m in ("cc", "ff")]


@each_cluster
def test_another_backend_is_another_agreement(cluster: str) -> None:
    for (_, on_chalk), (_, on_free) in fresh_values_of(
        one_model_after_another, cluster=cluster
    ):
        assert on_chalk != on_free


def models_of_other_sizes(forgets: bool) -> list[str]:
    """What two models of equal settings send, small batches and large ones."""
    sent = []
    for rows in ROWS[:2]:
        if forgets:
            torch._dynamo.reset()
            forget()
        sent.append(trained(rows, bucket_mib=1, max_delay_ms=0.006)[1])
    return sent


@pytest.mark.parametrize("forgets", [False, True])
def test_another_model_is_sent_as_the_first_or_planned_anew(forgets: bool) -> None:
    for small, large in fresh_values_of(models_of_other_sizes, forgets, cluster="gloo"):
        assert (small == large) is not forgets


def explained() -> str:
    made = ol.compiler.backend(bucket_mib=1, hardware="chalk")
    rank = dist.get_rank()
    torch.compile(Siblings(), backend=made)(batch(rank, 16 + rank)).backward()
    return made.explain()


def test_who_sends_as_another_says_so() -> None:
    first, other = values_of(explained, cluster="gloo")

    assert "closed by" not in first
    assert "80.0 KiB, all_reduce on group 0, closed by what ranks agreed on" in other


def test_one_rank_that_stands_for_all_waits_for_nobody() -> None:
    run = ol.run(batches_of_other_sizes, world_size=8, fake=True)
    two = ol.run(batches_of_other_sizes, world_size=8, fake=2)

    assert run.warnings == two.warnings == ()
    assert len({sent for _, sent in (*run.values, *two.values)}) == 1


def test_agreeing_takes_no_time_of_the_ranks() -> None:
    torch._dynamo.reset()
    first, again = (ol.run(batches_of_other_sizes, world_size=2) for _ in range(2))

    assert first.timeline.spans == again.timeline.spans


def last_batch_is_larger_on_rank_1() -> list[list[torch.Tensor]]:
    """Rank 1 alone compiles again, with rows that would make another order."""
    made = ol.compiler.backend(bucket_mib=0.01, hardware="chalk")
    model, found = Siblings(), []
    compiled = torch.compile(model, backend=made)
    for rows in (16, 1024 if dist.get_rank() else 16):
        model.zero_grad()
        compiled(batch(dist.get_rank(), rows)).backward()
        found.append(gradients(model))
    return found


def test_who_compiles_again_sends_as_before() -> None:
    one, other = values_of(last_batch_is_larger_on_rank_1, cluster="gloo")

    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one[1], averages(16, 1024))


# -- ranks that cannot agree


def told(step: Callable[[], Any]) -> str:
    """What the calling rank is told instead of a gradient."""
    with pytest.raises(MismatchError) as failure:
        step()
    return str(failure.value)


def chain(rows: int = 4, **kwargs: Any) -> nn.Module:
    made = ol.compiler.backend(bucket_mib=0.0001, hardware="chalk")
    model = Chain(**kwargs)
    torch.compile(model, backend=made)(batch(0, rows, 8)).backward()
    return model


def is_odd() -> bool:
    """The last rank is: the first and, of three, another one are told as well."""
    return dist.get_rank() == dist.get_world_size() - 1


def other_parameters() -> str:
    return told(lambda: chain(width=4 if is_odd() else 8))


def a_frozen_layer() -> str:
    def step() -> None:
        made = ol.compiler.backend(bucket_mib=0.0001, hardware="chalk")
        model = Chain()
        model.two.requires_grad_(not is_odd())
        torch.compile(model, backend=made)(batch(0, 4, 8)).backward()

    return told(step)


def other_graph_breaks() -> str:
    return told(lambda: chain(breaks=is_odd()))


def other_buckets() -> str:
    return told(lambda: trained(16, bucket_mib=1 if is_odd() else 0.03))


@each_run
@pytest.mark.parametrize(
    "step", [other_parameters, a_frozen_layer, other_graph_breaks, other_buckets]
)
def test_every_rank_is_told_what_differs(
    step: Callable[[], str], cluster: str, world_size: int
) -> None:
    told = values_of(step, cluster=cluster, world_size=world_size)

    (text,) = set(told)
    assert re.match(r"the collectives of compiled graph \d+ differ between ranks", text)
    rows = re.findall(r"\n  rank (\d): (?:all_reduce avg of|no more collectives)", text)
    assert rows == ["0", str(world_size - 1)]


def test_every_rank_is_told_in_a_run_after_one_that_agreed() -> None:
    """Processes, and what they have compiled, outlive a run; agreements do not."""
    values_of(chain, cluster="gloo")

    (text,) = set(values_of(a_frozen_layer, cluster="gloo"))
    assert text.startswith("the collectives of compiled graph 1 differ between ranks")


def in_orders_of_their_own() -> None:
    """Ranks of other settings plan for themselves; another machine, another order."""
    own = {"hardware": FREE, "least_gain_us": 0.001} if dist.get_rank() else {}
    trained(256, **own)


def test_gradients_of_one_shape_in_another_order_are_told_too() -> None:
    torch._dynamo.reset()
    with pytest.raises(MismatchError, match=r"(?s)collective #0.*settings") as told:
        ol.run(in_orders_of_their_own, world_size=2, hardware="chalk")

    sent = re.findall(r"rank (\d): all_reduce avg of \w*layers_(\d)", str(told.value))
    assert sorted(sent) == [("0", "1"), ("1", "4")]


def repaired() -> Any:
    """A rank is told, and its user tries again in the same process."""
    other_buckets()
    return trained(16, bucket_mib=0.03)


@each_cluster
def test_ranks_that_were_told_may_agree_later(cluster: str) -> None:
    check(values_of(repaired, cluster=cluster), 16, 16)


def rank_1_never_compiles() -> None:
    if dist.get_rank() == 0:
        trained(16)


def test_a_rank_that_never_compiles_is_named() -> None:
    with pytest.raises(DeadlockError, match="compiled graph 1 on rank 1"):
        ol.run(rank_1_never_compiles, world_size=2)


def test_in_processes_the_deadline_ends_that() -> None:
    with pytest.raises(RunTimeoutError, match="rank 1 has ended"):
        ol.run(rank_1_never_compiles, world_size=2, cluster="gloo", timeout_s=5)
