"""Random loaders give the same items, in the same order, with the same errors."""

from __future__ import annotations

import threading

import pytest
import torch

import overlaplab as ol
from overlaplab.techniques.double_buffer import prefetcher
from tests.gpu import prefetcher_programs as programs
from tests.techniques.double_buffer import random_loaders as loaders

NUM = 2000  # 10,000: python -m tests.techniques.double_buffer.random_loaders 10000


def test_many_loaders_on_a_device_whose_copies_come_late() -> None:
    before = threading.active_count()
    loaders.compare_many(range(NUM))
    assert threading.active_count() == before


def test_late_copies_show_batches_that_are_handed_out_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetcher, "Slot", programs.HandedOutAtOnce)
    with pytest.raises(AssertionError):
        loaders.compare_many(range(200))


def many_on_virtual(first: int, num: int) -> None:
    for seed in range(first, first + num):
        loaders.compare(seed, torch.Tensor.pin_memory)


def test_loaders_on_the_virtual_cluster_are_free_of_hazards() -> None:
    run = ol.run(many_on_virtual, NUM, 100, world_size=1)
    assert run.warnings == ()


def test_on_a_cpu_the_loader_is_used_as_it_is() -> None:
    for seed in range(200):
        plan = loaders.plan(seed)
        plain, fed = (loaders.make_loader(plan, lambda t: t) for _ in range(2))
        found = loaders.watch(ol.BatchPrefetcher(fed, depth=plan.depth), plan)
        assert found == loaders.watch(plain, plan)
