"""Misuse is refused by name on every rank; what is right stays right around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab.models import TOY_NETS
from overlaplab.models.toy_nets import WIDTH, random_batch
from overlaplab.techniques.zero import Zero3
from tests.guards import GUARD_S
from tests.ranks import run_untimed
from tests.techniques.zero import misuse, settings
from tests.techniques.zero.programs import Blocks

CLUSTERS = pytest.mark.parametrize("cluster", ["virtual", "gloo"])


def values(fn: Callable[..., Any], *args: Any, **settings: Any) -> tuple[Any, ...]:
    run = run_untimed(fn, *args, **settings)
    assert run.warnings == ()
    return run.values


def alone(num_batches: int = 2, step: int = 0) -> Any:
    """A model as `sharded` has it, and both ranks' batch."""
    torch.manual_seed(1)
    batches = [random_batch(rank, step, WIDTH) for rank in range(num_batches)]
    return Blocks(), torch.cat(batches)


@pytest.mark.parametrize("wrong", misuse.WRONG, ids=lambda fn: fn.__name__)
def test_misuse_is_refused_by_its_name(wrong: Callable[[], None]) -> None:
    with pytest.raises(ol.OverlaplabError) as caught:
        ol.run(wrong)
    for fact in misuse.WRONG[wrong]:
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [misuse.call_a_unit, misuse.ranks_that_choose], ids=lambda fn: fn.__name__
)
def test_processes_refuse_it_in_the_same_words(wrong: Callable[[], None]) -> None:
    with pytest.raises(ol.OverlaplabError) as caught:
        ol.run(wrong, cluster="gloo", timeout_s=GUARD_S)
    for fact in misuse.WRONG[wrong]:
        assert fact in str(caught.value)


def test_a_rank_that_alone_leaves_the_plan_is_named_with_what_it_waits_for() -> None:
    with pytest.raises(ol.DeadlockError) as caught:
        ol.run(misuse.one_rank_leaves_the_plan, 2)
    assert 'rank 1 waits for "zero 1 gather 10 on rank 0' in str(caught.value)
    assert "rank 0 waits in all_gather" in str(caught.value)
    assert "(gather layers.2) for rank 1" in str(caught.value)


def test_a_borrowed_weight_is_right_in_the_rest() -> None:
    def train() -> None:
        model = misuse.BorrowsItsEmbedding()
        zero = Zero3(model, units=list(model.layers))
        model(misuse.batch()).backward()
        zero.wait()

    assert ol.run(train).warnings == ()


def test_without_a_process_group_there_is_nobody_to_share_with() -> None:
    with pytest.raises(ValueError, match="has no process group"):
        Zero3(Blocks())


@CLUSTERS
def test_a_step_that_failed_is_given_up_and_the_next_is_right(cluster: str) -> None:
    expected = misuse.fails_alone()
    for state in values(misuse.fails_in_backward, "abandon", cluster=cluster):
        for name, want in expected.items():
            torch.testing.assert_close(state[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "what"), [("forward", "this forward"), ("wait", "zero.wait()")]
)
def test_a_failed_backward_is_named_by_what_comes_next(where: str, what: str) -> None:
    with pytest.raises(ol.RankError) as caught:
        ol.run(misuse.fails_in_backward, where)
    assert "a backward of step 1 raised before it ended: 1 reduce-scatters" in str(
        caught.value
    )
    assert f"{what} cannot go on. Call zero.abandon()" in str(caught.value)


def test_a_forward_that_failed_leaves_a_model_that_evaluates() -> None:
    for rank, loss in enumerate(values(misuse.fails_in_forward)):
        model, _ = alone()
        assert torch.equal(loss, model(random_batch(rank, 0, WIDTH)).detach())


@CLUSTERS
@pytest.mark.parametrize("how", ["no_sync", "sharded"])
def test_a_window_of_two_backwards_adds_both_up(cluster: str, how: str) -> None:
    model, _ = alone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for window in ((0, 1), (2,)):
        optimizer.zero_grad()
        for step in window:
            model(alone(step=step)[1]).backward()
        optimizer.step()
    for state in values(misuse.gradients_of_two_batches, how, cluster=cluster):
        for name, want in model.state_dict().items():
            torch.testing.assert_close(state[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_clipping_is_that_of_torch_on_the_whole_model(
    world_size: int, norm_type: float, max_norm: float
) -> None:
    model, batch = alone(world_size)
    model(batch).backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for norm, state in values(
        misuse.clipped, max_norm, norm_type, world_size=world_size
    ):
        assert norm == pytest.approx(want.item(), rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@CLUSTERS
def test_remove_gives_a_model_back_that_trains_alone(cluster: str) -> None:
    for rank, (num_hooks, grads) in enumerate(values(misuse.removed, cluster=cluster)):
        assert num_hooks == 0
        model, _ = alone()
        model(random_batch(rank, 0, WIDTH)).backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(grads[name], parameter.grad)


def test_full_state_dicts_have_the_names_and_shapes_of_the_plain_model() -> None:
    for found in values(misuse.names_and_sizes, world_size=3):
        for name, shapes in zip(
            ("zero_element", "tied", "buffers"), found, strict=True
        ):
            plain = TOY_NETS[name].make_model().state_dict()
            assert shapes == {n: tuple(t.shape) for n, t in plain.items()}


def test_a_forward_may_go_backward_to_its_input_and_compute_on() -> None:
    # Both see one batch; a mean over ranks of equal gradients rounds as they do.
    assert max(values(misuse.goes_backward_inside)) < 1e-6


def test_a_gradient_is_where_elements_are_of_what_some_rank_used() -> None:
    everyone = list(values(misuse.gradients_that_nobody_has))
    for name in ("a.weight", "a.bias", "b.weight", "b.bias"):
        found = {of[name] for of in everyone}
        assert (True, True) in found or name.startswith("b.")
        assert found <= {(False, False), (True, name.startswith("a."))}
    assert {(False, False)} < {of["a.bias"] for of in everyone}


def test_fake_tensors_train_on_one_rank_for_all() -> None:
    def train() -> None:
        model, zero = misuse.sharded()
        optimizer = torch.optim.AdamW(zero.shards())
        for step in range(3):
            model(misuse.batch(step)).backward()
            zero.wait()
            optimizer.step()
            optimizer.zero_grad()

    run = ol.run(train, world_size=64, fake=True)
    assert run.warnings == ()
    assert run.timeline.represents == 64


@CLUSTERS
def test_steps_too_small_for_bfloat16_add_up_in_the_shards(cluster: str) -> None:
    for dtypes, gathered, full, after in values(
        settings.small_steps, 3, cluster=cluster
    ):
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
        assert gathered == 1.0  # 1 - 2 / 1024, rounded
        assert full == after == 1 - 3 / 1024


@CLUSTERS
def test_mixed_precision_averages_in_the_dtype_of_the_shards(cluster: str) -> None:
    assert values(settings.averages_in_full, cluster=cluster) == (128.5, 128.5)


@CLUSTERS
def test_a_group_of_some_ranks_shards_over_them_alone(cluster: str) -> None:
    total = sum(p.numel() for p in Blocks().parameters())
    first, alone, last = values(settings.in_a_subgroup, world_size=3, cluster=cluster)
    assert (alone, first + last) == (total, total)
    assert 0 < last < first


def test_units_on_streams_of_their_own_leave_no_hazard() -> None:
    first, second = values(settings.on_streams)
    assert all(map(torch.equal, first.values(), second.values()))


@CLUSTERS
def test_averages_of_halves_do_not_overflow_and_complex_ones_are_complex(
    cluster: str,
) -> None:
    # Rank 0 has both weights, rank 1 both biases.
    halves = values(settings.averages_of, torch.float16, cluster=cluster)
    assert halves == ([30000.0, 30000.0], [1.0, 1.0])
    numbers = values(settings.averages_of, torch.complex64, cluster=cluster)
    # The gradient of a complex linear layer has the conjugate of its input.
    assert numbers == ([-30000j, 1 - 30000j], [1, 1])
