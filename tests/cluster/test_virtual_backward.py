"""An operator of the backward pass runs on the stream of its forward."""

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual


def test_backward_runs_on_the_streams_of_the_forward_and_the_caller_waits():
    def step():
        side = streams.Stream()
        w = torch.ones(2, 2, requires_grad=True)
        a = w.mm(w)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            b = a.exp()
        streams.current_stream().wait_stream(side)
        b.sum().backward()
        return w.grad + 1

    _, program = run_virtual(step, world_size=1)
    assert [(o.name, o.stream, o.after, o.phase) for o in program.ranks[0]] == [
        ("ones", "default", (), ""),
        ("mm", "default", (), "forward"),
        ("exp", "stream 1", (1,), "forward"),
        ("sum", "default", (2,), "forward"),
        ("ones_like", "default", (), "forward"),
        ("mul", "stream 1", (4,), "backward"),
        ("mm", "default", (5,), "backward"),
        ("mm", "default", (), "backward"),
        ("add", "default", (), "backward"),
        ("add", "default", (), ""),
    ]


def test_a_hook_sees_the_stream_of_its_node_and_may_enter_another():
    seen = []

    def step():
        side, comm = streams.Stream(), streams.Stream()
        w = torch.ones(2, requires_grad=True)
        names = []

        def hook(p):
            names.append(streams.current_stream().name)
            with streams.stream(comm):
                names.append(streams.current_stream().name)
                p.grad.mul_(2)
            names.append(streams.current_stream().name)

        w.register_post_accumulate_grad_hook(hook)
        with streams.stream(side):
            loss = w.exp().sum()
        loss.backward()
        names.append(streams.current_stream().name)
        return names

    (names,), program = run_virtual(step, world_size=1)
    assert names == ["stream 1", "stream 2", "stream 1", "default"]
    assert [o.stream for o in program.ranks[0] if o.name == "mul_"] == ["stream 2"]
    assert seen == []


def test_gradients_that_come_back_to_the_caller_are_ordered_after_the_backward():
    def step():
        side = streams.Stream()
        w = torch.ones(2, requires_grad=True)
        with streams.stream(side):
            loss = w.exp().sum()
        streams.current_stream().wait_stream(side)
        loss.backward()
        return w.grad + 1

    _, program = run_virtual(step, world_size=1)
    last = program.ranks[0][-1]
    backward = [o.index for o in program.ranks[0] if o.phase == "backward"]
    assert (last.name, last.stream, last.after) == ("add", "default", (backward[-1],))


def test_a_hooks_all_reduce_comes_right_after_the_gradient_it_reads():
    def step():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        works = []
        for name, p in model.named_parameters():
            streams.name_tensor(p, name)

            def hook(p, name=name):
                streams.name_tensor(p.grad, f"grad {name}")
                works.append(dist.all_reduce(p.grad, async_op=True))

            p.register_post_accumulate_grad_hook(hook)
        model(torch.ones(2, 4)).sum().backward()
        for work in works:
            work.wait()
        return [p.grad for p in model.parameters()]

    _, program = run_virtual(step, world_size=2)
    ops = program.ranks[1]
    launched = [o for o in ops if o.collective]
    assert [o.collective.payload[0].name for o in launched] == [
        "grad 1.bias",
        "grad 1.weight",
        "grad 0.bias",
        "grad 0.weight",
    ]
    for launch in launched:
        (part,) = launch.collective.payload
        writer = ops[part.ready]
        assert writer.phase == "backward"
        assert launch.reads[0] in writer.writes


def test_what_a_checkpoint_recomputes_belongs_to_the_backward_pass():
    from torch.utils.checkpoint import checkpoint

    def step():
        w = torch.ones(2, 2, requires_grad=True)
        checkpoint(lambda x: x.exp().sin(), w, use_reentrant=False).sum().backward()
        return w.grad

    values, program = run_virtual(step, world_size=1)
    phases = [o.phase for o in program.ranks[0] if o.name == "exp"]
    assert phases == ["forward", "backward"]
    x = torch.ones(2, 2, dtype=torch.float64)
    expected = (x.exp().cos() * x.exp()).float()
    torch.testing.assert_close(values[0], expected)


def test_host_syncs_and_record_stream_in_a_hook_are_seen():
    def step():
        side = streams.Stream()
        w = torch.ones(2, requires_grad=True)

        def hook(p):
            p.grad.record_stream(side)
            p.grad.tolist()

        w.register_post_accumulate_grad_hook(hook)
        for backward in (
            lambda: w.exp().sum().backward(),
            lambda: torch.autograd.backward(w.exp().sum()),
        ):
            backward()
        x = w.exp()
        x.register_hook(lambda g: g.tolist() and None)
        torch.autograd.grad(x.sum(), w)

    _, program = run_virtual(step, world_size=1)
    waits = [(o.name, o.phase) for o in program.ranks[0] if o.kind == "host_wait"]
    assert waits == [("tolist", "backward")] * 3
