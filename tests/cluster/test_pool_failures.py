"""Processes that raise, die, hang or disagree: the error says who, where and why.

Each of these costs new processes for the next call.
"""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.pool.pool import the_pool
from tests.guards import GUARD_S, soon

TIMEOUT_S = soon(3)


def run(fn, *args):
    return ol.run(fn, *args, cluster="gloo", timeout_s=TIMEOUT_S)


@pytest.fixture(autouse=True, scope="module")
def processes_end_with_this_module():
    yield
    the_pool()._end_workers()


def test_an_exception_on_all_ranks_keeps_the_processes():
    before = run(os.getpid).values

    def divide():
        return 1 / 0

    with pytest.raises(ol.RankError) as caught:
        run(divide)

    error = caught.value
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "raised ZeroDivisionError: division by zero" in str(error)
    assert "return 1 / 0" in error.remote_traceback
    assert "worker.py" not in error.remote_traceback
    assert run(os.getpid).values == before


def test_the_first_cause_is_reported_and_not_who_waited_for_it():
    def fail_on_one_rank():
        if dist.get_rank() == 1:
            raise KeyError("lost")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ol.RankError, match="rank 1 of 2 raised KeyError") as caught:
        run(fail_on_one_rank)

    assert caught.value.rank == 1


def test_a_killed_process_is_named_with_its_signal():
    def die():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ol.RankError, match=r"rank 1 of 2 died.*SIGKILL") as caught:
        run(die)

    assert caught.value.rank == 1


def test_a_hang_outside_collectives_says_where_each_rank_was():
    def sleep_on_one_rank():
        if dist.get_rank() == 1:
            time.sleep(10_000)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(ol.RunTimeoutError) as caught:
        run(sleep_on_one_rank)

    message = str(caught.value)
    assert f"deadline of {TIMEOUT_S:g} s" in message
    assert "rank 0 waits in all_reduce #0" in message
    assert "in sleep_on_one_rank: `time.sleep(10_000)`" in message
    assert not isinstance(caught.value, ol.DeadlockError)


def test_a_rank_that_skips_a_collective_is_a_deadlock():
    def skip_one():
        with ol.annotate("bucket 7"):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))

    with pytest.raises(ol.DeadlockError) as caught:
        run(skip_one)

    message = str(caught.value)
    assert "rank 0 waits in all_reduce #0 (bucket 7)   <-- differs" in message
    assert "rank 1 has ended, after 0 collectives   <-- differs" in message
    assert isinstance(caught.value, ol.RunTimeoutError)


def test_two_groups_waited_for_in_opposite_order_are_a_deadlock():
    def cross():
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("a", "b")]
        for group in groups if dist.get_rank() == 0 else reversed(groups):
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(ol.DeadlockError) as caught:
        run(cross)

    message = str(caught.value)
    assert "rank 0 waits in all_reduce #0 of process group 'a'   <-- differs" in message
    assert "rank 1 waits in all_reduce #0 of process group 'b'   <-- differs" in message


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_two_groups_launched_in_opposite_order_finish(cluster):
    def cross():
        groups = [dist.new_group([0, 1], group_desc=name) for name in ("a", "b")]
        tensors = [torch.ones(1), torch.ones(1)]
        pairs = list(zip(groups, tensors, strict=True))
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for group, tensor in (pairs if dist.get_rank() == 0 else reversed(pairs))
        ]
        for work in works:
            work.wait()
        return [tensor.item() for tensor in tensors]

    values = ol.run(cross, cluster=cluster, timeout_s=GUARD_S).values

    assert values == ([2, 2], [2, 2])


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_buckets_in_different_orders_are_a_mismatch_where_their_sizes_differ(cluster):
    def disagree():
        works = []
        for bucket in [1, 2] if dist.get_rank() == 0 else [2, 1]:
            with ol.annotate(f"bucket {bucket}"):
                full = torch.ones(100 * bucket)
                works.append(dist.all_reduce(full, async_op=True))
        for work in works:
            work.wait()

    with pytest.raises(ol.MismatchError) as caught:
        ol.run(disagree, cluster=cluster, timeout_s=GUARD_S)

    message = str(caught.value)
    assert "#0" in message
    assert "100" in message
    assert "200" in message


def test_a_receive_without_a_send_is_a_deadlock_that_names_the_peer():
    def both_receive():
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    with pytest.raises(ol.DeadlockError) as caught:
        run(both_receive)

    assert "rank 0 waits in recv #0 [float32[1] with rank 1]" in str(caught.value)


def test_an_interrupt_ends_the_processes_and_the_next_call_works():
    pids = run(os.getpid).values
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()

    with pytest.raises(KeyboardInterrupt):
        ol.run(time.sleep, 10_000, cluster="gloo", timeout_s=GUARD_S)

    timer.join()
    assert not set(pids) & set(run(os.getpid).values)
