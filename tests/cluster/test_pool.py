"""Processes as ranks: values, prints, copies, random state, timelines, no leftovers."""

import importlib
import os
import random
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.pool.pool import the_pool
from tests.guards import GUARD_S

# The virtual cluster and the processes have one semantics.
both = pytest.mark.parametrize("cluster", ["virtual", "gloo"])


def run(fn, *args, cluster="gloo", world_size=2, **kwargs):
    return ol.run(
        fn, *args, cluster=cluster, world_size=world_size, timeout_s=GUARD_S, **kwargs
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_value_at_any_world_size(world_size):
    def sum_of_ranks():
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return dist.get_rank(), total.item()

    values = run(sum_of_ranks, world_size=world_size).values

    total = sum(range(world_size))
    assert values == tuple((rank, total) for rank in range(world_size))


def test_calls_of_one_size_use_the_same_processes():
    first = run(os.getpid).values
    run(os.getpid, world_size=1)
    second = run(os.getpid).values

    assert first == second
    assert os.getpid() not in first


def test_new_workers_have_what_a_first_optimizer_loads_where_their_parent_has_it():
    def has_dynamo():  # by value: no rank imports this file, which imports it
        return "torch._dynamo" in sys.modules

    the_pool()._end_workers()
    assert run(has_dynamo).values == (True, True)


def test_nothing_is_left_after_close():
    pids = run(os.getpid).values

    the_pool().close()

    assert not any(is_running(pid) for pid in pids)


def test_processes_outlive_the_thread_that_started_them():
    the_pool().close()  # nothing is open behind the test before
    pids = []
    thread = threading.Thread(target=lambda: pids.extend(run(os.getpid).values))
    thread.start()
    thread.join()

    assert list(run(os.getpid).values) == pids


def test_a_module_that_changed_is_imported_anew(tmp_path, monkeypatch):
    source = tmp_path / "a_helper.py"
    source.write_text("def number():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = importlib.import_module("a_helper")
    first = run(helper.number).values

    source.write_text("def number():\n    return 22\n")
    importlib.reload(helper)

    assert first == (1, 1)
    assert run(helper.number).values == (22, 22)


def test_groups_that_a_call_makes_are_gone_in_the_next():
    def make_a_group():
        group = dist.new_group([0, 1], group_desc="pair")
        dist.all_reduce(torch.ones(1), group=group)

    def number_of_groups():
        return len(dist.distributed_c10d._world.pg_map)

    run(make_a_group)

    assert run(number_of_groups).values == (1, 1)


@both
def test_the_store_of_a_call_is_empty_in_the_next(cluster):
    def number_of_calls():
        store = dist.distributed_c10d._get_default_store()
        return store.add(f"calls of rank {dist.get_rank()}", 1)

    assert [run(number_of_calls, cluster=cluster).values for _ in range(2)] == [
        (1, 1),
        (1, 1),
    ]


@both
def test_arguments_are_copies_that_keep_ties_and_shared_memory(cluster):
    flat = torch.arange(6.0)
    views = [flat[:2], flat[2:].view(2, 2).t()]
    linear = torch.nn.Linear(2, 2)
    tied = torch.nn.Sequential(linear, torch.nn.Linear(2, 2))
    tied[1].weight = linear.weight

    def write(flat, views, *, tied):
        flat.add_(10 + dist.get_rank())
        same_weight = tied[0].weight is tied[1].weight
        return views[0].tolist(), views[1].tolist(), same_weight

    values = run(write, flat, views, tied=tied, cluster=cluster).values

    assert values == tuple(
        ([r, r + 1], [[r + 2, r + 4], [r + 3, r + 5]], True) for r in (10, 11)
    )
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]


@both
def test_a_closure_and_an_argument_that_share_memory_share_it_on_a_rank(cluster):
    flat = torch.zeros(4)
    tail = flat[2:]

    def write(tail):
        tail.fill_(1)
        return flat.tolist()

    assert run(write, tail, cluster=cluster).values == ([0, 0, 1, 1],) * 2


@both
def test_parameters_keep_class_memory_gradient_and_attributes(cluster):
    flat = torch.arange(4.0)
    parameter = torch.nn.Parameter(flat[:2])
    parameter.grad = flat[2:]
    parameter.tag = "mine"

    def look(parameter, flat):
        flat.add_(1)  # a parameter and its gradient are views of it
        return (
            type(parameter).__name__,
            parameter.requires_grad,
            parameter.tolist(),
            parameter.grad.tolist(),
            parameter.tag,
        )

    expected = ("Parameter", True, [1.0, 2.0], [3.0, 4.0], "mine")
    assert run(look, parameter, flat, cluster=cluster).values == (expected,) * 2


@both
def test_a_tensor_inside_a_graph_is_refused_as_an_argument(cluster):
    inside = torch.ones(2, requires_grad=True) * 2

    with pytest.raises(TypeError, match=r"argument 0.*"):
        run(torch.sum, inside, cluster=cluster)


@both
def test_an_argument_or_closure_that_cannot_be_copied_is_named(cluster):
    generator = (i for i in range(3))

    def uses_it():
        return next(generator)

    with pytest.raises(TypeError, match="generator"):
        run(uses_it, cluster=cluster)
    with pytest.raises(TypeError, match="argument 0"):
        run(print, generator, cluster=cluster)


@both
def test_every_rank_starts_with_the_same_random_state_in_every_call(cluster):
    def draw():
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    first, second = run(draw, cluster=cluster), run(draw, cluster=cluster)

    assert first.values[0] == first.values[1] == second.values[0]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    assert first.values[0] == draw()


def test_a_result_inside_a_graph_comes_back_without_it():
    def forward():
        return torch.ones(2, requires_grad=True) * 2

    (value, _) = run(forward).values

    assert value.tolist() == [2, 2]
    assert not value.requires_grad


def test_a_result_that_cannot_be_sent_back_is_refused():
    with pytest.raises(TypeError, match=r"result of rank \d cannot be sent back"):
        run(lambda: (i for i in range(3)))


def test_prints_carry_their_rank(capsys):
    def speak():
        print("two\nlines")
        print("to stderr", file=sys.stderr)
        print("no newline", end="")

    run(speak)

    out, err = capsys.readouterr()
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == [f"[rank {rank}] {x}" for x in ("two", "lines", "no newline")]
        assert f"[rank {rank}] to stderr" in err


def test_a_run_inside_a_rank_is_refused():
    with pytest.raises(ol.RankError, match="inside a rank of another run"):
        run(lambda: ol.run(print, cluster="virtual"))


def reducer_like():
    """Backward with an all-reduce a parameter, started in hooks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    works = []

    def launch(parameter):
        with ol.annotate(f"bucket {len(works)}"):
            works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(launch)
    with ol.annotate("forward"):
        loss = model(torch.randn(256, 128)).sum()
    loss.backward()
    for work in works:
        work.wait()


def test_a_run_leaves_a_measured_timeline_of_every_rank():
    run_ = run(reducer_like)

    timeline = run_.timeline
    assert (timeline.origin, timeline.num_ranks) == ("gloo", 2)
    for rank in range(2):
        spans = [span for span in timeline.spans if span.rank == rank]
        sent = [s for s in spans if s.kind == "communication"]
        labels = [s.attributes["label"] for s in sent]
        assert labels == [f"bucket {i}" for i in range(8)]
        assert {s.bytes for s in sent} == {128 * 4, 128 * 128 * 4}
        assert {s.lane for s in sent} == {"comm"}
        forward = [s.name for s in spans if s.attributes.get("label") == "forward"]
        assert forward.count("addmm") == 4
    report = timeline.report()
    assert report.compute_ns > 0
    assert report.hidden_ns + report.exposed_ns == report.communication_ns
    assert run_.program is None
    assert run_.warnings == ()


def test_without_measuring_the_timeline_is_empty():
    outcome = the_pool().run(reducer_like, (), {}, 2, "gloo", 30, measure=False)

    assert outcome.timeline.spans == ()


def test_a_work_that_nobody_waited_for_is_a_finding():
    def forget():
        dist.all_reduce(torch.ones(3), async_op=True)

    warnings = run(forget).warnings

    assert [(w.kind, w.rank) for w in warnings] == [("unwaited", 0), ("unwaited", 1)]
    assert "all_reduce #0 float32[3]" in str(warnings[0])


def test_works_that_are_polled_or_coalesced_or_have_a_future_are_waited_for():
    def take_care():
        tensors = [torch.ones(3), torch.ones(4)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        work = dist.all_reduce(torch.ones(3), async_op=True)
        while not work.is_completed():
            pass
        dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        return [tensor[0].item() for tensor in tensors]

    run_ = run(take_care)

    assert run_.values == ([2, 2], [2, 2])
    assert run_.warnings == ()


def test_processes_end_with_their_parent_even_if_it_is_killed(tmp_path):
    script = tmp_path / "script.py"  # no `if __name__`: workers must not run it again
    script.write_text(
        textwrap.dedent("""
            import os, signal
            import overlaplab as ol

            print(*ol.run(os.getpid, cluster="gloo").values, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
            """)
    )
    source = os.path.dirname(os.path.dirname(ol.__file__))
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        out, _ = parent.communicate(timeout=GUARD_S)

    pids = [int(pid) for pid in out.split()]
    assert len(pids) == 2
    assert not any(is_running(pid, within_s=GUARD_S) for pid in pids)


def is_running(pid, within_s=0.0):
    """Whether the process still runs after `within_s` seconds at the latest."""
    import time

    until = time.monotonic() + within_s
    while True:
        try:
            with open(f"/proc/{pid}/stat") as file:
                ended = file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            ended = True
        if ended or time.monotonic() >= until:
            return not ended
        time.sleep(0.05)


@both
def test_a_rank_that_changes_torchs_settings_changes_them_for_itself_alone(cluster):
    def settings():
        return (
            torch.get_default_dtype(),
            torch.empty(0).device,
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
        )

    def change():
        if dist.get_rank() == 0:
            torch.set_default_dtype(torch.float64)
        dist.barrier()
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True)
        return torch.ones(1).dtype

    callers, ranks = settings(), run(settings, cluster=cluster).values
    assert run(change, cluster=cluster).values == (torch.float64, torch.float32)
    assert settings() == callers
    assert run(settings, cluster=cluster).values == ranks


@both
def test_an_exception_without_a_message_of_its_own_is_told_by_its_type(cluster):
    class Broken(Exception):
        def __str__(self):
            raise KeyError

    def fail():
        raise Broken

    with pytest.raises(ol.RankError, match=r"Broken: \(its message cannot be made"):
        run(fail, cluster=cluster)


def test_a_sparse_tensor_is_reduced_by_processes_that_can():
    def reduce():
        eye = torch.eye(3).to_sparse()
        dist.all_reduce(eye)
        return eye.to_dense().sum().item()

    assert run(reduce).values == (6, 6)
