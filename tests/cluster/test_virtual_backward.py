"""An operator of the backward pass runs on the stream of its forward."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings


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


def kinds_found(step, *args, world_size=1):
    _, program = run_virtual(step, args, world_size=world_size)
    return [finding.kind for finding in find_findings(program)]


def on_leaf_tensor(work, leaf, hidden):
    leaf.register_hook(lambda grad: work())


def on_tensor(work, leaf, hidden):
    hidden.register_hook(lambda grad: work())


def after_accumulation(work, leaf, hidden):
    leaf.register_post_accumulate_grad_hook(lambda p: work())


def before_a_node(work, leaf, hidden):
    hidden.grad_fn.register_prehook(lambda grads: work())


def after_a_node(work, leaf, hidden):
    hidden.grad_fn.register_hook(lambda inputs, outputs: work())


def before_accumulation(work, leaf, hidden):
    accumulation = hidden.grad_fn.next_functions[0][0]
    accumulation.register_prehook(lambda grads: work())
    leaf.keep = accumulation


def at_the_end(work, leaf, hidden):
    engine = torch.autograd.Variable._execution_engine
    hidden.register_hook(lambda grad: engine.queue_callback(work))


HOOKS = [
    on_leaf_tensor,
    on_tensor,
    after_accumulation,
    before_a_node,
    after_a_node,
    before_accumulation,
    at_the_end,
]


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_launches_on_another_stream_is_not_waited_for(hook):
    """U7: on CUDA the read behind backward() sees the old value."""

    def step(waits):
        side, buffer = streams.Stream(), torch.zeros(4)
        leaf = torch.ones(4, requires_grad=True)
        hidden = leaf * 2

        def work():
            side.wait_stream(streams.current_stream())
            with streams.stream(side):
                buffer.fill_(1)

        hook(work, leaf, hidden)
        hidden.sum().backward()
        if waits:
            streams.current_stream().wait_stream(side)
        return buffer + 1

    assert kinds_found(step, False) == ["hazard"]
    assert kinds_found(step, True) == []


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_launches_on_its_own_stream_is_waited_for(hook):
    def step():
        side, buffer = streams.Stream(), torch.zeros(4)
        leaf = torch.ones(4, requires_grad=True)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            hidden = leaf * 2
            loss = (hidden * 3).sum()
        streams.current_stream().wait_stream(side)
        seen = []

        def work():
            seen.append(streams.current_stream().name)
            buffer.fill_(1)

        hook(work, leaf, hidden)
        loss.backward()
        return seen, buffer + leaf.grad

    ((seen, _),), program = run_virtual(step, world_size=1)
    assert seen == ["default" if hook is at_the_end else "stream 1"]
    assert find_findings(program) == ()


def test_callbacks_come_after_the_nodes_of_all_streams():
    """The engine waits first: what a callback launches may read every gradient."""

    def step():
        side, leaf = streams.Stream(), torch.ones(4, requires_grad=True)
        other = torch.ones(4, requires_grad=True)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            one = leaf.exp()
        streams.current_stream().wait_stream(side)
        loss = (one * other).sum()
        engine = torch.autograd.Variable._execution_engine
        loss.grad_fn.register_hook(
            lambda inputs, outputs: engine.queue_callback(lambda: leaf.grad.div_(2))
        )
        loss.backward()

    _, program = run_virtual(step, world_size=1)
    assert find_findings(program) == ()
    (divide,) = [op for op in program.ranks[0] if op.name == "div_"]
    assert divide.stream == "default"
    assert [program.ranks[0][i].stream for i in divide.after] == ["stream 1"]


class Inner(torch.autograd.Function):
    """A layer whose backward pass runs another one.

    Args:
        forward, backward: the streams of the inner passes; the current one if None.
    """

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.streams, ctx.x = (forward, backward), x.detach().requires_grad_()
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        own = streams.current_stream()
        forward, backward = (own if s is None else s for s in ctx.streams)
        forward.wait_stream(own)
        with torch.enable_grad(), streams.stream(forward):
            loss = ctx.x.exp().sum()
        backward.wait_stream(forward)
        with streams.stream(backward):
            (found,) = torch.autograd.grad(loss, ctx.x)
            found = found.neg()
        own.wait_stream(backward)
        return grad * found, None, None


OWN, ELSEWHERE = "stream 1", "stream 2"


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(OWN, OWN), (ELSEWHERE, ELSEWHERE), (OWN, ELSEWHERE), (ELSEWHERE, OWN)],
)
def test_an_inner_backward_has_the_stream_that_calls_it_and_those_of_its_forward(
    forward, backward
):
    def step():
        side, other = streams.Stream(), streams.Stream()
        inner = [None if s == OWN else other for s in (forward, backward)]
        leaf = torch.ones(4, requires_grad=True)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            loss = Inner.apply(leaf, *inner).sum()
        late = torch.ones(4).cos()  # on the caller's stream, after the forward
        streams.current_stream().wait_stream(side)
        loss.backward()
        return leaf.grad + late

    _, program = run_virtual(step, world_size=1)
    assert find_findings(program) == ()
    ops = program.ranks[0][5:]
    assert [(op.name, op.stream) for op in ops] == [
        ("ones_like", "default"),
        ("exp", forward),
        ("sum", forward),
        ("ones_like", backward),
        ("mul", forward),
        ("neg", backward),
        ("mul", OWN),
        ("add", "default"),
    ]
    # Of the caller's stream only the outer pass's begin is waited for, once a stream.
    default = {op.index for op in program.ranks[0] if op.stream == "default"}
    behind = [
        (op.stream, set(op.after) & default) for op in ops if op.stream != "default"
    ]
    waits = [(stream, after) for stream, after in behind if after]
    assert all(after == {5} for _, after in waits)
    assert len({stream for stream, _ in waits}) == len(waits)


def test_an_inner_backward_that_a_checkpoint_runs_stays_on_the_stream_of_its_forward():
    from torch.utils.checkpoint import checkpoint

    def step():
        side, leaf = streams.Stream(), torch.ones(4, requires_grad=True)
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            loss = checkpoint(lambda x: x.exp().sin(), leaf, use_reentrant=True).sum()
        streams.current_stream().wait_stream(side)
        loss.backward()
        return leaf.grad + 1

    _, program = run_virtual(step, world_size=1)
    assert find_findings(program) == ()
    backward = [op for op in program.ranks[0] if op.phase == "backward"]
    assert [(op.name, op.stream) for op in backward] == [
        ("exp", "stream 1"),
        ("sin", "stream 1"),
        ("cos", "stream 1"),
        ("mul", "stream 1"),
        ("mul", "stream 1"),
    ]


def test_a_backward_that_raises_leaves_the_streams_as_they_were():
    def step():
        side, leaf = streams.Stream(), torch.ones(4, requires_grad=True)
        with streams.stream(side):
            hidden = leaf.exp()

        def fail(grad):
            with streams.stream(streams.Stream()):
                raise ZeroDivisionError

        hidden.register_hook(fail)
        with contextlib.suppress(ZeroDivisionError):
            hidden.sum().backward()
        return streams.current_stream().name, torch.ones(1).exp()

    values, program = run_virtual(step, world_size=1)
    assert values[0][0] == "default"
    assert program.ranks[0][-1].stream == "default"


def test_a_hook_that_adds_gradients_on_another_stream_must_wait_for_them():
    """Autograd's own additions wait for their summands; those of a hook do not."""

    def step(waits):
        side, leaf = streams.Stream(), torch.ones(4, requires_grad=True)
        sums = []

        def hook(p):
            if waits:
                side.wait_stream(streams.current_stream())
            with streams.stream(side):
                sums.append(p.grad + 1)

        leaf.register_post_accumulate_grad_hook(hook)
        (leaf * torch.ones(4)).sum().backward()
        streams.current_stream().wait_stream(side)
        return sums

    assert kinds_found(step, False) == ["hazard"]
    assert kinds_found(step, True) == []
