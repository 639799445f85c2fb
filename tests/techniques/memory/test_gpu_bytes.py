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
        small: bytes of all others.
    """

    def __init__(
        self, large: list[tuple[int, int]], small: int, expandable: bool
    ) -> None:
        self._large, self._small, self._expandable = large, small, expandable

    def stats(self) -> dict[str, int]:
        asked, got = (sum(row[i] for row in self._large) for i in (0, 1))
        numbers = {
            "allocated_bytes.all": got + self._small,
            "allocated_bytes.small_pool": self._small,
            "allocated_bytes.large_pool": got,
            "requested_bytes.large_pool": asked,
            "allocation.large_pool": len(self._large),
        }
        return {f"{k}.{w}": n for k, n in numbers.items() for w in ("current", "peak")}

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"size": got, "requested_size": asked} for asked, got in self._large]
        kind = {"segment_type": "large", "is_expandable": self._expandable}
        return [kind | {"blocks": blocks}]


def _meter(
    monkeypatch: pytest.MonkeyPatch,
    *large: tuple[int, int],
    expandable: bool = False,
) -> tuple[GpuMeter, str]:
    made = _Allocator(list(large), 1024, expandable)
    monkeypatch.setattr(torch.cuda, "memory_stats", made.stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", made.snapshot)
    meter = GpuMeter()
    return meter, meter.settle()


def test_sizes_that_are_cut_exactly_count_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even = (48 * _MIB, 48 * _MIB)
    meter, note = _meter(monkeypatch, even, even)
    assert (meter.live_bytes(), note) == (96 * _MIB + 1024, "")
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
