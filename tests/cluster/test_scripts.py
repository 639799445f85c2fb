"""Scripts for torchrun run unchanged: their environment, a second initialisation."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from tests.cluster import training_script
from tests.guards import GUARD_S
from tests.ranks import everywhere, values_on

on_both = pytest.mark.parametrize("cluster", ["virtual", "gloo"])


def run(fn, *args, cluster, ranks=2):
    return ol.run(
        fn, *args, world_size=ranks, cluster=cluster, timeout_s=GUARD_S
    ).values


def environment():
    """By rank, before and after the others had their turn."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    seen = []
    for _ in range(2):
        seen.append([int(os.environ[name]) for name in names])
        dist.barrier()
    os.environ["LOCAL_RANK"] = str(10 + dist.get_rank())
    os.environ["OF_RANK"] = "1"
    dist.barrier()
    return [*seen, os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]]


@on_both
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_reads_its_place_from_the_environment(cluster, ranks, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "of the caller")
    before = dict(os.environ)
    for rank, seen in enumerate(run(environment, cluster=cluster, ranks=ranks)):
        place = [rank, rank, ranks, ranks]
        assert seen == [place, place, str(10 + rank), "127.0.0.1"]
    assert dict(os.environ) == before


def reads_what_the_last_call_wrote():
    return os.environ.get("OF_RANK"), os.environ["LOCAL_RANK"]


def test_what_a_rank_writes_into_its_environment_ends_with_the_call():
    run(environment, cluster="gloo")
    found = run(reads_what_the_last_call_wrote, cluster="gloo")
    assert found == ((None, "0"), (None, "1"))


def test_the_environment_of_the_caller_comes_back_after_an_error(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def fails():
        os.environ["OF_RANK"] = "1"
        raise KeyError

    before = dict(os.environ)
    with pytest.raises(ol.RankError):
        ol.run(fails)
    assert dict(os.environ) == before


def ends_the_group_before_its_model():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    model(torch.ones(1, 64)).sum().backward()
    total = torch.zeros(())
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return dist.is_initialized()


@on_both
def test_a_script_may_end_the_group_before_its_model(cluster):
    """On gloo one such run stood for ever: DDP's reducer freed the group."""
    for _ in range(3):
        found = run(ends_the_group_before_its_model, cluster=cluster)
        assert found == (False, False)


def test_a_training_script_runs_unchanged_and_gives_the_same_everywhere(tmp_path):
    virtual = run(training_script.main, cluster="virtual")
    gloo = run(training_script.main, cluster="gloo")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc-per-node=2", training_script.__file__]
    ended = subprocess.run(launch, capture_output=True, text=True, timeout=GUARD_S)
    assert [rank for rank, _ in virtual] == [rank for rank, _ in gloo] == [0, 1]
    for (_, ours), (_, theirs) in zip(virtual, gloo, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert f"(1, {gloo[1][1]}" in ended.stdout, ended.stderr


def initialises_again():
    size = dist.get_world_size()
    for arguments in (
        {},
        {"backend": None},
        {"backend": "gloo", "init_method": "env://"},
        {"backend": dist.Backend.GLOO, "world_size": size},
        {"backend": "cpu:gloo,cuda:nccl"},
        {"init_method": "tcp://127.0.0.1:1", "world_size": size, "rank": None},
    ):
        dist.init_process_group(**arguments)
    dist.init_process_group("gloo", "env://", None, size, dist.get_rank())
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


@everywhere
def test_a_second_initialisation_that_agrees_is_accepted(on):
    assert values_on(on, initialises_again) == (on.ranks,) * on.ranks


DISAGREEING = [
    ({"world_size": 4}, r"world_size=4\) on rank 1 .* the run has world_size=2"),
    ({"rank": 0}, r"rank=0\) on rank 1 of ol\.run: this is rank 1"),
    ({"backend": "mpi"}, r"backend='mpi'\) on rank 1 .* Leave backend out"),
]


def initialises_otherwise(arguments):
    if dist.get_rank() == 1:
        training_script.init_process_group(**arguments)


@on_both
@pytest.mark.parametrize(("arguments", "says"), DISAGREEING)
def test_one_that_disagrees_is_refused(cluster, arguments, says):
    with pytest.raises(ol.RankError, match=says):
        run(initialises_otherwise, arguments, cluster=cluster)


def test_gloo_processes_are_no_nccl():
    with pytest.raises(ol.RankError, match=r"'nccl'.* the cluster is 'gloo'"):
        run(initialises_otherwise, {"backend": "nccl"}, cluster="gloo")


def destroys(number):
    """Between two destructions a world with a group, whose names come again."""
    seen = []
    for count in range(number):
        if count:
            assert not dist.is_initialized()
            dist.init_process_group("gloo")
        total = torch.full((1,), 1.0 + dist.get_rank() + count)
        dist.all_reduce(total)
        pair = dist.new_group([0, 1])
        if dist.get_rank() < 2:
            dist.all_reduce(total, group=pair)
        seen.append(total.item())
        dist.destroy_process_group()
    return seen


@everywhere
@pytest.mark.parametrize("number", [1, 3])
def test_a_world_may_be_destroyed_and_initialised_again(on, number):
    # Summed over the ranks, and again by ranks 0 and 1.
    sums = [sum(1.0 + rank + n for rank in range(on.ranks)) for n in range(number)]
    both, alone = [2 * total for total in sums], sums
    right = [both if rank < 2 else alone for rank in range(on.ranks)]
    assert list(values_on(on, destroys, number)) == right
    # The next run is whole.
    assert values_on(on, initialises_again) == (on.ranks,) * on.ranks


def destroys_twice():
    dist.destroy_process_group()
    dist.destroy_process_group()


@on_both
def test_a_world_that_is_destroyed_twice_is_torchs_error_and_the_next_run_is_whole(
    cluster,
):
    with pytest.raises(ol.RankError, match="AssertionError"):
        run(destroys_twice, cluster=cluster)
    assert run(initialises_again, cluster=cluster) == (2, 2)


def nested(cluster):
    ol.run(print, cluster=cluster)


@pytest.mark.parametrize("inner", ["virtual", "gloo"])
@on_both
def test_a_rank_starts_no_run(cluster, inner):
    with pytest.raises(ol.RankError, match="inside a rank of another run"):
        run(nested, inner, cluster=cluster)


def test_outside_of_a_run_torchs_function_is_torchs(monkeypatch):
    run(initialises_again, cluster="virtual")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK expected, but not set"):
        dist.init_process_group("gloo")
    with pytest.raises(RuntimeError, match="exists in the ranks"):
        dist.init_process_group("virtual", store=dist.HashStore(), rank=0, world_size=1)
