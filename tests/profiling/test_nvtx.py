"""`ol.nvtx`: which ranges Nsight Systems would see, in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.errors import ProfileError
from tests.guards import GUARD_S


class FakeNvtx:
    """torch.cuda.nvtx on a machine without it."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def mark(self, name: str) -> None: ...

    def range_push(self, name: str) -> None:
        self.log.append(f"+{name}")

    def range_pop(self) -> None:
        self.log.append("-")


class FakeProfiler:
    def __init__(self, log: list[str]) -> None:
        self.start = lambda: log.append("capture")
        self.stop = lambda: log.append("end of capture")


def with_fakes(use: Any) -> list[str]:
    fake, patch = FakeNvtx(), pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(torch.cuda, "nvtx", fake)
        context.setattr(torch.cuda, "profiler", FakeProfiler(fake.log))
        use()
    return fake.log


def test_steps_and_annotations_are_ranges():
    def use() -> None:
        with ol.nvtx() as ranges:
            with ol.annotate("forward"):
                pass
            ranges.step()

    assert with_fakes(use) == ["+step 0", "+forward", "-", "-", "+step 1", "-"]


def test_the_capture_begins_after_the_warm_up():
    def use() -> None:
        with ol.nvtx(warmup=1) as ranges:
            ranges.step()

    assert with_fakes(use) == [
        "+step 0",
        "-",
        "capture",
        "+step 1",
        "-",
        "end of capture",
    ]


def test_an_exception_closes_every_range():
    def use() -> None:
        with pytest.raises(ZeroDivisionError), ol.nvtx(), ol.annotate("forward"):
            raise ZeroDivisionError

    assert with_fakes(use) == ["+step 0", "+forward", "-", "-"]
    assert not streams.ranges_are_wanted()


def ranges_of_a_step() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    reducer = ol.BucketedReducer(model, bucket_mib=1e-4)

    def use() -> None:
        with ol.nvtx():
            model(torch.rand(2, 8)).sum().backward()
            reducer.wait()

    return with_fakes(use)


def test_buckets_and_collectives_carry_the_words_of_our_spans():
    for log in ol.run(ranges_of_a_step, cluster="gloo", timeout_s=GUARD_S).values:
        assert log[:8] == [
            "+step 0",
            "+BucketedReducer",
            "+bucket 0",
            "+all_reduce",
            "-",
            "-",
            "-",
            "+BucketedReducer",
        ]
        assert log.count("+wait") >= 2


def test_a_torch_without_nvtx_is_said_with_the_way_out():
    if torch.version.cuda or torch.version.hip:  # with or without a GPU
        pytest.skip("this torch has NVTX")
    with pytest.raises(ProfileError, match=r"needs a build with CUDA.*ol.profile"):
        ol.nvtx().__enter__()
    assert not streams.ranges_are_wanted()


def test_a_bad_warm_up_is_refused():
    with pytest.raises(ValueError, match="0 or more, or None; got -1"):
        ol.nvtx(warmup=-1)


def test_nobody_pays_for_ranges_that_nobody_hears():
    assert not dist.is_initialized() and not streams.ranges_are_wanted()
    with torch.autograd.profiler.profile(use_kineto=True):
        assert streams.ranges_are_wanted()
