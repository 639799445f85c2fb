"""Ends and restarts, errors, odd tensors and refusals of `BatchPrefetcher`."""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import overlaplab as ol
from tests.techniques.double_buffer.late_copies import late_copies


def host(*values: float) -> list[Tensor]:
    return [torch.tensor([value] * 3, device="cpu") for value in values]


def on_virtual(program: Callable[[], Any], num_warnings: int = 0) -> Any:
    run = ol.run(program, world_size=1)
    assert len(run.warnings) == num_warnings, run.warnings
    return run.values[0]


# -- C03: ends and restarts


@pytest.mark.parametrize("num", [0, 1, 3])
def test_each_epoch_is_the_same_and_its_end_repeats(num: int) -> None:
    def program() -> Any:
        fed = ol.BatchPrefetcher(host(*range(num)))
        epochs = [[int(batch[0]) for batch in fed] for _ in range(2)]
        batches = iter(fed)
        left = [next(batches, None) is None for _ in range(num + 3)]
        return epochs, left, len(fed)

    expected = list(range(num))
    assert on_virtual(program) == ([expected] * 2, [False] * num + [True] * 3, num)


def test_a_loop_that_is_left_drops_what_is_ahead_and_the_next_begins_anew() -> None:
    def program() -> Any:
        fed = ol.BatchPrefetcher(host(0, 1, 2))
        for batch in fed:
            first = int(batch[0])
            break
        return first, [int(batch[0]) for batch in fed]

    assert on_virtual(program) == (0, [0, 1, 2])


def test_a_batch_that_is_asked_for_while_one_is_made_is_refused() -> None:
    """And the one that is made is lost to nobody."""

    def program() -> Any:
        says: list[str] = []

        def loader() -> Iterator[Tensor]:
            for batch in host(0, 1, 2):
                try:
                    next(batches)
                except RuntimeError as error:
                    says.append(str(error))
                yield batch

        batches = iter(ol.BatchPrefetcher(loader()))
        return [int(batch[0]) for batch in batches], says

    found, says = on_virtual(program)
    assert found == [0, 1, 2]
    assert len(says) == 3 and says[0].endswith("hold a lock around next()")


def test_a_generator_goes_on_where_the_last_loop_was_left() -> None:
    def program() -> Any:
        fed = ol.BatchPrefetcher(batch for batch in host(*range(6)))
        found = []
        for batch in fed:
            found.append(int(batch[0]))
            if len(found) == 2:
                break
        return found, [int(batch[0]) for batch in fed], [*fed]

    assert on_virtual(program) == ([0, 1], [2, 3, 4, 5], [])


def test_two_loops_at_once_do_not_disturb_each_other() -> None:
    def program() -> Any:
        fed = ol.BatchPrefetcher(host(*range(4)))
        return [(int(a[0]), int(b[0])) for a, b in zip(fed, fed, strict=True)]

    assert on_virtual(program) == [(i, i) for i in range(4)]


def test_batches_that_are_kept_stay_as_they_were() -> None:
    def program() -> Any:
        return [int(batch[0]) for batch in list(ol.BatchPrefetcher(host(*range(9))))]

    assert on_virtual(program) == list(range(9))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_so_many_batches_are_taken_ahead(depth: int) -> None:
    """The one that you have is among them."""
    taken: list[int] = []

    def loader() -> Iterator[Tensor]:
        for number, batch in enumerate(host(*range(6))):
            taken.append(number)
            yield batch

    with late_copies():
        seen = [len(taken) for _ in ol.BatchPrefetcher(loader(), depth=depth)]
    assert seen == [min(i + depth, 6) for i in range(6)]


# -- C04: the last partial batch


def test_the_last_batch_has_its_own_size() -> None:
    def program() -> Any:
        data = TensorDataset(torch.arange(10.0, device="cpu"))
        fed = ol.BatchPrefetcher(DataLoader(data, batch_size=4))
        assert len(fed) == 3
        return [batch.tolist() for (batch,) in fed]

    rows = [float(i) for i in range(10)]
    assert on_virtual(program) == [rows[:4], rows[4:8], rows[8:]]


# -- C07: state that changes between epochs


class OfEpoch(Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.epoch, index])


def test_nothing_of_an_epoch_is_taken_before_it_begins() -> None:
    def program() -> Any:
        data, found = OfEpoch(), []
        loader = DataLoader(data, batch_size=1)
        fed = ol.BatchPrefetcher(loader)
        for epoch in range(3):
            data.epoch = epoch
            found.append({int(batch[0, 0]) for batch in fed})
        return found

    assert on_virtual(program) == [{0}, {1}, {2}]


def test_set_epoch_between_two_epochs_is_in_time() -> None:
    def program() -> Any:
        data = TensorDataset(torch.arange(8, device="cpu"))
        sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        orders = []
        for feed in (loader, ol.BatchPrefetcher(loader)):
            for epoch in range(2):
                sampler.set_epoch(epoch)
                orders.append([batch.tolist() for (batch,) in feed])
        return orders

    plain, plain_next, fed, fed_next = on_virtual(program)
    assert plain == fed != plain_next == fed_next


# -- errors


class Broken(Exception):
    pass


def broken_at(place: int) -> Iterator[Tensor]:
    for number, batch in enumerate(host(*range(5))):
        if number == place:
            raise Broken(number)
        yield batch


@pytest.mark.parametrize("place", range(4))
def test_an_error_comes_in_its_place_and_once(place: int) -> None:
    with late_copies():
        batches, found = iter(ol.BatchPrefetcher(broken_at(place))), []
        with pytest.raises(Broken, match=str(place)) as caught:
            while True:
                found.append(int(next(batches)[0]))
        assert [next(batches, None) for _ in range(2)] == [None, None]
    assert found == list(range(place))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[-1].name == "broken_at"
    assert caught.value.__context__ is None


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_an_error_keeps_nothing(is_asked_for: bool) -> None:
    """The loop is left while it waits for its turn, or behind it."""
    gc.collect()
    gc.disable()
    try:
        with late_copies() as device:
            batches = iter(ol.BatchPrefetcher(broken_at(1)))
            next(batches)
            assert device.pinned
            if is_asked_for:
                with contextlib.suppress(Broken):
                    next(batches)
            dead = weakref.ref(batches)
            del batches
            assert dead() is None and not device.pinned
    finally:
        gc.enable()


def test_an_interrupt_in_the_loader_does_not_wait_for_its_turn() -> None:
    class Interrupted:
        def __init__(self) -> None:
            self.number = 0

        def __iter__(self) -> Interrupted:
            return self

        def __next__(self) -> Tensor:
            self.number += 1
            if self.number == 3:
                raise KeyboardInterrupt
            return host(self.number)[0]

    with late_copies():
        batches = iter(ol.BatchPrefetcher(Interrupted()))
        assert int(next(batches)[0]) == 1
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        # What was ahead is still there, and the loader goes on.
        assert [int(next(batches)[0]) for _ in range(2)] == [2, 4]


# -- memory


def test_nothing_of_a_batch_is_kept_when_it_was_dropped() -> None:
    with late_copies() as device:
        batches = iter(ol.BatchPrefetcher(host(*range(5))))
        for _ in range(3):
            batch = next(batches)
            dead = weakref.ref(batch)
            del batch
            assert dead() is None
        assert len(device.pinned) == 2  # a slot each


def test_at_its_end_an_epoch_lets_everything_go() -> None:
    """Also while somebody holds its iterator: DataLoader's has processes."""

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            source = broken_at(99)
            self.dead = weakref.ref(source)
            return source

    loader = Loader()
    with late_copies() as device:
        batches = iter(ol.BatchPrefetcher(loader))
        for _ in range(5):
            next(batches)
        assert device.pinned and loader.dead() is not None
        assert next(batches, None) is None
        assert not device.pinned and loader.dead() is None


def test_a_loop_that_is_left_lets_everything_go() -> None:
    with late_copies() as device:
        for _ in ol.BatchPrefetcher(host(*range(5))):
            assert device.pinned
            break
        assert not device.pinned


def test_what_is_pinned_lives_until_its_copy_has_ended_and_no_longer() -> None:
    with late_copies() as device:
        pinned = (device.pin(torch.full((3,), 1.0 + i)) for i in range(4))
        batches = iter(ol.BatchPrefetcher(pinned))
        alive = []
        for _ in range(4):
            next(batches)
            alive.append(len(device.pinned))
        assert alive == [2, 2, 2, 2]
        assert next(batches, None) is None and not device.pinned


def test_a_slot_grows_with_its_batches() -> None:
    sizes = [1, 100, 3, 1000, 2, 5]
    data = [torch.arange(float(size), device="cpu") for size in sizes]
    with late_copies():
        found = [batch.tolist() for batch in ol.BatchPrefetcher(data)]
    assert found == [batch.tolist() for batch in data]


def test_a_loader_that_overwrites_pinned_memory_is_refused() -> None:
    """C06, from the other side: the copy reads what the loader has filled."""

    def reusing(pin: Callable[[Tensor], Tensor], num: int) -> Iterator[Tensor]:
        buffers = [pin(batch) for batch in host(*[0.0] * num)]
        for number in range(6):
            yield buffers[number % num].fill_(number)

    with late_copies() as device:
        batches = iter(ol.BatchPrefetcher(reusing(device.pin, 1)))
        with pytest.raises(RuntimeError) as caught:
            next(batches)
        said = str(caught.value)
        assert "pinned" in said and "(3,)" in said and "take turns with 3" in said
        found = [int(b[0]) for b in ol.BatchPrefetcher(reusing(device.pin, 3))]
    assert found == list(range(6))
