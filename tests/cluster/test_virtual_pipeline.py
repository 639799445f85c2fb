"""Two stages, four microbatches, 1F1B: every activation arrives, or it is told why."""

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.errors import DeadlockError

NUM = 4  # microbatches; the value of each is its number
SHAPE = (256, 1024)  # 1 MiB


def exchange(sent, peer):
    """Send one to the peer and receive one from it."""
    received = torch.empty(SHAPE)
    ops = [
        dist.P2POp(dist.isend, sent, peer),
        dist.P2POp(dist.irecv, received, peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def exchange_send_first(sent, peer):
    received = torch.empty(SHAPE)
    dist.send(sent, peer)
    dist.recv(received, peer)
    return received


def exchange_and_wait_once(sent, peer):
    received = torch.empty(SHAPE)
    ops = [
        dist.P2POp(dist.isend, sent, peer),
        dist.P2POp(dist.irecv, received, peer),
    ]
    works = dist.batch_isend_irecv(ops)
    works[0].wait()
    return received


def one_forward_one_backward(exchange):
    """What each stage received: activations on stage 1, gradients on stage 0."""
    stage, seen = dist.get_rank(), []

    def receive(tensor):
        seen.append((tensor * 1).flatten()[-1])
        return tensor

    if stage == 0:
        dist.send(torch.zeros(SHAPE), 1)
        for number in range(1, NUM):
            receive(exchange(torch.full(SHAPE, float(number)), 1))
        last = torch.empty(SHAPE)
        dist.recv(last, 1)
        receive(last)
    else:
        activation = torch.empty(SHAPE)
        dist.recv(activation, 0)
        for number in range(NUM):
            gradient = receive(activation) * 10
            if number < NUM - 1:
                activation = exchange(gradient, 0)
            else:
                dist.send(gradient, 0)
    return torch.stack(seen).tolist()


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_every_activation_and_gradient_is_that_of_its_microbatch(cluster):
    run = ol.run(one_forward_one_backward, exchange, cluster=cluster)
    assert run.values == ([0.0, 10.0, 20.0, 30.0], [0.0, 1.0, 2.0, 3.0])
    assert run.warnings == ()


def test_neighbours_that_both_send_first_stand_in_a_circle():
    with pytest.raises(DeadlockError) as found:
        ol.run(one_forward_one_backward, exchange_send_first)
    assert "rank 0 (send to 1) -> rank 1 (send to 0)" in str(found.value)


def test_works_of_a_batch_that_nobody_waits_for_are_found_with_what_they_write():
    run = ol.run(one_forward_one_backward, exchange_and_wait_once)
    kinds = [(finding.kind, finding.rank) for finding in run.warnings]
    # Rank 0 ends with a receive that comes after all others: there only reading early
    # is wrong.
    assert ("unwaited", 1) in kinds and ("hazard", 0) in kinds
    hazards = [str(f) for f in run.warnings if f.kind == "hazard"]
    assert any("recv #0 of '1->0'" in hazard for hazard in hazards)


def test_the_exchange_of_both_directions_takes_no_longer_than_one():
    def spans(run):
        found = [s for s in run.timeline.spans if s.rank == 0]
        return [(s.name, s.start_ns, s.end_ns) for s in found if "->" in s.lane]

    run = ol.run(lambda: exchange(torch.ones(SHAPE), 1 - dist.get_rank()))
    (_, start, end), (_, other_start, other_end) = spans(run)
    assert max(start, other_start) < min(end, other_end)
