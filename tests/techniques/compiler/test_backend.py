"""A backend for `torch.compile`: what runs, when, in which order, on which ranks."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.errors import MismatchError, RankError
from overlaplab.hardware import find_hardware
from overlaplab.program import peak_bytes
from overlaplab.techniques.compiler.agreement import collectives_text
from overlaplab.techniques.compiler.example import nine_operators
from tests.ranks import values_of

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
SMALL = {"bucket_mib": 0.02, "hardware": "chalk"}


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, 64, bias=False), nn.Tanh()),
        *(nn.Linear(64, 64, bias=False), nn.Tanh()),
        nn.Linear(64, 64, bias=False),
    )


class Loss(nn.Module):
    """With the loss inside, a backward is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def batch(rank: int, rows: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 64, generator=generator).to(ol.device())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def steps() -> dict[str, Any]:
    """Everything that these tests look at, on one rank."""
    made = ol.compiler.backend(**SMALL)
    found: dict[str, Any] = {}
    try:
        made.explain()
    except ValueError as error:
        found["too early"] = str(error)
    model = Loss()
    compiled = torch.compile(model, backend=made)
    rank = dist.get_rank()
    found["once"], found["twice"] = [], []
    for rows in (16, 16, 12, 9):  # the third is another size, the fourth any size
        model.zero_grad()
        compiled(batch(rank, rows)).backward()
        found["once"].append((rows, gradients(model)))
        compiled(batch(rank + 10, rows)).backward()
        found["twice"].append(gradients(model))
    found["explained"] = made.explain()
    found["num compiled"] = len(made.compilations)
    found["source"] = made.compilations[0].code.source
    found["graphs"] = made.compilations[0].graphs()
    return found


@pytest.fixture(scope="module")
def run() -> ol.Run:
    return ol.run(steps, world_size=2, hardware="chalk", timeout_s=900)


def averages(rows: int, *seeds: int) -> list[torch.Tensor]:
    total = None
    for seed in seeds:
        model = Loss()
        model(batch(seed, rows)).backward()
        own = gradients(model)
        total = (
            own if total is None else [a + b for a, b in zip(total, own, strict=True)]
        )
    assert total is not None
    return [t / len(seeds) for t in total]


def test_batch_sizes_may_change(run: ol.Run) -> None:
    for values in run.values:
        for rows, found in values["once"]:
            torch.testing.assert_close(found, averages(rows, 0, 1))


def test_a_size_of_its_own_and_one_for_all_others_are_compiled(run: ol.Run) -> None:
    assert [values["num compiled"] for values in run.values] == [2, 2]


def test_each_backward_adds_the_average_of_its_own(run: ol.Run) -> None:
    for rows, found in zip((16, 16, 12, 9), run.values[0]["twice"], strict=True):
        first, second = averages(rows, 0, 1), averages(rows, 10, 11)
        both = [a + b for a, b in zip(first, second, strict=True)]
        torch.testing.assert_close(found, both)


def test_nothing_of_it_races(run: ol.Run) -> None:
    assert run.warnings == ()


def test_nothing_can_be_explained_before_a_backward(run: ol.Run) -> None:
    assert run.values[0]["too early"] == (
        "no backward was compiled yet: run a forward and a backward first"
    )


def test_the_explanation_has_buckets_decisions_and_both_predictions(
    run: ol.Run,
) -> None:
    text = run.values[1]["explained"]

    head, first, *_, order, predicted, serial, step = text.split("\n\n")[0].splitlines()
    assert head == "backward graph 0: 3 tensors in 3 messages, 48.0 KiB in all"
    assert first == (
        "  all_reduce_inner_4_weight: 1 tensor of float32, 16.0 KiB, all_reduce on "
        "group 0, closed by the cap; async: 554 ns of computing can run beside its "
        "2.639 us"
    )
    assert order.endswith("by the given order, proven optimal (0 states)")
    assert predicted == (
        "predicted on chalk: 8.085 us, 7.363 us of it exposed communication"
    )
    assert serial == (
        "with a message per tensor, each waited for at once: 8.639 us, 7.917 us exposed"
    )
    assert step == "forward and backward: 8.513 us"


def test_both_graphs_are_printed(run: ol.Run) -> None:
    before, after = run.values[0]["graphs"].split("\n\nbecomes\n\n")

    def marks(graph: str) -> list[str]:
        return re.findall(r"^ *(>>|<<)", graph, re.MULTILINE)

    assert marks(before) == [">>", "<<"] * 3
    assert marks(after) == [">>"] * 3 + ["<<"] * 3


def test_gradients_are_averaged_in_their_own_memory(run: ol.Run) -> None:
    source = run.values[0]["source"]

    assert "all_reduce_inner_0_weight = average([grad_inner_0_weight], group)" in source
    assert "clone" not in source


def one_step(is_compiled: bool, **settings: Any) -> Any:
    made = ol.compiler.backend(**SMALL | settings)
    model = Loss()
    x = batch(dist.get_rank())
    run: Any = torch.compile(model, backend=made) if is_compiled else model
    run(x).backward()
    if not is_compiled:
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        return None
    return made.compilations[0].predicted


@pytest.fixture(scope="module")
def compiled() -> ol.Run:
    return ol.run(one_step, True, world_size=2, hardware="chalk", timeout_s=900)


@pytest.mark.parametrize("side_stream", [False, True])
def test_the_backward_takes_what_was_predicted_to_the_nanosecond(
    compiled: ol.Run, side_stream: bool
) -> None:
    if side_stream:
        settings: Any = {"side_stream": True, "bucket_mib": 0.04}
        compiled = ol.run(one_step, True, world_size=2, hardware="chalk", **settings)
    lanes = {"side": "stream 1"}
    predicted = [
        (lanes.get(s.lane, s.lane), s.name, s.start_ns, s.end_ns)
        for s in compiled.values[0].spans
    ]
    assert side_stream == any(name == "_foreach_copy_" for _, name, _, _ in predicted)

    spans = [s for s in compiled.timeline.spans if s.rank == 0]
    spans = spans[-len(predicted) :]
    first = spans[0].start_ns
    assert [
        (s.lane, s.name, s.start_ns - first, s.end_ns - first) for s in spans
    ] == predicted


def test_it_takes_no_more_memory_than_eager_code(compiled: ol.Run) -> None:
    eager = ol.run(one_step, False, world_size=2, hardware="chalk")

    assert compiled.program is not None and eager.program is not None
    assert peak_bytes(compiled.program) <= peak_bytes(eager.program)


def sizes_of_ranks() -> list[Any]:
    model = Loss()
    compiled = torch.compile(model, backend=ol.compiler.backend(**SMALL))
    rank, found = dist.get_rank(), []
    for rows in (4 + rank, 6):
        model.zero_grad()
        compiled(batch(rank, rows)).backward()
        found.append(gradients(model))
    return found


def test_ranks_may_have_batches_of_other_sizes() -> None:  # E07
    one, other = ol.run(sizes_of_ranks, world_size=2, hardware="chalk").values

    torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(one[1], averages(6, 0, 1))


def differing() -> None:
    small = 0.02 if dist.get_rank() else 1
    made = ol.compiler.backend(bucket_mib=small, hardware="chalk")
    torch.compile(Loss(), backend=made)(batch(0)).backward()


def test_ranks_with_other_collectives_are_told_before_they_send() -> None:  # E07
    with pytest.raises(MismatchError) as failure:
        ol.run(differing, world_size=2, hardware="chalk")

    text = str(failure.value)
    assert "first in collective #0" in text
    two = r"rank 0: all_reduce avg of \w+_4_\w+ float32\[64, 64\], \w+_2_\w+ float32"
    assert re.search(two, text)
    assert re.search(r"rank 1: all_reduce avg of \w+_4_\w+ float32\[64, 64\]\n", text)


def test_the_order_is_part_of_what_ranks_compare() -> None:
    text = collectives_text(nine_operators(width=10))

    shape = "float32[10, 10]"
    sent = [f"{name} {shape}" for name in ("dw3", "dw2", "dw1")]
    assert text.splitlines() == [f"all_reduce avg of {one}" for one in sent]


def make(**settings: Any) -> Any:
    return ol.compiler.backend(**settings)


def test_backends_of_equal_settings_are_one_to_dynamo() -> None:
    def both() -> tuple[bool, bool, bool]:
        one, other = make(hardware="chalk"), make(hardware=find_hardware("chalk"))
        return one == other, hash(one) == hash(other), one == make(bucket_mib=1)

    assert ol.run(both, world_size=1).values == ((True, True, False),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_mib": 0}, "bucket_mib is 0; expected a finite number above 0 MiB"),
        ({"limit_mib": "1"}, "limit_mib is '1'; expected a number of MiB"),
        ({"hardware": "abacus"}, "abacus"),
        ({"process_group": 1}, "process_group is 1; expected a ProcessGroup or None"),
    ],
)
def test_a_wrong_argument_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(RankError) as failure:
        ol.run(lambda: make(**settings), world_size=1)

    assert message in str(failure.value.__cause__)


def test_without_ranks_there_is_nothing_to_send_to() -> None:
    with pytest.raises(ValueError, match="has no process group"):
        make()


CELL = """
def loss(x, weight):
    return (x @ weight).square().mean()

def step():
    weight = torch.nn.Parameter(torch.eye(4))
    made = ol.compiler.backend(bucket_mib=0.125)
    x = torch.full((2, 4), 1.0 + dist.get_rank())
    torch.compile(loss, backend=made)(x, weight).backward()
    return weight.grad, len(made.compilations), id(loss.__code__)
"""


def test_a_function_of_a_notebook_goes_through_the_passes_once_for_all_ranks() -> None:
    cell: dict[str, Any] = {"__name__": "__main__", "torch": torch, "ol": ol}
    exec(CELL, cell := cell | {"dist": dist})

    run = ol.run(cell["step"], world_size=3)

    assert len({code for _, _, code in run.values}) == 3  # each rank has its own
    assert [num for _, num, _ in run.values] == [1, 1, 1]
    average = sum(torch.full((4, 4), (1.0 + r) ** 2 / 2) for r in range(3)) / 3
    for grad, _, _ in run.values:
        torch.testing.assert_close(grad, average)


class Recompiled(Loss):
    """Its code is compiled for nobody else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mul(2)


def three_backends_where_torch_compiles_twice() -> None:
    config = importlib.import_module("torch._dynamo.config")  # else it is pickled
    model = Recompiled()
    with config.patch(recompile_limit=2):
        for states in (1_002, 1_003, 1_004):
            made = ol.compiler.backend(**SMALL, max_states=states)
            torch.compile(model, backend=made)(batch(dist.get_rank())).backward()


def test_code_that_is_compiled_no_more_is_refused_in_a_process_too() -> None:
    """It would run as it is: each rank would keep the gradients of its own batch."""
    with pytest.raises(RankError, match=r"recompile_limit_hit\. .*dynamo\.reset\(\)"):
        values_of(three_backends_where_torch_compiles_twice, cluster="gloo")
