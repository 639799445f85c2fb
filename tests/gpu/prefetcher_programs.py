"""Loops over a `BatchPrefetcher` with and without one of its waits.

They run unchanged on GPUs and on `virtual`: on a GPU a delay kernel makes the race
visible in values, on `virtual` it is a finding. A `Slot` without a wait stands for the
prefetcher's own.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import overlaplab as ol
from overlaplab import streams
from overlaplab.techniques.double_buffer import prefetcher
from overlaplab.techniques.double_buffer.slot import Slot
from tests.gpu.stream_programs import NUM, delay
from tests.techniques.double_buffer import odd_tensors as tensors
from tests.techniques.double_buffer import random_loaders as loaders

NUM_BATCHES = 6


class RefilledAtOnce(Slot):
    """The CPU does not wait before it fills pinned memory again."""

    def wait(self) -> None:
        self._in_flight = False
        self._forget()


class WrittenAtOnce(Slot):
    """Copies do not wait for who still reads an old batch."""

    def _come_after(self, owner: Any) -> None: ...


class HandedOutAtOnce(Slot):
    """Who gets a batch does not wait for its copy."""

    def hand_out(self, current: Any) -> None:
        self._arriving.clear()


class LetGoAtOnce(Slot):
    """Who gets the memory of a batch that nobody got does not wait for its copy."""

    def let_go(self) -> None: ...


class NotRecorded(Slot):
    """The allocator does not hear of a second stream."""

    def hand_out(self, current: Any) -> None:
        self._arriving.clear()
        super().hand_out(current)


@contextlib.contextmanager
def slots_of(kind: type[Slot]) -> Iterator[None]:
    """Meanwhile a prefetcher has slots of this kind."""
    before = prefetcher.Slot
    prefetcher.Slot = kind  # type: ignore[misc]
    try:
        yield
    finally:
        prefetcher.Slot = before  # type: ignore[misc]


def host_batches(num: int = NUM_BATCHES) -> list[Tensor]:
    return [torch.full((NUM,), float(i), device="cpu") for i in range(num)]


def poison() -> None:
    """Memory that is handed out next holds -1."""
    held = [torch.full((NUM,), -1.0, device=streams.device()) for _ in range(4)]
    streams.synchronize()
    del held


def last_of(outs: list[Tensor]) -> list[float]:
    streams.synchronize()
    return [float(out[-1].item()) for out in outs]


def slot_refilled(wait: bool) -> list[float]:
    """Steps are slow, so copies begin late; meanwhile the CPU fills the next ones."""
    poison()
    outs = []
    with slots_of(Slot if wait else RefilledAtOnce):
        for batch in ol.BatchPrefetcher(host_batches()):
            delay()
            outs.append(batch[-1:] + 0)
    return last_of(outs)


def batch_overwritten(wait: bool) -> list[float]:
    """Steps read their batch late, when the loop has dropped it."""
    poison()
    outs = []
    with slots_of(Slot if wait else WrittenAtOnce):
        for batch in ol.BatchPrefetcher(host_batches()):
            delay()
            outs.append(batch[-1:] + 0)
    return last_of(outs)


def batch_read_early(wait: bool) -> list[float]:
    """The stream of the copies is busy."""
    poison()
    outs = []
    with slots_of(Slot if wait else HandedOutAtOnce):
        fed = ol.BatchPrefetcher(host_batches())
        batches = iter(fed)
        with streams.stream(fed._copying):
            delay()
        for batch in batches:
            outs.append(batch[-1:] + 0)
    return last_of(outs)


def batch_of_another_stream(recorded: bool) -> list[float]:
    """A batch that was sent from one stream is used, late, and dropped on another."""
    side, outs = streams.Stream(), []
    side.wait_stream(streams.current_stream())
    with slots_of(Slot if recorded else NotRecorded):
        batches = iter(ol.BatchPrefetcher(host_batches(2)))
        outs.append(next(batches)[-1:] + 0)
        with streams.stream(side):
            batch = next(batches)
            delay()
            outs.append(batch[-1:] + 0)
        del batch
        # The memory of both batches, whichever comes first.
        mine = [torch.full((NUM,), -1.0, device=streams.device()) for _ in range(2)]
    return last_of(outs + mine)


def batch_dropped_on_its_way(wait: bool) -> list[float]:
    """The loop is left while a copy is still to come; its memory serves others."""
    with slots_of(Slot if wait else LetGoAtOnce):
        delay()
        for _ in ol.BatchPrefetcher(host_batches()):
            break
        del _
        mine = [torch.full((NUM,), -1.0, device=streams.device()) for _ in range(2)]
    return last_of(mine)


# With the wait, what is right.
PAIRS = {
    "slot_refilled": (slot_refilled, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    "batch_overwritten": (batch_overwritten, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    "batch_read_early": (batch_read_early, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    "batch_of_another_stream": (batch_of_another_stream, [0.0, 1.0, -1.0, -1.0]),
    "batch_dropped_on_its_way": (batch_dropped_on_its_way, [-1.0, -1.0]),
}


def run_pairs() -> dict[str, tuple[list[float], list[float]]]:
    """Of each program what it gives with the wait, and without."""
    found = {}
    for name, (program, _) in PAIRS.items():
        torch.cuda.empty_cache()  # no other block of this size is free
        found[name] = program(True), program(False)
    return found


class Watched(Slot):
    """Notes whether the CPU has to wait when it wants to fill."""

    held: ClassVar[list[bool]] = []

    def wait(self) -> None:
        self.held.append(self._in_flight and not self._copied.query())
        super().wait()


def waits_of_the_cpu() -> list[bool]:
    """Whether it was held at each fill, in a loop that reads its loss."""
    Watched.held.clear()
    with slots_of(Watched):
        for batch in ol.BatchPrefetcher(host_batches()):
            delay()
            (batch[-1:] + 0).item()
    return Watched.held


def idle_moments() -> list[int]:
    """The steps at whose launch the GPU had nothing to do, while the CPU runs ahead.

    Of a second epoch: in the first, CUDA hands out memory, and the CPU waits for that.
    """
    fed, done = ol.BatchPrefetcher(host_batches()), streams.Event()
    for _ in range(2):
        idle = []
        for number, batch in enumerate(fed):
            if number and done.query():
                idle.append(number)
            for _ in range(4):  # long beside the CPU's filling of a slot
                delay()
            batch.add_(1)
            done.record()
        streams.synchronize()
    return idle


def leaving_holds_the_cpu() -> bool:
    """Whether a loop that is left while the GPU is busy waits for it."""
    over = streams.Event()
    for _ in range(4):
        delay()
    over.record()
    for _ in ol.BatchPrefetcher(host_batches()):
        break
    del _
    held = bool(over.query())
    streams.synchronize()
    return held


def pinned_bytes() -> int:
    """Of pinned memory that torch cannot give back: somebody holds it, or a copy."""
    torch._C._host_emptyCache()
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def left_behind() -> dict[str, int]:
    """Threads, bytes of pinned memory in use and bytes of the GPU's: what is more."""

    def count() -> dict[str, int]:
        gc.collect()
        torch._C._host_emptyCache()  # type: ignore[attr-defined]  # looks what is free
        return {
            "threads": threading.active_count(),
            "pinned": pinned_bytes(),
            "device": torch.cuda.memory_allocated(),
        }

    def loops() -> None:
        fed = ol.BatchPrefetcher(host_batches())
        for _ in fed:
            pass
        for _ in fed:
            break
        pinned = [batch.pin_memory() for batch in host_batches()]
        for _ in ol.BatchPrefetcher(pinned):
            break
        with contextlib.suppress(ZeroDivisionError):
            for _ in fed:
                raise ZeroDivisionError

    torch.zeros(1, device="cuda")
    before = count()
    loops()
    streams.synchronize()
    after = count()
    return {name: after[name] - before[name] for name in before}


def pinned_in_use() -> int:
    """Bytes of pinned memory in the middle of a loop."""
    for _ in ol.BatchPrefetcher(host_batches()):
        return pinned_bytes()
    raise AssertionError


def exposed_copy() -> dict[str, float]:
    """Milliseconds of a step: on batches that are there, and on batches that come.

    Steps take some three times as long as copies of pinned memory.
    """
    num, numel = 20, 16 * 1024 * 1024  # 64 MiB
    factor = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    batch = torch.ones(numel).pin_memory()
    there = batch.to("cuda")

    def step(batch: Tensor) -> None:
        out = factor
        for _ in range(20):
            out = out @ factor
        batch.sum().add_(out[0, 0])

    def on_device() -> None:
        for _ in range(num):
            step(there)

    def fed() -> None:
        for batch in ol.BatchPrefetcher([pinned] * num):
            step(batch)

    def copies() -> None:
        for _ in range(num):
            there.copy_(pinned, non_blocking=True)

    pinned, found = batch, {}
    for name, loop in {"there": on_device, "fed": fed, "copies": copies}.items():
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            loop()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / num)
        found[name] = min(times)
    return found


def _pinned(made: torch.Tensor) -> torch.Tensor:
    """`made` in pinned memory, with its strides."""
    try:
        return made.detach().pin_memory()
    except RuntimeError:  # torch pins no tensor whose elements share bytes
        storage = made.untyped_storage().pin_memory()
        empty = torch.empty(0, dtype=made.dtype)
        return empty.set_(storage, made.storage_offset(), made.size(), made.stride())


def differences_of_odd_tensors() -> dict[str, str]:
    """What arrives otherwise than with `Tensor.to`, from pageable and pinned memory."""
    found, makers = {}, tensors.odd_tensors()
    for kind, made in makers.items():
        right = made.detach().to("cuda")
        for source in (made, _pinned(made)):
            (moved,) = ol.BatchPrefetcher([source])
            expanded = source.stride() if "expanded" in kind else right.stride()
            if (
                moved.tolist() != right.tolist()
                or moved.stride() not in (right.stride(), expanded)
                or moved.dtype != right.dtype
                or moved.requires_grad != source.requires_grad
            ):
                found[f"{kind}, pinned: {source.is_pinned()}"] = repr(moved)
    return found


def kinds_that_move_themselves() -> list[Any]:
    """A sparse and a quantized tensor, a subclass and a packed sequence, by value."""
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    batch = {
        "sparse": torch.eye(2).to_sparse(),
        "quantized": quantized,
        "subclass": torch.ones(2).as_subclass(tensors.Marked),
        "packed": pack_sequence([torch.ones(2), torch.zeros(1)]),
    }
    (moved,) = ol.BatchPrefetcher([batch])
    assert [type(moved[k]) for k in batch] == [type(batch[k]) for k in batch]
    assert all(moved[k].is_cuda for k in ("sparse", "quantized", "subclass"))
    return [
        moved["sparse"].to_dense().tolist(),
        moved["quantized"].dequantize().tolist(),
        moved["subclass"].tolist(),
        moved["packed"].data.tolist(),
    ]


def random_loaders(num: int) -> None:
    """As on a CPU, with pinned memory of torch."""
    for seed in range(num):
        loaders.compare(seed, Tensor.pin_memory)


def batches_of_workers() -> tuple[list[float], list[float]]:
    """A DataLoader with two workers that pins: without the prefetcher, and with it."""
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    loader = DataLoader(data, 3, num_workers=2, pin_memory=True)
    return (
        [float(batch.cuda().sum()) for (batch,) in loader],
        [float(batch.sum()) for (batch,) in ol.BatchPrefetcher(loader)],
    )


def batches_of_another_device() -> list[float]:
    """The process computes on GPU 0; batches go to GPU 1."""
    torch.cuda.set_device(0)
    outs = []
    for batch in ol.BatchPrefetcher(host_batches(), device="cuda:1"):
        assert batch.device == torch.device("cuda", 1)
        with torch.cuda.device(1):
            delay()
        outs.append(batch[-1:] + 0)
    torch.cuda.synchronize(1)
    return last_of(outs)
