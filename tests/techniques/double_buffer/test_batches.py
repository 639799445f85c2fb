"""Odd tensors, objects that move themselves, and devices of `BatchPrefetcher`."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import overlaplab as ol
from overlaplab import streams
from tests.techniques.double_buffer.late_copies import late_copies
from tests.techniques.double_buffer.odd_tensors import odd_tensors
from tests.techniques.double_buffer.test_prefetcher import host, on_virtual

# -- tensors


@pytest.mark.parametrize("kind", odd_tensors())
def test_odd_tensors_arrive_as_with_to(kind: str) -> None:
    def program() -> Any:
        batch = odd_tensors()[kind]
        (moved,) = ol.BatchPrefetcher([batch])
        with torch.no_grad():
            right = batch.to(ol.device())
        assert moved.device == ol.device()
        assert moved.tolist() == right.tolist()
        assert type(moved) is type(batch) and moved.dtype == right.dtype
        assert moved.requires_grad == batch.requires_grad and moved.is_leaf
        return moved.stride(), right.stride(), batch.stride()

    moved, right, before = on_virtual(program)
    assert moved == (before if kind.startswith("expanded") else right)


def test_an_expanded_tensor_travels_as_what_it_holds() -> None:
    def program() -> None:
        for _ in ol.BatchPrefetcher([torch.ones(4, device="cpu").expand(1000, 4)]):
            pass

    (ops,) = ol.run(program, world_size=1).program.ranks
    assert [op.read_bytes for op in ops if op.kind == "memcpy"] == [16]


def test_gradients_reach_a_leaf_of_the_batch() -> None:
    def program() -> Any:
        (x,) = ol.BatchPrefetcher([torch.ones(3, device="cpu", requires_grad=True)])
        (x * 2).sum().backward()
        return x.grad.tolist()

    assert on_virtual(program) == [2.0, 2.0, 2.0]


def test_a_tensor_with_a_graph_behind_it_is_refused_in_its_place() -> None:
    weight = torch.ones(3, requires_grad=True)
    with late_copies():
        batches = iter(ol.BatchPrefetcher([*host(1), weight * 2]))
        next(batches)
        with pytest.raises(ValueError, match=r"shape \(3,\).*detach\(\) it in the"):
            next(batches)


def test_a_batch_that_is_there_already_stays_where_it_is() -> None:
    def program() -> Any:
        there = torch.ones(3, device=ol.device())
        (batch,) = ol.BatchPrefetcher([[there, "beside"]])
        return batch[0] is there

    assert on_virtual(program)


def test_training_goes_on_behind_an_inference_mode() -> None:
    def program() -> Any:
        weight = torch.ones(3, device=ol.device(), requires_grad=True)
        batches = iter(ol.BatchPrefetcher(host(1, 2, 3)))
        with torch.inference_mode():
            next(batches)
        for batch in batches:
            (batch * weight).sum().backward()
        assert weight.grad is not None
        return weight.grad.tolist()

    assert on_virtual(program) == [5.0, 5.0, 5.0]


def test_sparse_tensors_and_packed_sequences_move_themselves() -> None:
    def program() -> Any:
        sparse = torch.eye(2, device="cpu").to_sparse()
        packed = pack_sequence([torch.ones(2, device="cpu"), torch.zeros(1)])
        batch, *_ = ol.BatchPrefetcher([{"sparse": sparse, "packed": packed}])
        assert type(batch["packed"]) is PackedSequence
        return batch["sparse"].to_dense().tolist(), batch["packed"].data.tolist()

    assert on_virtual(program) == ([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0, 1.0])


class Graph:
    """As batches of graph libraries."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.was_pinned = x, x.is_pinned()

    def pin_memory(self) -> Graph:
        return type(self)(self.x.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        moved = type(self)(self.x.to(device, non_blocking=non_blocking))
        moved.was_pinned = self.was_pinned
        return moved


class Recorded(Graph):
    def record_stream(self, stream: Any) -> None:
        self.x.record_stream(stream)


class OnlyTo:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> OnlyTo:  # takes no `non_blocking`
        return OnlyTo(self.x.to(device))


class Pins:
    def __init__(self) -> None:
        self.pinned = False

    def pin_memory(self) -> Pins:
        self.pinned = True
        return self


def test_objects_with_methods_of_their_own_are_pinned_and_moved() -> None:
    def program() -> Any:
        batch = Graph(*host(1)), OnlyTo(*host(2)), Pins()
        ((graph, only, pins),) = ol.BatchPrefetcher([batch])
        assert graph.x.device == only.x.device == ol.device()
        assert (type(graph), type(only)) == (Graph, OnlyTo)
        return graph.was_pinned, pins.pinned, graph.x.tolist(), only.x.tolist()

    assert on_virtual(program) == (True, True, [1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("kind", [Graph, Recorded])
def test_objects_move_beside_the_step_if_their_memory_can_be_recorded(
    kind: type[Graph],
) -> None:
    def program() -> list[float]:
        sums = []
        for graph in ol.BatchPrefetcher(kind(x) for x in host(*range(6))):
            sums.append((graph.x * 2).sum())
            del graph  # before the next copy is launched
        streams.synchronize()
        return [float(total) for total in sums]

    run = ol.run(program, world_size=1)
    assert run.warnings == ()
    assert run.values[0] == [6.0 * i for i in range(6)]
    copies = [op for op in run.program.ranks[0] if op.kind == "memcpy"]
    on_steps_stream = {op.stream == "default" for op in copies}
    assert len(copies) == 6 and on_steps_stream == {kind is Graph}


def test_batches_of_a_loader_that_pins_are_copied_from_where_they_are() -> None:
    def program() -> None:
        data = TensorDataset(torch.arange(8.0, device="cpu"))
        for (batch,) in ol.BatchPrefetcher(DataLoader(data, 4, pin_memory=True)):
            batch.add_(1)

    (ops,) = ol.run(program, world_size=1).program.ranks
    copies = [op for op in ops if op.kind == "memcpy"]
    assert [op.attributes["pinned"] for op in copies] == [True, True]
    fills = [op for op in ops if op.kind == "host" and op.label.startswith("batch")]
    assert fills == []


# -- streams of the loop


@pytest.mark.parametrize("keep", ["join", "record_stream"])
def test_a_loop_may_use_a_batch_on_streams_of_its_own(keep: str) -> None:
    """As any tensor: it joins them before it drops the batch, or says who uses it."""

    def program() -> list[float]:
        own, outs = streams.Stream(), []
        for batch in ol.BatchPrefetcher(host(*range(5))):
            own.wait_stream(streams.current_stream())
            with streams.stream(own):
                outs.append(batch * 2)
            if keep == "join":
                streams.current_stream().wait_stream(own)
            else:
                batch.record_stream(own)
        streams.synchronize()
        return [float(out[0]) for out in outs]

    assert on_virtual(program) == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_each_batch_may_be_asked_for_on_another_stream() -> None:
    def program() -> list[float]:
        own = [streams.Stream() for _ in range(2)]
        batches, outs = iter(ol.BatchPrefetcher(host(*range(6)))), []
        for number in range(6):
            with streams.stream(own[number % 2]):
                batch = next(batches)
                outs.append(batch * 2)
        streams.synchronize()
        return [float(out[0]) for out in outs]

    assert on_virtual(program) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_batches_without_values_are_copied_on_the_clock() -> None:
    def program() -> list[tuple[int, ...]]:
        data = [torch.zeros(2**20, n, device="cpu") for n in (1, 2)]
        return [tuple(batch.shape) for batch in ol.BatchPrefetcher(data)]

    run = ol.run(program, world_size=1, fake=True)
    assert run.values[0] == [(2**20, 1), (2**20, 2)] and run.warnings == ()
    copies = [op for op in run.program.ranks[0] if op.kind == "memcpy"]
    assert [op.read_bytes for op in copies] == [2**22, 2**23]


# -- devices and arguments


def test_a_prefetcher_that_is_made_outside_serves_each_rank() -> None:
    fed = ol.BatchPrefetcher([torch.ones(2), torch.zeros(2)])

    def program() -> Any:
        return [batch.tolist() for batch in fed]

    assert ol.run(program, world_size=3).values == ([[1.0, 1.0], [0.0, 0.0]],) * 3


def test_named_devices_of_the_virtual_cluster() -> None:
    def program() -> Any:
        on_gpu, on_cpu = (
            next(iter(ol.BatchPrefetcher(host(1), device=name)))
            for name in ("cuda", "cpu")
        )
        return on_gpu.device == ol.device(), on_cpu.device == torch.device("cpu")

    assert on_virtual(program) == (True, True)


def test_on_a_cpu_batches_pass_as_they_are_and_none_is_taken_ahead() -> None:
    data, taken = host(1, 2, 3), []
    loader = (taken.append(i) or batch for i, batch in enumerate(data))
    for number, batch in enumerate(ol.BatchPrefetcher(loader)):
        assert batch is data[number] and len(taken) == number + 1


@pytest.mark.parametrize("depth", [0, -1, 1.5, True, None])
def test_a_depth_that_is_none_is_refused(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"integer from 1 on, got {depth!r}"):
        ol.BatchPrefetcher([], depth=depth)


def test_a_device_without_streams_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device meta: expected cpu.*goes to cpu"):
        iter(ol.BatchPrefetcher([], device="meta"))


def test_a_loader_without_a_length_has_none() -> None:
    with pytest.raises(TypeError):
        len(ol.BatchPrefetcher(iter([])))
    assert list(ol.BatchPrefetcher(iter([1, 2]))) == [1, 2]


def test_one_prefetcher_serves_one_device_and_then_another() -> None:
    fed = ol.BatchPrefetcher(host(1, 2))
    for device in (late_copies, late_copies, contextlib.nullcontext):
        with device():
            assert [int(batch[0]) for batch in fed] == [1, 2]


def test_what_was_ahead_on_another_device_is_not_handed_out() -> None:
    fed = ol.BatchPrefetcher(iter(host(*range(4))))
    with late_copies():
        for batch in fed:
            assert int(batch[0]) == 0
            break
    with late_copies():
        assert [int(batch[0]) for batch in fed] == [2, 3]
