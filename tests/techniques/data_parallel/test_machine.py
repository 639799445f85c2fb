"""A step is open, sent, ended: right numbers or one clear error, on every cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab.errors import DeadlockError, RankError, RunTimeoutError
from tests.guards import soon
from tests.ranks import EVERYWHERE, On, everywhere, run_on
from tests.techniques.data_parallel import misuse, refused, windows
from tests.techniques.data_parallel.misuse import mean

with_each = pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed"])


def run(fn: Callable[..., Any], *args: Any, on: On) -> Any:
    found = run_on(on, fn, *args)
    assert found.warnings == ()
    return list(found.values)


def refuses(says: str, fn: Callable[..., Any], *args: Any, on: On) -> None:
    with pytest.raises(RankError, match=says):
        run_on(on, fn, *args)


@everywhere
@with_each
def test_a_forward_between_backward_and_wait_changes_nothing(
    on: On, reducer: str
) -> None:
    right = [mean(on.ranks, step) for step in range(3)]
    found = run(misuse.extra_forward_on_rank_0, reducer, on=on)
    assert found == [right] * on.ranks


ALL, ONE = None, (0,)  # which ranks fail


# Where one rank of processes fails alone, the pool waits seconds for the other.
@pytest.mark.parametrize(
    ("on", "failing", "to_none"),
    [
        (on, failing, to_none)
        for on in EVERYWHERE
        for failing in (ALL, ONE)
        for to_none in (True, False)
        if (on.cluster, failing, to_none) != ("gloo", ONE, False)
    ],
    ids=str,
)
def test_after_a_backward_that_failed_the_next_one_is_refused(
    on: On, failing: tuple[int, ...] | None, to_none: bool
) -> None:
    program = misuse.backward_that_fails
    says = r"raised before it ended: 1 of 2 .*abandon"
    refuses(says, program, failing, to_none, False, "hooks", on=on)


@everywhere
@with_each
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("failing", [ALL, ONE, (1,)])
def test_ranks_that_abandon_a_step_together_go_on_rightly(
    on: On, reducer: str, to_none: bool, failing: tuple[int, ...] | None
) -> None:
    found = run(misuse.backward_that_fails, failing, to_none, True, reducer, on=on)
    assert found == [[mean(on.ranks, 2)] * 2] * on.ranks


@everywhere
@with_each
def test_an_update_without_a_wait_is_refused_in_the_second_step(
    on: On, reducer: str
) -> None:
    says = r"parameter weight was changed while step 0 was open.*reducer\.wait\(\)"
    refuses(says, misuse.never_waits, reducer, on=on)


@everywhere
@with_each
def test_an_update_before_the_wait_is_refused(on: On, reducer: str) -> None:
    says = r"parameter weight was changed while step 0 was open.*reducer\.wait\(\)"
    refuses(says, misuse.steps_before_it_waits, reducer, on=on)


@everywhere
@with_each
@pytest.mark.parametrize("how", ["to", "data"])
def test_memory_that_is_swapped_before_the_wait_is_a_change(
    on: On, reducer: str, how: str
) -> None:
    says = r"parameter weight was changed while step 0 was open.*reducer\.wait\(\)"
    refuses(says, misuse.swaps_memory_before_it_waits, how, reducer, on=on)


@everywhere
def test_checkpointed_layers_are_averaged(on: On) -> None:
    assert (
        run(misuse.checkpointed_backward, (), on=on)
        == [[mean(on.ranks, 1)] * 2] * on.ranks
    )


@everywhere
def test_a_backward_that_failed_between_checkpointed_layers_is_refused(on: On) -> None:
    failing = ONE if on.cluster == "virtual" else ALL
    says = r"raised before it ended: 1 of 2 .*abandon"
    refuses(says, misuse.checkpointed_backward, failing, on=on)


@everywhere
@pytest.mark.parametrize(
    ("then", "who"),
    [
        ("micro", r"reducer.wait\(\)"),
        ("backward", "this backward"),
        ("wait", r"reducer.wait\(\)"),
    ],
)
def test_after_a_micro_batch_that_failed_the_step_is_refused(
    on: On, then: str, who: str
) -> None:
    says = rf"raised before it ended: 0 of 1 .*{who} cannot go on.*abandon"
    refuses(says, windows.fails_in_a_window, then, on=on)


@everywhere
def test_whole_steps_may_run_inside_a_backward(on: On) -> None:
    found = run(misuse.trains_inside_a_backward, on=on)
    assert found == [[mean(on.ranks), mean(on.ranks, 1)]] * on.ranks


@everywhere
@pytest.mark.parametrize("what", ["replace", "free", "zero", "clip"])
def test_a_gradient_that_is_touched_before_the_wait_is_named(on: On, what: str) -> None:
    says = r"weight\.grad was replaced, freed or written .*reducer\.wait\(\) first"
    refuses(says, misuse.touches, what, "bucketed", on=on)


@everywhere
@pytest.mark.parametrize("what", ["replace", "clip"])
def test_what_has_not_been_sent_may_be_touched(on: On, what: str) -> None:
    right = {"replace": mean(on.ranks), "clip": 0.5}[what]
    for (seen,) in run(misuse.touches, what, "serial", on=on):
        assert seen == pytest.approx(right, rel=1e-5)


@everywhere
def test_a_gradient_that_was_freed_before_it_was_sent_is_named(on: On) -> None:
    says = r"weight\.grad was replaced, freed or written"
    refuses(says, misuse.touches, "free", "serial", on=on)


@everywhere
def test_a_rank_without_a_backward_gives_up_a_step_of_the_new_plan(on: On) -> None:
    assert run(misuse.abandons_after_a_cast, on=on) == [[mean(on.ranks)] * 2] * on.ranks


@everywhere
def test_a_users_hook_that_steps_and_frees_is_named(on: On) -> None:
    refuses(r"weight.* reducer\.wait\(\)", misuse.touches, "hook", "hooks", on=on)


@everywhere
def test_ranks_that_freeze_different_layers_still_average(on: On) -> None:
    # Their inputs are 1, 10 and 100.
    right = pytest.approx([10 / 3, 101 / 3] if on.ranks == 3 else [5.0, 0.5])
    assert run(misuse.freeze_differently, on=on) == [right] * on.ranks


@everywhere
def test_what_all_ranks_freeze_leaves_the_plan_and_comes_back(on: On) -> None:
    found = run(misuse.freeze_everywhere, on=on)
    assert found == [[3, 2, 1, 2, 3]] * on.ranks


@everywhere
def test_one_rank_may_freeze_and_unfreeze_between_steps(on: On) -> None:
    # Rank 0 brings 0 for its frozen weight, in place of 11 and 21.
    right = [[mean(on.ranks, step)] * 2 for step in range(4)]
    for step in (1, 2):
        right[step][0] -= (1 + 10 * step) / on.ranks
    for seen in run(misuse.freeze_and_unfreeze_on_rank_0, on=on):
        torch.testing.assert_close(seen, right)


@everywhere
def test_a_parameter_that_one_rank_alone_unfreezes_is_named(on: On) -> None:
    says = "parameter 0.weight trains on this rank and is frozen on another"
    refuses(says, misuse.unfreeze_on_rank_0, on=on)


@everywhere
@with_each
@pytest.mark.parametrize("cut_short", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_micro_batches_accumulate_and_are_sent_once(
    on: On, reducer: str, cut_short: bool, nested: bool
) -> None:
    found = run(windows.accumulate, reducer, cut_short, nested, on=on)
    assert found == [[{2: 5.5, 3: 7.0}[on.ranks]]] * on.ranks


@everywhere
def test_an_error_leaves_no_sync(on: On) -> None:
    assert (
        run(windows.leaves_no_sync_by_an_error, on=on) == [[mean(on.ranks)]] * on.ranks
    )


@everywhere
@with_each
def test_waiting_inside_no_sync_is_refused(on: On, reducer: str) -> None:
    refuses("inside no_sync", windows.waits_in_no_sync, reducer, on=on)


@everywhere
@with_each
def test_waiting_or_abandoning_after_remove_is_refused(on: On, reducer: str) -> None:
    says = r"after remove\(\); build a new reducer"
    refuses(says, misuse.waits_after_remove, reducer, on=on)
    refuses(says, misuse.abandons_after_remove, reducer, on=on)


@everywhere
def test_accumulation_makes_no_second_copy(on: On) -> None:
    assert run(windows.accumulates_in_place, on=on) == [True] * on.ranks


@everywhere
def test_micro_batches_may_go_through_another_method(on: On) -> None:
    assert (
        run(misuse.another_method, on=on)
        == [[mean(on.ranks) + mean(on.ranks, 1)]] * on.ranks
    )


@everywhere
def test_large_halves_do_not_overflow(on: On) -> None:
    for (seen,) in run(misuse.half_precision, on=on):
        assert seen == pytest.approx(40000, rel=1e-3)


@everywhere
def test_a_lazily_conjugated_gradient_is_averaged(on: On) -> None:
    found = run(misuse.lazily_conjugated, on=on)
    assert found == [[pytest.approx(mean(on.ranks))]] * on.ranks


@everywhere
@pytest.mark.parametrize("first", ["serial", "bucketed"])
@pytest.mark.parametrize("second", ["serial", "hooks"])
def test_a_second_reducer_of_any_class_is_refused(
    on: On, first: str, second: str
) -> None:
    says = r"parameter weight has a reducer already.*remove\(\)"
    refuses(says, refused.two_reducers, first, second, on=on)


@everywhere
def test_a_model_wrapped_in_ddp_is_refused(on: On) -> None:
    refuses(r"wrapped in DistributedDataParallel", refused.wrapped_in_ddp, on=on)


@everywhere
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("expanded", r"buffer table is expanded.*clone"),
        ("int16", "buffer table is torch.int16"),
        ("sparse", "buffer table has layout torch.sparse"),
    ],
)
def test_a_buffer_that_cannot_be_sent_is_refused(on: On, kind: str, says: str) -> None:
    refuses(says, refused.strange_buffer, kind, on=on)


@everywhere
def test_frozen_float8_is_broadcast(on: On) -> None:
    found = run(misuse.frozen_float8, on=on)
    assert found == [[0.0, 0.0, 1.0, 1.0]] * on.ranks


@everywhere
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (misuse.steps_on_a_destroyed_group, r"group has been destroyed.*build a new"),
        (refused.not_in_the_group, "process_group does not contain this rank"),
        (refused.two_ways_of_a_wire, "reduce_dtype=torch.float32 beside a wire"),
    ],
)
def test_a_group_or_wire_that_cannot_be_is_refused(
    on: On, fn: Callable[[], None], says: str
) -> None:
    refuses(says, fn, on=on)


# Processes wait until the deadline; they, too, say who waits where.
ALONE = {
    "virtual": (
        DeadlockError,
        r"rank 0 waits for .reducer\.abandon\(\) of step 0 on ran",
    ),
    "gloo": (RunTimeoutError, r"rank 0 is not in a .*\n.*`reducer\.abandon\(\)`"),
}


@everywhere
def test_a_rank_that_abandons_alone_is_named_with_the_call(on: On) -> None:
    error, says = ALONE[on.cluster]
    run_on(on, misuse.buffers_on_request)  # to start processes takes longer
    with pytest.raises(error, match=says):
        ol.run(
            misuse.abandons_on_rank_0,
            cluster=on.cluster,
            world_size=on.ranks,
            timeout_s=soon(2),
        )


@everywhere
def test_a_bucket_that_nobody_waits_for_names_the_reducer(on: On) -> None:
    found = run_on(on, misuse.ends_without_a_wait)
    assert len(found.warnings) == on.ranks
    for warning in found.warnings:
        assert "if a reducer launched it, reducer.wait()" in warning.message


@everywhere
def test_a_meta_model_is_refused(on: On) -> None:
    refuses("weight is on the meta device", refused.meta_model, on=on)


@everywhere
@with_each
def test_a_dropped_model_takes_its_reducer_along(on: On, reducer: str) -> None:
    assert run(misuse.how_many_live, reducer, on=on) == [(0, 0)] * on.ranks


@everywhere
def test_a_model_that_is_dropped_in_an_open_step_goes_too(on: On) -> None:
    assert run_on(on, misuse.dropped_while_open).values == (0,) * on.ranks


@everywhere
def test_remove_leaves_no_hook(on: On) -> None:
    found = run(misuse.removed_leaves_nothing, on=on)
    assert found == [(0, [1.0 + rank]) for rank in range(on.ranks)]


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bfloat16_wire_sums_in_float32(on: On, dtype: torch.dtype) -> None:
    for gradients in run(misuse.bfloat16_wire, dtype, on=on):
        for i, grad in enumerate(gradients):
            assert torch.equal(grad, torch.full_like(grad, 2.0**i * (1 + on.ranks) / 2))


@everywhere
def test_buffers_are_broadcast_on_request(on: On) -> None:
    assert run(misuse.buffers_on_request, on=on) == [5.0] * on.ranks


def large_model(**settings: float) -> tuple[int, int]:
    layers = [torch.nn.Linear(2048, 2048, bias=False) for _ in range(32)]
    reducer = ol.BucketedReducer(torch.nn.Sequential(*layers), **settings)
    return len(reducer.plan), reducer.plan.cap_bytes


def test_by_default_a_large_model_makes_four_buckets() -> None:
    found = ol.run(large_model, world_size=1, fake=True).values
    assert found == ((4, 512 * 2**20 // 3),)
    asked = ol.run(large_model, world_size=1, fake=True, bucket_mib=25).values
    assert asked == ((32, 25 * 2**20),)


SCRIPT = """
import torch, torch.distributed as dist, overlaplab as ol
dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
reducer = ol.BucketedReducer(model)
model(torch.ones(8, 64)).sum().backward()
reducer.wait()
dist.destroy_process_group()
"""


def test_a_script_that_keeps_its_reducer_to_the_end_ends_well(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    paths = os.pathsep.join(sys.path)
    ended = subprocess.run(  # seven of eight such scripts were aborted in their exit
        [*launch, "--nproc-per-node=2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
