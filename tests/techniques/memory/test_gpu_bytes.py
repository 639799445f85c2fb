"""What is counted on a GPU, by an allocator of a few numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlaplab.techniques.memory.gpu_meter import GpuMeter

_MIB = 2**20


class _Allocator:
    """Tensors with what they asked for and what they got: PyTorch's counters of them.

    Args:
        large: (asked for, got), of each that is over 1 MiB.
        gone: the same, of each that was there at the peak and is no more.
        small: bytes of all others.
    """

    def __init__(
        self,
        large: list[tuple[int, int]],
        gone: list[tuple[int, int]],
        small: int,
        expandable: bool,
    ) -> None:
        self._large, self._gone = large, gone
        self._small, self._expandable = small, expandable
        self.cached: list[tuple[int, int]] = []  # of nobody, and kept

    def stats(self) -> dict[str, int]:
        found = {}
        for when, rows in ("current", self._large), ("peak", self._large + self._gone):
            asked, got = (sum(row[i] for row in rows) for i in (0, 1))
            numbers = {
                "allocated_bytes.all": got + self._small,
                "allocated_bytes.small_pool": self._small,
                "allocated_bytes.large_pool": got,
                "requested_bytes.large_pool": asked,
                "allocation.large_pool": len(rows),
            }
            found |= {f"{key}.{when}": number for key, number in numbers.items()}
        return found

    def snapshot(self) -> list[dict[str, Any]]:
        rows = self._large + self.cached
        blocks = [{"size": got, "requested_size": asked} for asked, got in rows]
        kind = {"segment_type": "large", "is_expandable": self._expandable}
        return [kind | {"blocks": blocks}]


def _meter(
    monkeypatch: pytest.MonkeyPatch,
    *large: tuple[int, int],
    gone: tuple[tuple[int, int], ...] = (),
    expandable: bool = False,
) -> tuple[GpuMeter, str]:
    made = _Allocator(list(large), list(gone), 1024, expandable)
    monkeypatch.setattr(torch.cuda, "memory_stats", made.stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.snapshot)
    meter = GpuMeter()
    return meter, meter.settle()


def test_sizes_that_are_cut_exactly_count_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even = (48 * _MIB, 48 * _MIB)
    meter, note = _meter(monkeypatch, even, even, gone=(even,))
    assert (meter.live_bytes(), note) == (96 * _MIB + 1024, "")
    assert meter.peak_bytes() == 144 * _MIB + 1024
    assert meter.rounded(48 * _MIB + 1) == 48 * _MIB + 512

    odd = (49 * _MIB, 49 * _MIB)
    meter, note = _meter(monkeypatch, odd, odd, expandable=True)
    assert (meter.peak_bytes(), note) == (98 * _MIB + 1024, "")


@pytest.mark.parametrize("got", [49, 50])
def test_of_other_sizes_the_most_is_counted_however_pieces_were_cut(
    monkeypatch: pytest.MonkeyPatch, got: int
) -> None:
    even, odd = (48 * _MIB, 48 * _MIB), (49 * _MIB, got * _MIB)
    meter, note = _meter(monkeypatch, even, odd)
    assert meter.live_bytes() == meter.peak_bytes() == 99 * _MIB + 1024 + 2 * 512
    assert meter.rounded(49 * _MIB) == 50 * _MIB + 512
    assert meter.rounded(_MIB) == _MIB
    assert "up to 1 MiB" in note and "expandable_segments:True" in note


def test_a_tensor_that_is_gone_counts_in_the_peak_and_its_size_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even, odd = (48 * _MIB, 48 * _MIB), (49 * _MIB, 50 * _MIB)
    meter, note = _meter(monkeypatch, even, gone=(odd,))
    assert "up to 1 MiB" in note
    assert meter.live_bytes() == 48 * _MIB + 1024 + _MIB + 512
    assert meter.peak_bytes() == 97 * _MIB + 1024 + 2 * (_MIB + 512)


def test_pieces_that_others_left_are_given_back_and_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even = (48 * _MIB, 48 * _MIB)
    made = _Allocator([even], [], 1024, expandable=False)
    made.cached = [(0, 49 * _MIB)]
    monkeypatch.setattr(torch.cuda, "memory_stats", made.stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.snapshot)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.cached.clear)
    meter = GpuMeter()
    with meter.open():
        assert meter.settle() == ""
