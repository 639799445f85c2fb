"""Deadlocks are named without a time-out; what can finish, finishes."""

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.errors import DeadlockError


def report(fn, world_size=2):
    with pytest.raises(DeadlockError) as found:
        run_virtual(fn, world_size=world_size)
    return [line.strip() for line in str(found.value).splitlines()]


def test_two_groups_launched_in_opposite_order_finish():
    def step():
        a, b = dist.new_group(), dist.new_group()
        order = [a, b] if dist.get_rank() == 0 else [b, a]
        xs = {a: torch.ones(2), b: torch.ones(2) * 2}
        works = [dist.all_reduce(xs[g], group=g, async_op=True) for g in order]
        for work in works:
            work.wait()
        return xs[a] + xs[b]

    values, _ = run_virtual(step, world_size=2)
    assert [v.tolist() for v in values] == [[6.0, 6.0]] * 2


def test_synchronous_collectives_in_opposite_order_on_one_stream_are_a_deadlock():
    def step():
        a, b = dist.new_group(group_desc="a"), dist.new_group(group_desc="b")
        x = torch.ones(2)
        for group in [a, b] if dist.get_rank() == 0 else [b, a]:
            with streams.annotate(f"reduce in {group.group_desc}"):
                dist.all_reduce(x, group=group)

    lines = report(step)
    line = step.__code__.co_firstlineno + 5
    where = f"[test_virtual_deadlock.py:{line} in step]"
    assert lines[0] == "no rank can move."
    assert lines[1:3] == [
        "rank 0 waits in all_reduce #0 of process group 'a' (reduce in a) for rank 1 "
        f"{where}   <-- differs",
        "rank 1 waits in all_reduce #0 of process group 'b' (reduce in b) for rank 0 "
        f"{where}   <-- differs",
    ]
    assert lines[-1] == "Every rank must launch collectives in the same order."


def test_the_same_order_on_two_streams_of_one_rank_is_no_deadlock():
    def step():
        a, b = dist.new_group(), dist.new_group()
        xs = [torch.ones(2), torch.ones(2)]
        for stream, group, x in zip(
            [streams.Stream(), streams.Stream()],
            [a, b] if dist.get_rank() == 0 else [b, a],
            xs if dist.get_rank() == 0 else reversed(xs),
            strict=True,
        ):
            with streams.stream(stream):
                dist.all_reduce(x, group=group)
        streams.synchronize()
        return xs

    values, _ = run_virtual(step, world_size=2)
    assert [x.tolist() for x in values[0]] == [[2.0, 2.0]] * 2


def test_a_rank_that_skips_a_collective_is_named_as_finished():
    def step():
        x = torch.ones(2)
        if dist.get_rank() != 1:
            dist.all_reduce(x)
        return x.sum().item()

    lines = report(step, world_size=3)
    assert lines[1].startswith("rank 0 waits in all_reduce #0 for rank 1 [")
    assert lines[2] == "rank 1 has ended, after 0 collectives   <-- differs"
    assert lines[3].startswith("rank 2 waits in all_reduce #0 for rank 1 [")


def test_a_launch_that_nobody_waits_for_is_no_deadlock():
    def step():
        x = torch.ones(2)
        if dist.get_rank() == 0:
            dist.all_reduce(x, async_op=True)
        return x

    values, program = run_virtual(step, world_size=2)
    assert values[0].tolist() == [1.0, 1.0]
    assert [o.name for o in program.ranks[0]] == ["ones", "all_reduce"]


def test_polling_for_what_never_comes_is_a_deadlock():
    def step():
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            while not work.is_completed():
                pass

    assert report(step)[1].startswith("rank 0 waits in all_reduce #0")


def test_polling_lets_the_other_ranks_go_on():
    def step():
        return dist.all_reduce(torch.ones(2), async_op=True).is_completed()

    values, _ = run_virtual(step, world_size=3)
    assert values == (True, True, True)


def test_a_deadlock_in_the_backward_pass_is_found():
    def step():
        w = torch.ones(2, requires_grad=True)

        def hook(p):
            if dist.get_rank() == 0:
                dist.all_reduce(p.grad)

        w.register_post_accumulate_grad_hook(hook)
        (w * 2).sum().backward()
        return w.grad.sum().item()

    assert "rank 1 has ended" in report(step)[2]
