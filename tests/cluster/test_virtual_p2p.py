"""Sends and receives end where NCCL's do; where they cannot, the circle is told."""

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.virtual import run_virtual
from overlaplab.errors import DeadlockError, MismatchError, RankError


def neighbours():
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def payload():
    return torch.full((4,), float(dist.get_rank())), torch.empty(4)


def refusal(fn, world_size, error):
    with pytest.raises(error) as found:
        ol.run(fn, world_size=world_size)
    return str(found.value)


def values(fn, world_size):
    run = ol.run(fn, world_size=world_size)
    assert run.warnings == ()
    return list(run.values)


def ring(order):
    """Everybody sends to the right and receives from the left."""
    right, left = neighbours()
    mine, theirs = payload()
    if order == "send, recv":
        dist.send(mine, right)
        dist.recv(theirs, left)
    elif order == "isend, irecv":
        works = [dist.isend(mine, right), dist.irecv(theirs, left)]
        for work in works:
            work.wait()
    elif order == "even ranks first":
        for what in "sr" if dist.get_rank() % 2 == 0 else "rs":
            if what == "s":
                dist.send(mine, right)
            else:
                dist.recv(theirs, left)
    else:
        ops = [
            dist.P2POp(dist.isend, mine, right),
            dist.P2POp(dist.irecv, theirs, left),
        ]
        for work in dist.batch_isend_irecv(ops[:: 1 if order == "batch" else -1]):
            work.wait()
    return theirs[0].item()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_of_sends_is_a_deadlock_and_its_circle_is_printed(size):
    message = refusal(lambda: ring("send, recv"), size, DeadlockError)
    steps = [f"rank {r} (send to {(r + 1) % size})" for r in [*range(size), 0]]
    assert message.splitlines()[1 + size] == (
        f"They wait for one another in a circle: {' -> '.join(steps)}."
    )
    assert f"rank {size - 1} waits in send #0 of '{size - 1}->0'" in message
    assert "batch_isend_irecv" in message


def test_two_ranks_that_both_isend_first_never_end_and_the_time_is_told():
    message = refusal(lambda: ring("isend, irecv"), 2, DeadlockError)
    assert message.startswith("no rank can move at ")
    assert "rank 0 (send to 1) -> rank 1 (send to 0) -> rank 0 (send to 1)" in message


@pytest.mark.parametrize("size", [3, 4])
def test_each_pair_has_its_own_stream_so_longer_rings_of_isends_end(size):
    found = values(lambda: ring("isend, irecv"), size)
    assert found == [float((rank - 1) % size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("order", ["batch", "batch backwards", "even ranks first"])
def test_rings_that_end_bring_every_message_to_its_rank(order, size):
    found = values(lambda: ring(order), size)
    assert found == [float((rank - 1) % size) for rank in range(size)]


@pytest.mark.parametrize("order", ["batch", "batch backwards", "even ranks first"])
def test_gloo_brings_the_same_messages(order):
    assert ol.run(lambda: ring(order), cluster="gloo").values == (1.0, 0.0)


def lanes(fn):
    _, program = run_virtual(fn, world_size=2)
    ops = [op for op in program.ranks[0] if op.collective]
    return [(op.name, op.stream) for op in ops], ops


def test_both_directions_of_a_pair_share_one_stream_in_the_order_of_the_calls():
    found, _ = lanes(lambda: ring("even ranks first"))
    assert found == [("send", "comm:0<->1"), ("recv", "comm:0<->1")]


def test_the_parts_of_a_batch_go_beside_one_another_and_its_group_goes_on_after():
    def step():
        dist.all_reduce(torch.ones(2), async_op=True).wait()
        ring("batch")
        ring("batch")
        dist.all_reduce(torch.ones(2), async_op=True).wait()

    found, ops = lanes(step)
    assert found == [
        ("all_reduce", "comm"),
        ("send", "comm:0->1"),
        ("recv", "comm:1->0"),
        ("send", "comm:0->1"),
        ("recv", "comm:1->0"),
        ("all_reduce", "comm"),
    ]
    first, send, recv, again, _, last = ops
    assert first.index in send.after and first.index in recv.after
    assert send.index not in recv.after
    assert recv.index in again.after  # the next batch comes after all of this one
    assert {op.index for op in ops[3:5]} <= set(last.after)


def test_a_batch_of_a_subgroup_runs_on_that_groups_streams():
    def step():
        group = dist.new_group([0, 1], group_desc="pipe")
        mine, theirs = payload()
        peer = 1 - dist.get_rank()
        ops = [
            dist.P2POp(dist.irecv, theirs, peer, group=group),
            dist.P2POp(dist.isend, mine, peer, group=group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.send(mine, 1, group) if peer else dist.recv(theirs, 0, group)

    found, _ = lanes(step)
    assert found == [
        ("recv", "comm:pipe 1->0"),
        ("send", "comm:pipe 0->1"),
        ("send", "comm:pipe 0<->1"),
    ]


def test_a_receive_without_a_send_names_the_rank_that_has_ended():
    def step():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(4), 1)
            torch.ones(1).item()

    message = refusal(step, 2, DeadlockError)
    assert "rank 0 waits in recv #0 of '1->0' for rank 1" in message
    assert "rank 1 has ended, after 0 collectives" in message
    assert message.endswith("every receive a send.")


@pytest.mark.parametrize(
    "sent, received, tag, said",
    [
        (torch.ones(4), torch.ones(5), 0, "shapes: rank 0 has [(4,)]"),
        (torch.ones(4), torch.ones(4).double(), 0, "dtypes: rank 0 has ['float32']"),
        (torch.ones(4), torch.ones(4), 7, "tag: rank 0 has 7"),
    ],
)
def test_messages_that_do_not_fit_are_named_by_both_ends(sent, received, tag, said):
    def step():
        if dist.get_rank() == 0:
            dist.send(sent, 1, tag=tag)
        else:
            dist.recv(received, 0)

    message = refusal(step, 2, MismatchError)
    assert message.startswith("ranks differ in message #0 from rank 0 to rank 1.")
    assert said in message


def test_what_nccl_has_not_is_refused_without_a_hang():
    from_anybody = refusal(lambda: dist.recv(torch.empty(1)), 2, RankError)
    assert "name the rank with src=" in from_anybody
    assert "GLOO" in refusal(lambda: dist.monitored_barrier(), 2, RankError)


def test_a_rank_may_wait_for_a_key_that_another_sets():
    def step():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 1:
            store.set("address", "here")
        return store.get("address")

    assert values(step, 3) == [b"here"] * 3


def test_waiting_for_a_key_that_nobody_sets_is_a_deadlock():
    def step():
        dist.distributed_c10d._get_default_store().wait(["address"])

    message = refusal(step, 2, DeadlockError)
    assert "rank 1 waits for 'address' in the store [test_virtual_p2p.py" in message


def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, everywhere = [None] * size, [None] * size if rank == 1 else None
    dist.all_gather_object(gathered, {"rank": rank})
    dist.gather_object(("from", rank), everywhere, dst=1)
    told, part, sent = [rank], [None], [None, None]
    dist.broadcast_object_list(told, src=size - 1)
    dist.scatter_object_list(part, list("abcd")[:size] if rank == 0 else None, src=0)
    if rank == 0:
        dist.send_object_list(["hi", {"a": 1}], dst=1)
    elif rank == 1:
        dist.recv_object_list(sent, src=0)
    return gathered, everywhere, told, part, sent


@pytest.mark.parametrize("size", [2, 3])
def test_objects_travel_as_on_gloo(size):
    assert values(objects, size) == list(
        ol.run(objects, world_size=size, cluster="gloo").values
    )
