"""Batches of a DataLoader lie in the host's memory; moving them is a copy."""

import time
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.hardware import find_hardware
from overlaplab.program import find_findings, resolve

WIDTH = 4


class Made(Dataset):
    """Items that `__getitem__` makes with torch."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index))


class OfNumpy(Made):
    def __getitem__(self, index):
        return torch.from_numpy(np.full(WIDTH, index, dtype=np.float32))


class Arrays(Made):
    def __getitem__(self, index):
        return np.full(WIDTH, index, dtype=np.float32)


class Held(Made):
    """Items that lie in the dataset from the start."""

    def __init__(self):
        self.items = [torch.full((WIDTH,), float(i)) for i in range(6)]

    def __getitem__(self, index):
        return self.items[index]


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(6):
            yield torch.full((WIDTH,), float(index))


def table():
    return TensorDataset(torch.arange(6.0).view(6, 1).expand(6, WIDTH).contiguous())


DATASETS = {
    "made": Made,
    "of_numpy": OfNumpy,
    "arrays": Arrays,
    "held": Held,
    "stream": Stream,
    "table": table,
}


def recorded(step, world_size=1, **options):
    values, program = run_virtual(step, world_size=world_size, **options)
    return values[0], program


def brief(program):
    return [(o.kind, o.name, o.stream) for o in program.ranks[0]]


def of_kind(program, *kinds):
    return [o for o in program.ranks[0] if o.kind in kinds]


def moved_sums(loader, non_blocking=True):
    """The sum of each batch, on the device."""
    sums = []
    for batch in loader:
        batch = batch[0] if isinstance(batch, list) else batch
        assert batch.device == torch.device("cpu") != ol.device()
        assert batch.is_pinned() == loader.pin_memory
        on_device = batch.to(ol.device(), non_blocking=non_blocking)
        assert on_device.device == ol.device() and not on_device.is_pinned()
        sums.append(on_device.sum())
    return sums


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", DATASETS)
def test_moving_a_batch_is_a_copy_that_the_cpu_waits_for_unless_it_is_pinned(
    kind, workers, pinned
):
    dataset = DATASETS[kind]()
    items = 6 * (workers if kind == "stream" and workers else 1)

    def step():
        loader = DataLoader(dataset, 3, num_workers=workers, pin_memory=pinned)
        return [total.item() for total in moved_sums(loader)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's "no accelerator is found"
        warnings.filterwarnings("ignore", message=".*fork.*")  # Python 3.12
        sums, program = recorded(step)
    assert sum(sums) == 60 * items / 6
    copies = of_kind(program, "memcpy")
    assert [(o.stream, o.read_bytes, dict(o.attributes)) for o in copies] == [
        ("default", 48, {"direction": "h2d", "pinned": pinned})
    ] * (items // 3)
    waits = [(o.name, o.after) for o in of_kind(program, "host_wait")]
    expected = [] if pinned else [("to", (o.index,)) for o in copies]
    assert [wait for wait in waits if wait[0] != "item"] == expected
    assert [o.name for o in of_kind(program, "compute")] == ["sum"] * len(copies)
    assert find_findings(program) == ()


def test_collating_is_the_cpus_work_in_the_order_of_the_program():
    def step():
        moved_sums(DataLoader(Made(), 3, pin_memory=True))

    _, program = recorded(step)
    batch = [
        ("host", "full", "cpu"),
        ("host", "full", "cpu"),
        ("host", "full", "cpu"),
        ("host", "stack", "cpu"),
        ("host", "pin_memory", "cpu"),
        ("memcpy", "copy h2d", "default"),
        ("compute", "sum", "default"),
    ]
    assert brief(program) == batch * 2
    stack, pin = program.ranks[0][3:5]
    assert (stack.read_bytes, stack.write_bytes) == (48, 48)
    assert (pin.read_bytes, pin.write_bytes) == (48, 48)
    assert stack.writes == pin.reads


def test_batches_of_workers_are_there_when_they_are_asked_for():
    def step():
        moved_sums(DataLoader(Made(), 3, num_workers=2, pin_memory=True))

    _, program = recorded(step)
    batch = [
        ("host", "next batch", "cpu"),
        ("memcpy", "copy h2d", "default"),
        ("compute", "sum", "default"),
    ]
    assert brief(program) == batch * 2
    arrival, copy, _ = program.ranks[0][:3]
    assert arrival.writes == copy.reads and arrival.write_bytes == 0


class Late(Made):
    """The worker that has the first item is the last to give one."""

    def __getitem__(self, index):
        if index == 0:
            time.sleep(0.5)
        return torch.full((WIDTH,), float(index))


def test_the_record_does_not_depend_on_which_worker_is_first():
    def step():
        loader = DataLoader(Late(), 1, num_workers=2, pin_memory=True)
        return [total.item() for total in moved_sums(loader)]

    value, program = recorded(step)
    assert value == [0, 4, 8, 12, 16, 20]
    numbers = [o.writes[0].storage for o in of_kind(program, "host")]
    assert numbers == sorted(numbers)


def test_the_cpu_takes_its_time_for_a_batch_where_the_hardware_says_so():
    dataset = Held()

    def step():
        moved_sums(DataLoader(dataset, 3, pin_memory=True))

    _, program = recorded(step)
    chalk = find_hardware("chalk")
    assert not resolve(program, chalk).where(lambda s: s.kind == "host").spans
    slow = replace(chalk, cpu_bytes_per_s=10**9, launch_ns=0)
    spans = resolve(program, slow).where(lambda s: s.kind == "host").spans
    assert [(s.name, s.start_ns, s.end_ns) for s in spans] == [
        ("stack", 0, 96),
        ("pin_memory", 96, 192),
        ("stack", 192, 288),
        ("pin_memory", 288, 384),
    ]
    copies = resolve(program, slow).where(lambda s: s.kind == "memcpy").spans
    assert [s.start_ns for s in copies] == [192, 384]


@pytest.mark.parametrize("computed", [False, True])
def test_a_dataset_on_the_device_stays_there(computed):
    def step():
        items = torch.arange(8.0).to(ol.device())
        if computed:
            items = (items * 2 + 0) / 2
        for (batch,) in DataLoader(TensorDataset(items), 4):
            assert batch.device == ol.device()
            last = batch
        return (last + items[:4]).tolist()

    value, program = recorded(step)
    assert value == [4, 6, 8, 10]
    assert not of_kind(program, "memcpy")
    assert [o.name for o in of_kind(program, "compute")][-3:] == [
        "stack",
        "stack",
        "add",
    ]


def test_a_dataset_may_move_its_items_to_the_device():
    class Moving(Held):
        def __getitem__(self, index):
            return self.items[index].to(ol.device())

    def step():
        dataset = Moving()
        dataset.items = [t.clone() for t in given]
        return [b.sum().item() for b in DataLoader(dataset, 3)]

    given = [torch.full((WIDTH,), float(i), device="cpu") for i in range(6)]
    value, program = recorded(step)
    assert value == [12, 48]
    assert len(of_kind(program, "memcpy")) == 6
    assert find_findings(program) == ()


def test_a_tensor_made_by_a_kernel_is_waited_for_before_a_loader_reads_it():
    def step():
        dataset = TensorDataset(torch.ones(6) + 1)
        return [batch.sum().item() for (batch,) in DataLoader(dataset, 3)]

    value, program = recorded(step)
    assert value == [6, 6]
    assert brief(program)[:4] == [
        ("compute", "ones", "default"),
        ("compute", "add", "default"),
        ("host_wait", "select", "cpu"),
        ("host", "stack", "cpu"),
    ]
    assert find_findings(program) == ()


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor

    def pin_memory(self):
        return Pair(self.x.pin_memory(), self.y.pin_memory())


def collate_pair(items):
    return Pair(torch.stack(items), torch.tensor(float(len(items))))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_a_type_of_ones_own_is_pinned_by_its_own_method(workers):
    def step():
        loader = DataLoader(
            Made(), 3, collate_fn=collate_pair, pin_memory=True, num_workers=workers
        )
        for pair in loader:
            assert pair.x.is_pinned() and pair.y.is_pinned()
            x = pair.x.to(ol.device(), non_blocking=True)
            y = pair.y.to(ol.device(), non_blocking=True)
        return (x.sum() * y).item()

    value, program = recorded(step)
    assert value == 144
    assert len(of_kind(program, "memcpy")) == 4
    assert {o.name for o in of_kind(program, "host_wait")} == {"item"}


@pytest.mark.parametrize("workers", [0, 2])
def test_nested_batches_keep_their_nesting(workers):
    class Nested(Made):
        def __getitem__(self, index):
            return {"x": torch.ones(2) * index, "more": (index, "name", np.ones(2))}

    def step():
        (batch,) = DataLoader(Nested(), 6, pin_memory=True, num_workers=workers)
        index, names, array = batch["more"]
        assert batch["x"].is_pinned() and index.is_pinned() and array.is_pinned()
        moved = index.to(ol.device(), non_blocking=True)
        return moved.tolist(), list(names), array.dtype

    value, _ = recorded(step)
    assert value == ([0, 1, 2, 3, 4, 5], ["name"] * 6, torch.float64)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_batch_size_items_come_as_they_are(workers):
    def step():
        loader = DataLoader(Stream(), None, num_workers=workers, pin_memory=True)
        return [total.item() for total in moved_sums(loader)]

    value, program = recorded(step)
    assert value == [0, 4, 8, 12, 16, 20]
    assert len(of_kind(program, "memcpy")) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_dataset_comes_to_the_rank(workers):
    class Broken(Made):
        def __getitem__(self, index):
            if index == 3:
                raise KeyError("item three")
            return super().__getitem__(index)

    def step():
        seen, batches = [], iter(DataLoader(Broken(), 2, num_workers=workers))
        try:
            for batch in batches:
                seen.append(batch.sum().item())
        except KeyError as error:
            for worker in getattr(batches, "_workers", ()):
                worker.terminate()  # torch would wait 5 s for it, on any cluster
            return seen, "item three" in str(error)

    value, _ = recorded(step)
    assert value == ([4], True)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_load_their_own_parts_in_any_number_of_epochs(workers):
    def step():
        sampler = torch.utils.data.DistributedSampler(Made())
        loader = DataLoader(
            Made(),
            2,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=bool(workers),
        )
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in loader:
                seen += batch.to(ol.device())[:, 0].tolist()
                torch.distributed.barrier()
        return seen

    values, program = run_virtual(step, world_size=2)
    for epoch in range(2):
        both = [n for seen in values for n in seen[3 * epoch : 3 * epoch + 3]]
        assert sorted(both) == [0, 1, 2, 3, 4, 5]
    assert find_findings(program) == ()


def test_an_empty_tensor_of_a_dataset_is_the_hosts_too():
    nothing = torch.empty(0)

    def step():
        (batch,) = DataLoader([nothing], None, pin_memory=True)
        return nothing.device, batch.is_pinned()

    assert recorded(step)[0] == (torch.device("cpu"), True)


def test_shuffling_is_no_kernel_and_no_wait():
    def step():
        for batch in DataLoader(Made(), 3, shuffle=True):
            batch.to(ol.device())

    _, program = recorded(step)
    assert {o.name for o in program.ranks[0]} == {"full", "stack", "copy h2d", "to"}


def test_a_pinned_batch_travels_on_a_stream_of_its_own():
    def step():
        side = streams.Stream()
        for batch in DataLoader(Made(), 3, pin_memory=True):
            with streams.stream(side):
                moved = batch.to(ol.device(), non_blocking=True)
            streams.current_stream().wait_stream(side)
            moved.record_stream(streams.current_stream())
            moved.sum()

    _, program = recorded(step)
    copies = of_kind(program, "memcpy")
    assert {o.stream for o in copies} == {"stream 1"}
    sums = of_kind(program, "compute")
    assert [o.after for o in sums] == [(o.index,) for o in copies]
    assert not of_kind(program, "host_wait")
    assert find_findings(program) == ()


def test_loaders_are_as_they_were_after_a_run_and_in_other_threads():
    before = (DataLoader._get_iterator, torch.Tensor.pin_memory)
    recorded(lambda: [b for b in DataLoader(Made(), 3)])
    assert (DataLoader._get_iterator, torch.Tensor.pin_memory) == before
    assert torch.cat(list(DataLoader(Made(), 4))).shape == (6, WIDTH)


def test_a_loader_works_where_tensors_have_no_values():
    def step():
        moved_sums(DataLoader(table(), 3, pin_memory=True))

    (_, real), (_, fake) = recorded(step), recorded(step, fake=True)
    assert brief(real) == brief(fake)


class Ranks(Made):
    """Computes, and says whether its process takes itself for a rank."""

    def __getitem__(self, index):
        assert torch.ones(2).sum() == 2
        return int(torch.distributed.is_initialized())


def test_a_process_that_a_rank_forks_is_no_rank():
    def step():
        value = torch.ones(2)
        torch.distributed.all_reduce(value, async_op=True).wait()  # not met yet
        loader = DataLoader(Ranks(), 6, num_workers=1)
        return next(iter(loader)).tolist(), value.tolist()

    values, program = run_virtual(step, world_size=2)
    assert values == (([0] * 6, [2, 2]),) * 2
    assert [o.name for o in of_kind(program, "compute")] == ["ones"]
