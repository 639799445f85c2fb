"""What some ranks save, others load: bit by bit, by name, or not at all."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import overlaplab as ol
from overlaplab.techniques.zero.boxes import boxes_of_range
from tests.ranks import run_untimed
from tests.techniques.zero import misuse, saving

CLUSTERS = pytest.mark.parametrize("cluster", ["virtual", "gloo"])
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*TypedStorage is deprecated"
)


def values(
    fn: Callable[..., Any], *args: Any, cluster: str = "virtual", world_size: int = 2
) -> tuple[Any, ...]:
    run = run_untimed(fn, *args, cluster=cluster, world_size=world_size)
    assert run.warnings == ()
    return run.values


def assert_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    assert set(found) == set(expected)
    for name, want in expected.items():
        if isinstance(want, Tensor):
            torch.testing.assert_close(
                found[name], want, rtol=tolerance, atol=tolerance, msg=name
            )
        elif isinstance(want, dict):
            assert_equal(found[name], want)
        else:
            assert found[name] == want


@given(st.data())
def test_boxes_hold_a_range_once_and_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    whole = torch.arange(numel).reshape(shape)
    boxes = list(boxes_of_range(shape, begin, end))
    found: list[int] = []
    for offsets, sizes in boxes:
        assert 0 not in sizes
        box = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        found += box.flatten().tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@cache
def saved_by(cluster: str, world_size: int, kind: str = "AdamW") -> Any:
    """A folder, and what `start_and_save` returned on rank 0."""
    kept = TemporaryDirectory()
    folder = Path(kept.name) / "checkpoint"
    found = values(
        saving.start_and_save, folder, kind, cluster=cluster, world_size=world_size
    )
    return folder, found[0], kept


@pytest.mark.parametrize(
    ("cluster", "by", "into", "kind"),
    [
        ("virtual", 2, 2, "AdamW"),
        ("virtual", 2, 3, "AdamW"),
        ("virtual", 4, 2, "AdamW"),
        ("virtual", 2, 2, "sgd"),
        ("virtual", 2, 3, "NAdam"),
        ("gloo", 2, 2, "AdamW"),
        ("gloo", 2, 3, "AdamW"),
        ("gloo", 3, 1, "AdamW"),
        ("gloo", 4, 2, "AdamW"),
    ],
)
def test_a_checkpoint_of_some_ranks_goes_on_with_others(
    cluster: str, by: int, into: int, kind: str
) -> None:
    folder, (saved, trained), _ = saved_by(cluster, by, kind)
    for loaded, went_on in values(
        saving.load_and_go_on, folder, kind, cluster=cluster, world_size=into
    ):
        assert_equal(loaded, saved)
        # A mean over other parts of the same rows differs in the last of 24 bits, and
        # AdamW makes small gradients large.
        assert_equal(went_on, trained, 0.0 if by == into else 1e-5)


def test_what_a_model_and_an_optimizer_had_before_does_not_matter() -> None:
    folder, (saved, trained), _ = saved_by("virtual", 2)
    for loaded, went_on in values(saving.load_after_steps, folder):
        assert_equal(loaded, saved)
        assert_equal(went_on, trained)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved = values(saving.save_in_the_background, folder, cluster="gloo")[0]
    for loaded in values(saving.load_the_model, folder):
        assert_equal(loaded, saved)


def test_a_model_that_is_not_sharded_loads_it_and_goes_on() -> None:
    folder, (saved, trained), _ = saved_by("virtual", 3)
    model, optimizer = saving.make_alone(2)
    saving.load_alone(folder, model, optimizer)
    assert_equal(model.state_dict(), saved)
    saving.train_alone(model, optimizer, range(saving.NUM_STEPS, 2 * saving.NUM_STEPS))
    assert_equal(model.state_dict(), trained, 1e-5)  # as above


def test_it_is_a_file_of_plain_tensors_by_torchs_own_converter(tmp_path: Path) -> None:
    folder, (saved, _), _ = saved_by("virtual", 3)
    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert plain["step"] == saving.NUM_STEPS
    assert_equal(plain["model"], saved)
    shapes = {
        name: tuple(its["exp_avg"].shape)
        for name, its in plain["optimizer"]["state"].items()
    }
    assert shapes["blocks.1.conv.weight"] == (5, 3, 3, 3)
    assert shapes["blocks.1.gain"] == ()
    assert plain["optimizer"]["param_groups"][1]["lr"] == 0.03


@pytest.mark.parametrize("zero_saves", [True, False])
def test_fsdp2_and_zero3_load_each_others(tmp_path: Path, zero_saves: bool) -> None:
    programs = [saving.layers_of_zero, saving.layers_of_fsdp2]
    save, load = programs if zero_saves else programs[::-1]
    cluster = "virtual" if zero_saves else "gloo"
    saved, moments = zip(
        *values(save, tmp_path / "checkpoint", False, cluster=cluster), strict=True
    )
    loaded, after = zip(
        *values(load, tmp_path / "checkpoint", True, world_size=3), strict=True
    )
    assert_equal(loaded[0], saved[0])
    whole, parts = (after[0], moments) if zero_saves else (moments[0], after)
    for name, want in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), want.flatten())


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (
            "names",
            (
                "more.weight is not in the checkpoint",
                "blocks.2.gain is in the checkpoint alone",
            ),
        ),
        (
            "shapes",
            (
                "blocks.1.back.weight is of shape (3, 5, 1, 1) there and of shape "
                "(3, 5, 3, 3) here",
                "blocks.0.seen is of shape (2,) there and of shape (5,) here",
            ),
        ),
        ("groups", ("is not in group 0 of the checkpoint",)),
        ("optimizers", ("has 2 groups of optimizers, and 1 are to be loaded",)),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    change: str, facts: tuple[str, ...]
) -> None:
    folder, _, _ = saved_by("virtual", 2)
    for message, is_unchanged in values(saving.does_not_fit, folder, change):
        assert "does not fit this model; nothing was loaded:" in message
        for fact in facts:
            assert fact in message
        assert is_unchanged


def test_a_file_that_is_missing_changes_nothing(tmp_path: Path) -> None:
    folder = shutil.copytree(saved_by("virtual", 2)[0], tmp_path / "checkpoint")
    (folder / "__1_0.distcp").unlink()
    for message, is_unchanged in values(saving.does_not_fit, folder, "files"):
        assert "__1_0.distcp" in message
        assert is_unchanged


def test_a_checkpoint_with_a_prefix_is_found_by_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved = values(saving.save_the_model, folder, "app")[0]
    for loaded in values(saving.load_the_model, folder, "app", world_size=3):
        assert_equal(loaded, saved)
    with pytest.raises(ol.RankError, match="no key that begins with 'model"):
        ol.run(saving.load_the_model, folder)


@pytest.mark.parametrize("wrong", saving.REFUSED, ids=lambda fn: fn.__name__)
def test_what_cannot_be_saved_is_refused_by_name(wrong: Callable[[], None]) -> None:
    with pytest.raises(ol.OverlaplabError) as caught:
        ol.run(wrong)
    for fact in saving.REFUSED[wrong]:
        assert fact in str(caught.value)


@CLUSTERS
@pytest.mark.parametrize("who_has_it", ["everybody", "rank 0"])
def test_full_values_are_loaded_into_pieces(cluster: str, who_has_it: str) -> None:
    other = saving.make_alone(1)[0].state_dict()
    other["_extra_state"] = {"note": "other", "count": torch.ones(2)}
    other["blocks.0.seen"] += 3
    for loaded in values(saving.load_full, who_has_it, cluster=cluster, world_size=3):
        assert_equal(loaded, other)


@CLUSTERS
def test_full_values_that_do_not_fit_are_refused_on_every_rank(cluster: str) -> None:
    for message, is_unchanged in values(saving.load_too_little, cluster=cluster):
        assert "the state dict of rank 0 does not fit" in message
        assert "blocks.1.gain is not in the state dict" in message
        assert "start.bias is of shape (3,) there and of shape (4,) here" in message
        assert is_unchanged


def test_writes_to_the_shards_count_and_those_through_data_are_lost() -> None:
    """As the docstring of Zero3 says."""
    (before, after), _ = values(misuse.doubles_weights, "through .data")
    assert after == before
    (_, by_shards), _ = values(misuse.doubles_weights, "in the shards")
    (_, by_values), _ = values(misuse.doubles_weights, "by full values")
    assert by_shards == by_values != before
