"""What reports know without being told: parameters, gradients, times, lines."""

import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings, top_holders


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def backward(model):
    model(torch.randn(4, 8)).square().mean().backward()


def names(fn, *args):
    _, program = run_virtual(fn, args, world_size=1)
    return [s.name for s in program.storages if s.name]


def test_parameters_have_the_names_of_the_outermost_module_and_gradients_theirs():
    def step():
        backward(net())

    expected = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names(step)[:4] == expected
    assert sorted(names(step)[4:]) == sorted(f"grad {name}" for name in expected)


def test_a_model_from_outside_the_run_has_names_too():
    model = net()
    assert names(lambda: backward(model))[:2] == ["0.weight", "0.bias"]


def test_a_name_that_the_user_gave_goes_before():
    def step():
        model = net()
        ol.name_tensor(model[0].weight, "first")
        backward(model)

    assert "first" in names(step) and "0.weight" not in names(step)


def test_a_gradient_that_is_a_view_of_a_flat_buffer_takes_no_name_from_its_storage():
    def step():
        model = nn.Linear(4, 4)
        flat = torch.zeros(20)
        model.weight.grad = flat[:16].view(4, 4)
        model(torch.ones(1, 4)).sum().backward()

    assert "grad weight" not in names(step)


def test_other_runs_and_other_code_keep_torchs_hooks():
    hooks = nn.modules.module._global_forward_pre_hooks
    before = len(hooks)
    names(lambda: backward(net()))
    assert len(hooks) == before


def unwaited_step():
    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad, async_op=True) and None
        )
    backward(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_hazard_of_a_run_tells_when_both_sides_ran():
    run = ol.run(unwaited_step, world_size=2, hardware="chalk")
    hazard = next(f for f in run.warnings if f.name == "grad 0.weight")
    spans = {
        s.attributes["op"]: s
        for s in run.timeline.of_rank(0).spans
        if s.kind != "launch"
    }
    for op in hazard.ops:
        span = spans[op]
        times = f"{span.start_ns / 1000:.3f} to {span.end_ns / 1000:.3f} us, op {op}"
        assert times in str(hazard)
    read, write = (spans[op] for op in reversed(hazard.ops))
    earlier = (write.start_ns - read.end_ns) / 1000
    assert f"Here it comes first: it ends {earlier:.3f} us earlier." in str(hazard)


def test_times_decide_nothing():
    run = ol.run(unwaited_step, world_size=2)
    without = find_findings(run.program)
    assert [(f.kind, f.ops) for f in without] == [(f.kind, f.ops) for f in run.warnings]


def gradient_in_flight():
    weight = torch.ones(8, 8, requires_grad=True)
    hidden = torch.ones(4, 8).mm(weight)  # the line of the forward
    hidden.register_hook(lambda grad: dist.all_reduce(grad, async_op=True) and None)
    (hidden * 2).sum().backward()


def test_an_operator_of_the_backward_pass_has_the_line_of_its_forward():
    _, program = run_virtual(gradient_in_flight, world_size=2)
    start = gradient_in_flight.__code__.co_firstlineno
    hazard = next(f for f in find_findings(program) if f.kind == "hazard")
    assert (
        f"[test_names.py:{start + 4} in gradient_in_flight, backward of "
        f"test_names.py:{start + 2} in gradient_in_flight]"
    ) in str(hazard)
    assert "then read: mm on stream 'default'" in str(hazard)


def test_a_tensor_without_a_name_is_the_result_of_who_made_it():
    _, program = run_virtual(gradient_in_flight, world_size=2)
    hazard = next(f for f in find_findings(program) if f.kind == "hazard")
    assert "two streams use the result of mul (op " in str(hazard)


def test_the_holders_of_memory_have_names_and_forward_lines():
    def step():
        model = net()
        backward(model)
        return model

    _, program = run_virtual(step, world_size=1)
    holders = [str(holder) for holder in top_holders(program, num=20)]
    assert "0.weight" in holders
    line = backward.__code__.co_firstlineno + 1
    assert f"threshold_backward [test_names.py:{line} in backward]" in holders
