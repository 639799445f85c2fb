"""A run: deterministic, clean on every way out, and its errors tell what happened."""

import gc
import random
import threading
import time

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.cluster.virtual import ranks, run_virtual
from overlaplab.errors import RankError, RunTimeoutError


def train_step():
    """Forward, backward with hooks on a side stream, update: everything at once."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    comm, works = streams.Stream(), []

    def hook(p):
        comm.wait_stream(streams.current_stream())
        with streams.stream(comm):
            works.append(dist.all_reduce(p.grad, async_op=True))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    x = torch.randn(4, 8) + dist.get_rank()
    model(x).square().mean().backward()
    for work in works:
        work.wait()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    return [p.detach().clone() for p in model.parameters()]


def test_twenty_runs_give_equal_programs_and_values_whatever_the_machine_does():
    stop = threading.Event()

    def disturb():
        while not stop.is_set():
            sum(range(1000))

    first_values, first = run_virtual(train_step, world_size=3)
    busy = threading.Thread(target=disturb)
    busy.start()
    try:
        for _ in range(20):
            values, program = run_virtual(train_step, world_size=3)
            assert program == first
            for ours, theirs in zip(values, first_values, strict=True):
                assert all(map(torch.equal, ours, theirs))
    finally:
        stop.set()
        busy.join()


def test_every_rank_draws_the_same_numbers_and_the_callers_are_untouched():
    def step():
        first = torch.rand(1).item(), random.random(), numpy.random.rand()
        dist.barrier()  # the others draw theirs
        return first, (torch.rand(1).item(), random.random(), numpy.random.rand())

    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    expected = torch.rand(2)[1].item(), random.random(), numpy.random.rand()
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    torch.rand(1)
    values, _ = run_virtual(step, world_size=3)
    assert values[0] == values[1] == values[2]
    assert values[0][0] != values[0][1]
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_a_rank_that_seeds_itself_keeps_its_numbers_across_turns():
    def step():
        torch.manual_seed(dist.get_rank())
        dist.barrier()
        return torch.rand(1).item()

    values, _ = run_virtual(step, world_size=3)
    for rank, value in enumerate(values):
        assert value == torch.rand(1, generator=torch.Generator().manual_seed(rank))


def test_the_first_cause_is_reported_and_the_other_ranks_are_released():
    cleaned = []

    def step(log=cleaned):
        try:
            if dist.get_rank() == 2:
                raise KeyError("bad batch")
            dist.all_reduce(torch.ones(1))
            torch.ones(1) + 1
        finally:
            threading.current_thread().cleaned = True

    with pytest.raises(RankError) as failed:
        run_virtual(step, world_size=4)
    error = failed.value
    assert error.rank == 2 and isinstance(error.__cause__, KeyError)
    line = step.__code__.co_firstlineno + 3
    assert str(error) == f"rank 2 failed (line {line} of step): KeyError: 'bad batch'"
    assert "in step" in error.remote_traceback
    assert "overlaplab" not in error.remote_traceback
    assert not [t for t in threading.enumerate() if "virtual rank" in t.name]


def assert_clean():
    assert not dist.is_initialized()
    assert type(dist.distributed_c10d._world).__name__ == "_World"
    assert gc.isenabled()
    assert not [t for t in threading.enumerate() if "virtual rank" in t.name]
    assert not torch.utils._python_dispatch._is_in_torch_dispatch_mode
    assert streams.provider() is streams._CPU or torch.cuda.is_available()
    assert run_virtual(lambda: 1, world_size=2)[0] == (1, 1)


@pytest.mark.parametrize("ending", ["return", "raise", "exit", "deadlock"])
def test_the_process_is_clean_after_every_ending(ending):
    def step():
        dist.new_group()
        if dist.get_rank() == 1:
            if ending == "raise":
                raise ValueError
            if ending == "exit":
                raise SystemExit(3)
            if ending == "deadlock":
                return
        dist.barrier()

    try:
        run_virtual(step, world_size=3)
    except Exception as error:
        assert ending != "return", error
    else:
        assert ending == "return"
    assert_clean()


@pytest.mark.parametrize("where", ["python", "waiting", "collectives"])
def test_an_interrupt_leaves_the_process_clean(where):
    """As a notebook's stop button does: KeyboardInterrupt in the caller's thread."""
    import _thread

    def step(where):
        x = torch.ones(1)
        while True:
            if where == "collectives":
                dist.all_reduce(x)
            elif where == "waiting":
                time.sleep(0.01)
            else:
                sum(range(100))

    timer = threading.Timer(0.3, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_virtual(step, (where,), world_size=3)
    timer.join()
    assert_clean()


def test_a_run_past_its_deadline_says_where_each_rank_was():
    def step():
        if dist.get_rank() == 1:
            while True:
                time.sleep(0.01)
        dist.barrier()

    with pytest.raises(RunTimeoutError) as late:
        run_virtual(step, world_size=3, timeout_s=0.1)
    lines = str(late.value).splitlines()
    first = step.__code__.co_firstlineno
    assert late.value.on_the_wall
    assert lines[0] == (
        "the run passed its deadline of 1 s, with CPU time left: it slept or waited."
    )
    assert f"rank 0 was at test_virtual_run.py:{first + 4} in step" in lines[1]
    assert f"rank 1 was at test_virtual_run.py:{first + 3} in step" in lines[2]
    assert_clean()


def test_a_run_that_computes_too_long_is_stopped_by_its_cpu_time(monkeypatch):
    monkeypatch.setattr(ranks, "WALL_FACTOR", 1000.0)  # this machine may be busy

    def step():
        while True:
            pass

    with pytest.raises(
        RunTimeoutError, match=r"deadline of 0\.2 s of CPU time"
    ) as late:
        run_virtual(step, world_size=2, timeout_s=0.2)
    assert not late.value.on_the_wall
    assert_clean()


def test_a_run_inside_a_rank_is_refused():
    def step():
        run_virtual(lambda: 1)

    with pytest.raises(RankError, match="inside a rank of another run"):
        run_virtual(step)


def test_a_run_beside_a_run_is_refused():
    started, release = threading.Event(), threading.Event()
    _keep.update(started=started, release=release)

    def step():
        _keep["started"].set()
        _keep["release"].wait()

    beside = threading.Thread(target=run_virtual, args=(step,))
    beside.start()
    started.wait()
    with pytest.raises(RuntimeError, match="in progress"):
        run_virtual(lambda: 1)
    release.set()
    beside.join()


_keep: dict = {}  # module globals are shared by the ranks


@pytest.mark.filterwarnings("ignore:.*default timeout for nccl.*:UserWarning")
def test_torch_distributed_is_initialised_in_the_ranks_whatever_backend_is_named():
    def step():
        assert dist.is_initialized() and dist.get_backend() == "virtual"
        group = dist.new_group(backend="nccl")
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        return dist.get_rank(), dist.get_world_size(), x.item()

    assert run_virtual(step, world_size=2)[0] == ((0, 2, 2.0), (1, 2, 2.0))


def test_ranks_start_with_gradients_on_whatever_the_caller_has_off():
    def step():
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert run_virtual(step)[0] == (True, True)
