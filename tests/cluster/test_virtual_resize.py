"""`untyped_storage().resize_`: memory that is given back while its tensors live on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlaplab as ol
from overlaplab import streams
from overlaplab.errors import RankError, ReleasedMemoryError
from overlaplab.program import find_findings, live_bytes, peak_bytes

MIB = 2**20


def both(fn, size=1, **options):
    """The program of `fn`, which is the same with values and without."""
    real = ol.run(fn, world_size=size, **options).program
    fake = ol.run(fn, world_size=size, fake=True, **options).program
    assert fake.ranks[0] == real.ranks[0]
    assert fake.storages == tuple(s for s in real.storages if s.rank == 0)
    return real


def lives(program):
    return [
        (s.bytes, s.born, s.freed, s.stream, s.given_back)
        for s in program.storages
        if s.rank == 0 and s.bytes
    ]


def test_memory_that_is_given_back_and_taken_again_lives_twice():
    def step():
        full = torch.zeros(256)
        storage = full.untyped_storage()
        storage.resize_(0)
        other = torch.zeros(64)
        storage.resize_(1024)
        full.fill_(1.0)
        return other

    program = both(step)
    assert [op.name for op in program.ranks[0]] == ["zeros", "zeros", "fill_"]
    assert lives(program) == [
        (1024, 0, 1, "default", True),
        (256, 1, None, "default", False),
        (1024, 2, 3, "default", False),
    ]
    assert live_bytes(program) == [(0, 1024), (1, 256), (2, 1280), (3, 256)]


def test_other_sizes_are_other_memory_with_a_copy_between():
    def step():
        full = torch.arange(4.0)
        storage = full.untyped_storage()
        storage.resize_(24)
        storage.resize_(8)
        return full.new_empty(0).set_(storage, 0, (2,)).tolist()

    run = ol.run(step, world_size=1)
    ops = run.program.ranks[0]
    assert [(op.name, op.read_bytes) for op in ops if op.kind == "compute"] == [
        ("arange", 0),
        ("resize_", 16),
        ("resize_", 8),
    ]
    # Old and new are there together while the copy is launched.
    assert lives(run.program)[:2] == [
        (16, 0, 2, "default", True),
        (24, 1, 3, "default", True),
    ]
    assert run.values == ([0.0, 1.0],)


def test_the_stream_that_is_current_at_the_resize_owns_the_new_memory():
    def step():
        full = torch.zeros(256)
        side = streams.Stream()
        full.untyped_storage().resize_(0)
        with streams.stream(side):
            full.untyped_storage().resize_(1024)
            full.fill_(1.0)
        streams.current_stream().wait_stream(side)
        return full + 1

    program = both(step)
    assert [life[3] for life in lives(program)] == ["default", "stream 1", "default"]
    assert find_findings(program) == ()


def test_names_stay_with_the_tensor():
    def step():
        full = torch.zeros(256)
        streams.name_tensor(full, "ring")
        streams.name_tensor(full[:64], "weight")
        full.untyped_storage().resize_(0)
        full.untyped_storage().resize_(1024)
        full.zero_()

    program = both(step)
    last = program.storages[-1]
    assert last.name == "ring"
    named = {n.name for n in program.names if n.access.storage == last.storage}
    assert named == {"ring", "weight"}


@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_a_stream_still_reads_is_given_back_and_handed_out(waits):
    def step():
        full = torch.zeros(256)
        streams.name_tensor(full, "full")
        side = streams.Stream()
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            full.sum()
        if waits:
            streams.current_stream().wait_stream(side)
        full.untyped_storage().resize_(0)
        return full, torch.zeros(256)

    program = both(step)
    found = [(f.kind, f.name, f.ops) for f in find_findings(program)]
    assert found == ([] if waits else [("hazard", "full", (1, 2))])


@pytest.mark.parametrize("first", ["wait", "resize"])
def test_a_work_does_not_hold_memory_that_is_given_back(first):
    """It holds the tensor, which has none."""

    def step():
        full = torch.zeros(256)
        work = dist.all_reduce(full, async_op=True)
        if first == "wait":
            work.wait()
        full.untyped_storage().resize_(0)
        other = torch.ones(256)
        if first == "resize":
            work.wait()
        return full, other

    program = both(step, 2)
    hazards = [f.ops for f in find_findings(program) if f.rank == 0]
    assert hazards == ([] if first == "wait" else [(1, 2)])


def test_what_arrives_after_the_memory_went_is_seen_by_nobody():
    def step():
        full = torch.ones(4)
        work = dist.all_reduce(full, async_op=True)
        full.untyped_storage().resize_(0)
        work.wait()
        full.untyped_storage().resize_(16)
        return full.fill_(5.0)

    run = ol.run(step, world_size=2)
    assert [value.tolist() for value in run.values] == [4 * [5.0]] * 2


USES = {
    "a kernel": lambda t: t + 1,
    "a kernel that writes": lambda t: t.zero_(),
    "a list": lambda t: torch._foreach_zero_([t]),
    "a collective": dist.all_reduce,
    "the CPU": lambda t: t.tolist(),
}


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_use_without_memory_is_refused(use, fake):
    if fake and use == "the CPU":
        pytest.skip("fake tensors have no values")

    def step():
        full = torch.ones(256)
        streams.name_tensor(full, "full")
        full.untyped_storage().resize_(0)
        USES[use](full)

    with pytest.raises(RankError) as error:
        ol.run(step, world_size=1, fake=fake)
    cause = error.value.__cause__
    assert isinstance(cause, ReleasedMemoryError)
    assert "on rank 0, a tensor of" in str(cause) and "'full'" in str(cause)
    assert "test_virtual_resize.py:" in str(cause)


def test_what_needs_no_memory_is_not():
    def step():
        full = torch.ones(256)
        full.untyped_storage().resize_(0)
        return (
            full.view(2, 128).detach(),
            torch.zeros_like(full),
            torch.empty_like(full),
        )

    both(step)


def test_a_tensor_that_grows_by_itself_has_other_memory():
    def step():
        out, grown = torch.empty(0), torch.zeros(4)
        torch.add(torch.ones(256), 1, out=out)
        grown.resize_(512)
        return out, grown.zero_()

    program = both(step)
    assert live_bytes(program)[-1][1] == 1024 + 2048


def test_storages_of_the_host_and_of_other_threads_are_resized_as_ever():
    def step():
        batch = torch.ones(4, device="cpu")
        batch.untyped_storage().resize_(32)
        return batch

    program = ol.run(step, world_size=1).program
    assert [s.host for s in program.storages] == [True, True]
    assert [op.kind for op in program.ranks[0]] == ["host"]
    outside = torch.ones(4)
    outside.untyped_storage().resize_(0)
    assert outside.untyped_storage().nbytes() == 0


def fsdp(reshard, width=4096, zero_grad=False):
    def step():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        for _ in range(2):
            model(torch.ones(4, width)).sum().backward()
            if zero_grad:
                model.zero_grad()

    return step


@pytest.mark.parametrize(
    ("reshard", "zero_grad", "gpu_mib"), [(True, False, 769), (False, True, 897)]
)
def test_fsdp2_peaks_as_on_gpus(reshard, zero_grad, gpu_mib):
    """Two H200s: 769 MiB with resharding, 897 without.

    Nobody noted whether gradients were dropped between the steps: 769 is the peak of
    the steps that keep them (704 if not), 897 of those that drop them (1,153 if not).
    """
    program = ol.run(fsdp(reshard, zero_grad=zero_grad), fake=True).program
    assert peak_bytes(program) / MIB == pytest.approx(gpu_mib, rel=0.01)
    assert find_findings(program) == ()


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_peaks_as_high_with_values(reshard):
    step = fsdp(reshard, width=64)
    real, fake = (ol.run(step, fake=fake).program for fake in (False, True))
    assert peak_bytes(real) == peak_bytes(real, 1) == peak_bytes(fake)


def test_a_model_on_meta_takes_no_memory_and_launches_nothing():
    def build():
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
            model(torch.empty(4, 64)).sum().backward()
        torch.zeros(8, device=ol.device())

    program = ol.run(build, world_size=1).program
    assert [op.name for op in program.ranks[0]] == ["zeros"]
    assert peak_bytes(program, 0) == 32
