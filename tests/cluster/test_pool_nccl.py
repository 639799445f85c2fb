"""A process a GPU: values come back, timelines hold kernels, hangs are named."""

import os

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.pool.pool import the_pool

pytestmark = pytest.mark.gpu(2)


def run(fn, *args, timeout_s=60):
    return ol.run(fn, *args, cluster="nccl", world_size=2, timeout_s=timeout_s)


@pytest.fixture(autouse=True, scope="module")
def processes_end_with_this_module():
    yield
    the_pool().close()


def test_every_rank_has_its_own_gpu_and_tensors_come_back_on_the_cpu():
    def sum_of_ranks():
        total = torch.full((3,), dist.get_rank() + 1.0, device=ol.device())
        dist.all_reduce(total)
        return str(ol.device()), total

    values = run(sum_of_ranks).values

    assert [device for device, _ in values] == ["cuda:0", "cuda:1"]
    for _, total in values:
        assert total.device.type == "cpu"
        assert total.tolist() == [3, 3, 3]


def test_gpu_tensors_of_the_caller_arrive_on_each_rank_s_gpu_and_share_memory():
    flat = torch.zeros(4, device="cuda")
    tail = flat[2:]

    def write(flat, tail):
        tail.fill_(1)
        return str(flat.device), flat.tolist()

    assert run(write, flat, tail).values == (
        ("cuda:0", [0, 0, 1, 1]),
        ("cuda:1", [0, 0, 1, 1]),
    )
    assert flat.tolist() == [0, 0, 0, 0]


def script(number):
    place = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    seen = []
    for _ in range(number):
        dist.init_process_group("nccl", rank=place[0], world_size=place[2])
        device = torch.device("cuda", place[1])
        torch.cuda.set_device(device)
        total = torch.full((1,), 1.0 + place[0], device=device)
        dist.all_reduce(total)
        seen.append(total.item())
        dist.destroy_process_group()
    return [*place, *seen]


def test_a_script_for_torchrun_initialises_and_destroys_as_it_likes():
    assert run(script, 2).values == ([0, 0, 2, 3, 3], [1, 1, 2, 3, 3])
    with pytest.raises(ol.RankError, match=r"backend='gloo'\).* the cluster is 'nccl'"):
        run(lambda: dist.init_process_group("gloo"))
    assert run(script, 1).values == ([0, 0, 2, 3], [1, 1, 2, 3])


def overlapping_step():
    """Matrix products beside an all-reduce, waited for at the end."""
    device = ol.device()
    full = torch.ones(64 * 2**20, device=device)
    matrix = torch.ones(4096, 4096, device=device)
    matrix @ matrix  # the first time loads libraries, longer than an all-reduce takes
    for _ in range(2):  # and sets up the communicator
        dist.all_reduce(full)
    torch.cuda.synchronize()
    with ol.annotate("bucket 0"):
        work = dist.all_reduce(full, async_op=True)
    with ol.annotate("products"):
        for _ in range(20):
            matrix @ matrix
    work.wait()
    return full[0].item()


def test_the_timeline_holds_kernels_collectives_and_the_cpu_s_launches():
    run_ = run(overlapping_step)

    timeline = run_.timeline
    assert (timeline.origin, timeline.num_ranks) == ("nccl", 2)
    for rank in range(2):
        spans = [span for span in timeline.spans if span.rank == rank]
        sent = [s for s in spans if s.kind == "communication"]
        assert {(s.lane, s.name, s.bytes) for s in sent} == {
            ("comm", "all_reduce", 4 * 64 * 2**20)
        }
        assert sent[-1].attributes["label"] == "bucket 0"
        products = [s for s in spans if s.attributes.get("label") == "products"]
        assert [s.name for s in products if s.lane == "default"] == ["mm"] * 20
        assert [s.name for s in products if s.lane == "cpu"].count("launch mm") == 20
    report = timeline.report()
    assert report.hidden_ns > 0
    assert report.hidden_ns + report.exposed_ns == report.communication_ns
    assert run_.warnings == ()


def test_a_rank_that_skips_a_collective_is_a_deadlock():
    def skip_one():
        total = torch.ones(3, device=ol.device())
        dist.all_reduce(total)
        with ol.annotate("bucket 7"):
            if dist.get_rank() == 0:
                dist.all_reduce(total)
        return total.sum().item()

    with pytest.raises(ol.DeadlockError) as caught:
        run(skip_one, timeout_s=5)

    message = str(caught.value)
    assert "rank 0 waits in all_reduce #1 (bucket 7)   <-- differs" in message
    assert "rank 1 has ended, after 1 collective   <-- differs" in message


def test_the_next_run_after_a_deadlock_works():
    assert run(dist.get_rank).values == (0, 1)


def test_an_exception_on_one_rank_is_reported_at_once():
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("lost")
        total = torch.ones(3, device=ol.device())
        dist.all_reduce(total)
        return total.sum().item()

    with pytest.raises(ol.RankError, match="rank 1 of 2 raised ValueError: lost"):
        run(fail)


def test_gloo_and_nccl_take_turns_on_the_same_processes():
    def device_and_sum():
        total = torch.ones(1, device=ol.device())
        dist.all_reduce(total)
        return ol.device().type, total.item()

    for cluster, device in [("gloo", "cpu"), ("nccl", "cuda"), ("gloo", "cpu")]:
        values = ol.run(device_and_sum, cluster=cluster, timeout_s=60).values
        assert values == ((device, 2.0), (device, 2.0))


def test_more_ranks_than_gpus_are_refused():
    number = torch.cuda.device_count() + 1

    with pytest.raises(ValueError, match=f"nccl needs {number} CUDA devices"):
        ol.run(dist.get_rank, cluster="nccl", world_size=number)
