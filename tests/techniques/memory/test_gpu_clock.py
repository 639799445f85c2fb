"""A block's time on a GPU, its launches out of the way: on a GPU of two numbers."""

from __future__ import annotations

import pytest

from overlaplab import streams
from overlaplab.techniques.memory import gpu_meter


class _Gpu:
    """A CPU that launches, and a queue that is worked off; both have a clock."""

    def __init__(self) -> None:
        self.cpu_ns = self.gpu_ns = 0

    def launch(self, cpu_ns: int, gpu_ns: int) -> None:
        self.cpu_ns += cpu_ns
        self.gpu_ns = max(self.gpu_ns, self.cpu_ns) + gpu_ns

    def synchronize(self) -> None:
        self.cpu_ns = max(self.cpu_ns, self.gpu_ns)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    made = _Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(made.gpu_ns, made.cpu_ns)

        def synchronize(self) -> None:
            made.synchronize()

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e6

    monkeypatch.setattr(streams, "Event", Event)
    monkeypatch.setattr(streams, "synchronize", made.synchronize)
    monkeypatch.setattr(gpu_meter.time, "perf_counter_ns", lambda: made.cpu_ns)
    monkeypatch.setattr(gpu_meter, "keep_busy", lambda ns: made.launch(0, ns))
    return made


@pytest.mark.parametrize("launch_us", [1, 90, 110, 700])
def test_a_blocks_time_is_its_kernels_however_late_they_are_launched(
    gpu: _Gpu, launch_us: int
) -> None:
    def step() -> None:
        for _ in range(10):
            gpu.launch(launch_us * 1000, 100_000)

    assert gpu_meter.GpuMeter().step_ns(step) == 1_000_000


def test_a_block_that_waits_for_the_gpu_costs_its_launches_too(gpu: _Gpu) -> None:
    def step() -> None:
        gpu.launch(50_000, 100_000)
        gpu.synchronize()

    # The first of a row of six found its launch hidden behind other work.
    assert gpu_meter.GpuMeter().step_ns(step) == (100_000 + 5 * 150_000) // 6
