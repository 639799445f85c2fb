"""How a stream of CUDA is entered, with stand-ins for CUDA's own calls: no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from overlaplab.streams import _CudaProvider

FIRST, SIDE = (0, 0, 1), (7, 0, 1)  # (stream, device, type of device)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What was made current, in order; before it, the first stream of device 0."""
    found = [FIRST]

    def enter(*, stream_id: int, device_index: int, device_type: int) -> None:
        found.append((stream_id, device_index, device_type))

    for name, stands_in in {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentStream": lambda device: found[-1],
        "_cuda_setStream": enter,
    }.items():
        monkeypatch.setattr(torch._C, name, stands_in, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(1))
    return found


def stream(device: int = 0) -> SimpleNamespace:
    return SimpleNamespace(stream_id=7, device_index=device, device_type=1)


def test_a_stream_is_current_inside_its_block_and_the_old_one_behind_it(
    entered: list[tuple[int, int, int]],
) -> None:
    with pytest.raises(ZeroDivisionError), _CudaProvider().stream(stream()):
        assert entered == [FIRST, SIDE]
        raise ZeroDivisionError
    assert entered == [FIRST, SIDE, FIRST]


def test_a_stream_may_be_entered_inside_itself(
    entered: list[tuple[int, int, int]],
) -> None:
    side = _CudaProvider().stream(stream())
    with side, _CudaProvider().stream(stream()):
        pass
    assert entered == [FIRST, SIDE, SIDE, SIDE, FIRST]


@pytest.mark.parametrize("other", [None, stream(device=1)], ids=["none", "device 1"])
def test_what_is_of_no_or_another_device_is_entered_by_torch(
    entered: list[tuple[int, int, int]], other: object
) -> None:
    with _CudaProvider().stream(other) as by_torch:
        assert by_torch == 1
    assert entered == [FIRST]
