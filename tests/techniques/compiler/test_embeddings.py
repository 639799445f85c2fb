"""An embedding's gradient travels as the rows that batches looked up."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlaplab as ol
from overlaplab.cluster.pool.pool import Outcome
from overlaplab.errors import RankError
from overlaplab.techniques.compiler import embeddings
from overlaplab.techniques.compiler.backend import backend
from overlaplab.techniques.compiler.capture import Fragment, capture
from overlaplab.techniques.compiler.checks import check_same
from overlaplab.techniques.compiler.embeddings import (
    Lookup,
    gather_lookups,
    plan_lookups,
)
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    launches,
    operation,
    output_of,
    payload,
    returned,
    show,
)
from overlaplab.techniques.compiler.simplification import simplify
from tests.ranks import Untimed, run_untimed, values_of

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
WORDS, WIDTH, ROWS = 64, 4, 20
# Of each rank, by step: the second compiles for another size, the third for any.
SIZES = (((4, 5), (2, 3), (1, 1)), ((2, 5), (2, 3), (20, 1)), ((4, 5), (4, 5), (3, 5)))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()  # what ranks compiled in this process counts


class Words(nn.Module):
    """Two tables, one with a word that learns nothing, and a layer."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Embedding(WORDS, WIDTH, padding_idx=3, **settings)
        self.two = nn.Embedding(WORDS, 2 * WIDTH, **settings)
        self.layer = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        looked_up = torch.cat([self.one(tokens), self.two(tokens * 5 % WORDS)], -1)
        return torch.tanh(self.layer(looked_up)).square().mean()


class Tied(nn.Module):
    """The table is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.table(tokens) @ self.table.weight.t()).logsumexp(-1).mean()


class Frequent(nn.Module):
    """What is often looked up learns less, by this rank's count."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).square().mean()


def tokens_of(rank: int, size: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(WORDS, size, generator=generator)


def steps(rows: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The gradients of each step, on one rank."""
    model = Words()
    made = backend(hardware="chalk", embedding_rows=rows, **settings)
    compiled = torch.compile(model, backend=made)
    found = []
    for step, sizes in enumerate(SIZES):
        model.zero_grad()
        rank = dist.get_rank()
        tokens = tokens_of(rank + 9 * step, sizes[rank % len(sizes)])
        compiled(tokens.to(ol.device())).backward()
        found.append(gradients_of(model))
    return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


def averages(step: int, world_size: int) -> dict[str, Tensor]:
    """Of all ranks' batches, in one process."""
    model, total = Words(), dict[str, Tensor]()
    for rank in range(world_size):
        model.zero_grad()
        sizes = SIZES[step]
        model(tokens_of(rank + 9 * step, sizes[rank % len(sizes)])).backward()
        for name, grad in gradients_of(model).items():
            total[name] = total[name] + grad if name in total else grad
    return {name: grad / world_size for name, grad in total.items()}


RUNS: dict[tuple[str, int], dict[str, Any]] = {
    ("virtual", 1): {},
    ("virtual", 2): {"bucket_mib": 0.0005},
    ("virtual", 3): {"side_stream": True},
    ("virtual", 4): {"limit_mib": 0.01},
    ("gloo", 2): {},
    ("gloo", 3): {},
}


@cache
def run_of(cluster: str, world_size: int) -> Untimed | Outcome:
    settings = RUNS[cluster, world_size]
    return run_untimed(steps, ROWS, settings, cluster=cluster, world_size=world_size)


@pytest.mark.parametrize(("cluster", "world_size"), RUNS)
def test_gradients_are_those_of_one_process(cluster: str, world_size: int) -> None:
    for of_rank in run_of(cluster, world_size).values:
        for step, found in enumerate(of_rank):
            torch.testing.assert_close(found, averages(step, world_size))


@pytest.mark.parametrize(("cluster", "world_size"), [r for r in RUNS if r[1] > 1])
def test_ranks_have_the_same_bits(cluster: str, world_size: int) -> None:
    first, *others = run_of(cluster, world_size).values
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nothing_races_and_everything_is_waited_for(world_size: int) -> None:
    assert run_of("virtual", world_size).warnings == ()


class Odd(nn.Module):
    """A table and a layer; `look_up` says how the table is read."""

    def __init__(self, look_up: str = "once", **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look_up = look_up
        self.table = nn.Embedding(WORDS, WIDTH, **settings)
        self.other = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        if look_up == "tied":
            self.other.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, enabled=self.look_up == "autocast"):
            x = self.table(tokens)
            if self.look_up == "break":
                torch._dynamo.graph_break()
            if self.look_up == "tied":
                x = x * self.other(tokens)
            if self.look_up in ("twice", "break"):
                x = x * self.table(tokens * 3 % WORDS)
            return torch.tanh(self.layer(x)).float().square().sum()


# Settings of the net, the sizes of both ranks' tokens, and whose rows are sent.
ODD: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], list[str]]] = {
    "nothing is looked up on a rank": ({}, [(0,), (5,)], ["table"]),
    "one token": ({}, [(), (2, 1, 3)], ["table"]),
    "int32": ({}, [(3, 5), (3, 5)], ["table"]),
    "two backwards": ({}, [(3, 5), (3, 5)], ["table"]),
    "padding": ({"padding_idx": -1}, [(3, 5), (3, 5)], ["table"]),
    **{
        look_up: ({"look_up": look_up}, [(3, 5), (3, 5)], sent)
        for look_up, sent in {
            "tied": [],
            "twice": [],
            "break": ["table"],  # each fragment sends what it looked up
            "autocast": ["table"],
        }.items()
    },
}


def odd_batches(name: str, rank: int) -> list[Tensor]:
    dtype = torch.int32 if name == "int32" else torch.int64
    seeds = (rank, rank + 9) if name == "two backwards" else (rank,)
    return [tokens_of(seed, ODD[name][1][rank]).to(dtype) for seed in seeds]


def odd_steps(has_side: bool) -> dict[str, Any]:
    config = importlib.import_module("torch._dynamo.config")  # else it is pickled
    config.recompile_limit = 64  # each net has the same code
    found = {}
    for number, (name, (settings, _, _)) in enumerate(ODD.items()):
        model = Odd(**settings)
        made = backend(
            hardware="chalk",
            embedding_rows=15,
            side_stream=has_side,
            max_states=500 + number,  # a backend of its own
        )
        compiled = torch.compile(model, backend=made)
        for tokens in odd_batches(name, dist.get_rank()):
            compiled(tokens.to(ol.device())).backward()
        sent = "\n".join(show(c.inserted) for c in made.compilations)
        rows = sorted(set(re.findall(r">>\s+gather_rows_(\w+)_weight", sent)))
        found[name] = gradients_of(model), rows
    return found


@pytest.mark.parametrize(("cluster", "has_side"), [("virtual", True), ("gloo", False)])
def test_odd_batches_and_tables_end_where_one_process_does(
    cluster: str, has_side: bool
) -> None:
    one, other = run_untimed(odd_steps, has_side, cluster=cluster).values
    for name, (settings, _, sent) in ODD.items():
        torch.testing.assert_close(other[name][0], one[name][0], rtol=0, atol=0)
        model = Odd(**settings)
        for tokens in [*odd_batches(name, 0), *odd_batches(name, 1)]:
            model(tokens).backward()
        expected = {n: grad / 2 for n, grad in gradients_of(model).items()}
        loose = {"rtol": 0.02, "atol": 0.01} if name == "autocast" else {}
        torch.testing.assert_close(one[name][0], expected, **loose)
        assert (name, one[name][1]) == (name, sent)


def backward_of(model: nn.Module, *size: int) -> Fragment:
    (found,) = (f for f in capture(model, tokens_of(0, size)) if f.is_backward)
    return found


def gathered(rows: int, *size: int) -> tuple[Any, list[Lookup]]:
    backward = backward_of(Words(), *size)
    graph = simplify(backward.graph)
    found = plan_lookups(graph, backward.gradients, rows, 2)
    return gather_lookups(graph, found, "0", 2), found


def test_words_and_rows_are_sent_and_no_table() -> None:
    graph, found = gathered(20, 4, 5)
    assert [(lookup.name, lookup.rows) for lookup in found] == [
        ("one.weight", 20),
        ("two.weight", 20),
    ]
    sent = {
        launch.name: (operation(launch), tuple(payload(launch)[0].meta["val"].shape))
        for launch in launches(graph)
    }
    assert sent == {
        "gather_rows_one_weight": ("all_gather_into_tensor", (20, WIDTH)),
        "gather_tokens_one_weight": ("all_gather_into_tensor", (20,)),
        "gather_rows_two_weight": ("all_gather_into_tensor", (20, 2 * WIDTH)),
        "gather_tokens_two_weight": ("all_gather_into_tensor", (20,)),
    }


def test_a_batch_of_all_rows_is_not_filled_up() -> None:
    assert "constant_pad_nd" not in show(gathered(20, 4, 5)[0])
    assert "constant_pad_nd" in show(gathered(21, 4, 5)[0])


def test_a_table_is_averaged_where_that_is_less() -> None:
    """A row of `two` has 32 bytes and 8 of its word; its table has 2,048."""
    backward = backward_of(Words(), 4, 5)
    names = {
        rows: [
            x.name for x in plan_lookups(backward.graph, backward.gradients, rows, 2)
        ]
        for rows in (42, 43, 51, 52)
    }
    both = ["one.weight", "two.weight"]
    assert names == {42: both, 43: ["two.weight"], 51: ["two.weight"], 52: []}


@pytest.mark.parametrize("make_model", [Tied, Frequent])
def test_what_is_more_than_a_table_is_averaged_whole(make_model: Any) -> None:
    backward = backward_of(make_model(), 2, 2)
    assert backward.gradients
    assert plan_lookups(backward.graph, backward.gradients, 4, 2) == []


@pytest.mark.parametrize("reader", ["the graph", "two results"])
def test_a_table_that_something_else_reads_is_averaged_whole(reader: str) -> None:
    """What the reader gets must stay this rank's own."""
    backward = backward_of(Words(), 4, 5)
    graph = backward.graph
    (position,) = (p for p, n in backward.gradients.items() if n == "one.weight")
    table = returned(graph)[position]
    others = [table]
    if reader == "the graph":
        with graph.inserting_after(table):
            others = [graph.call_function(torch.ops.aten.neg.default, (table,))]
        others[0].meta["val"] = table.meta["val"]
    output_of(graph).args = ((*returned(graph), *others),)
    found = plan_lookups(graph, backward.gradients, 20, 2)
    assert [lookup.name for lookup in found] == ["two.weight"]


def test_tokens_that_the_backward_works_out_are_not_counted_in_time() -> None:
    backward = backward_of(Words(), 4, 5)
    graph = backward.graph
    (position,) = (p for p, n in backward.gradients.items() if n == "one.weight")
    table = returned(graph)[position]
    tokens = table.args[1]
    with graph.inserting_before(table):
        made = graph.call_function(torch.ops.aten.abs.default, (tokens,))
    made.meta["val"] = tokens.meta["val"]
    table.replace_input_with(tokens, made)
    found = plan_lookups(graph, backward.gradients, 20, 2)
    assert [lookup.name for lookup in found] == ["two.weight"]


def large_ones() -> Tensor:
    """Each rank looks up word 0 with a gradient of 40,000."""
    table = nn.Embedding(1000, 1, dtype=torch.float16, device=ol.device())
    made = backend(hardware="chalk", embedding_rows=2)
    compiled = torch.compile(table, backend=made)
    tokens = torch.zeros(1, dtype=torch.long, device=ol.device())
    compiled(tokens).backward(torch.full((1, 1), 40000.0, dtype=torch.float16))
    assert table.weight.grad is not None
    return table.weight.grad[0]


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_float16_stays_finite(cluster: str) -> None:
    for found in values_of(large_ones, cluster=cluster):
        assert found.item() == 40000


def too_many() -> None:
    model = Words()
    made = backend(hardware="chalk", embedding_rows=ROWS)
    compiled = torch.compile(model, backend=made)
    for size in ((4, 5), (4, 5) if dist.get_rank() == 0 else (3, 7)):
        compiled(tokens_of(0, size).to(ol.device())).backward()


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_a_larger_batch_is_refused_before_it_is_sent(cluster: str) -> None:
    expected = r"looks up 21 tokens in (one|two)\.weight, and embedding_rows is 20"
    with pytest.raises(RankError, match=expected) as caught:
        values_of(too_many, cluster=cluster)
    assert "nothing was sent" in str(caught.value)


def sparse_table() -> None:
    table = nn.Embedding(WORDS, WIDTH, sparse=True)
    compiled = torch.compile(table, backend=backend(hardware="chalk"))
    compiled(tokens_of(0, (2, 3)).to(ol.device())).sum().backward()


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_a_sparse_gradient_is_refused_by_its_name(cluster: str) -> None:
    expected = r"gradient of weight has layout torch\.sparse_coo.*embedding_rows="
    with pytest.raises(RankError, match=expected):
        values_of(sparse_table, cluster=cluster)


def test_a_table_that_is_summed_from_other_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def meddling(before: Any, after: Any, **settings: Any) -> None:
        rows = [n for n in after.nodes if n.name.startswith("all_rows")]
        one, two = (next(iter(node.users)) for node in rows)
        one.args, two.args = (
            (one.args[0], two.args[1], *one.args[2:]),
            (two.args[0], one.args[1], *two.args[2:]),
        )
        last = max([one, two], key=[*after.nodes].index)
        for node in (one, two):
            if node is not last:
                last.prepend(node)
        check_same(before, after, **settings)

    monkeypatch.setattr(embeddings, "check_same", meddling)
    with pytest.raises(GraphError, match="gather_lookups changes what the graph"):
        gathered(20, 4, 5)


@pytest.mark.parametrize(
    ("rows", "num_ranks", "error", "text"),
    [
        (0, 2, ValueError, "rows is 0; expected at least 1"),
        (2.5, 2, TypeError, r"rows is 2\.5; expected a whole number"),
        (True, 2, TypeError, "rows is True"),
        (4, 0, ValueError, "num_ranks is 0"),
    ],
)
def test_arguments_are_refused(
    rows: Any, num_ranks: int, error: type[Exception], text: str
) -> None:
    backward = backward_of(Words(), 2, 2)
    with pytest.raises(error, match=text):
        plan_lookups(backward.graph, backward.gradients, rows, num_ranks)


def refused_backends() -> list[str]:
    found = []
    wrong: list[dict[str, Any]] = [{"embedding_rows": 0}]
    wrong += [{"embedding_rows": 8, "lowering": "inductor"}]
    for settings in wrong:
        with pytest.raises(ValueError) as caught:
            backend(**settings)
        found.append(str(caught.value))
    return found


def test_a_backend_says_what_it_expects() -> None:
    assert values_of(refused_backends, world_size=1) == (
        [
            "embedding_rows is 0; expected at least 1",
            "embedding_rows=8 is for lowering='eager': leave one out",
        ],
    )
