"""Each rank has its own copy of what it could change, as a process would have."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlaplab.cluster.copying import copy_job
from overlaplab.cluster.virtual import run_virtual


def copy_for_rank(value):
    """What a rank gets where `value` is its function's argument."""
    _, (copied,), _ = copy_job(print, (value,), {})
    return copied


def test_ranks_do_not_share_what_the_function_closes_over():
    model, seen = nn.Linear(2, 2), []

    def step():
        with torch.no_grad():
            model.weight.fill_(dist.get_rank())
        seen.append(dist.get_rank())
        return model.weight[0, 0].item(), list(seen)

    before = model.weight.detach().clone()
    values, _ = run_virtual(step, world_size=3)
    assert values == ((0.0, [0]), (1.0, [1]), (2.0, [2]))
    assert seen == [] and torch.equal(model.weight, before)


def test_hooks_that_a_rank_registers_fire_once_for_it():
    model = nn.Linear(2, 2, bias=False)

    def step():
        fired = []
        model.weight.register_post_accumulate_grad_hook(fired.append)
        model(torch.ones(1, 2)).sum().backward()
        return len(fired)

    assert run_virtual(step, world_size=3)[0] == (1, 1, 1)


def test_ties_between_function_and_arguments_are_kept():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(given):
        assert given is model and optimizer.param_groups[0]["params"][0] is given.weight
        given(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model.weight.detach()

    values, _ = run_virtual(step, (model,), world_size=2)
    torch.testing.assert_close(values[0], model.weight.detach() - 1)


def test_views_of_one_buffer_stay_views_of_one_buffer():
    flat = torch.zeros(4)
    parts = flat[:2], flat[2:]

    def step():
        parts[1].fill_(7)
        return flat

    values, _ = run_virtual(step, world_size=2)
    assert values[0].tolist() == [0, 0, 7, 7] and flat.sum() == 0


def test_defaults_partials_bound_methods_and_nested_functions_are_copied():
    class Counter:
        def __init__(self):
            self.count = 0

        def add(self, by=1):
            self.count += by
            return self.count

    counter = Counter()

    def outer():
        total = 0

        def inner(box=[0]):  # noqa: B006 (the point)
            nonlocal total
            total += 1
            box[0] += 1
            return total, box[0], counter.add()

        return inner

    inner = outer()
    assert run_virtual(inner, world_size=2)[0] == ((1, 1, 1), (1, 1, 1))
    assert inner()[:2] == (1, 1) and counter.count == 1
    assert run_virtual(counter.add, world_size=2)[0] == (2, 2)
    assert run_virtual(functools.partial(counter.add, by=5), world_size=2)[0] == (6, 6)


def test_two_closures_over_one_variable_still_share_it():
    def make():
        n = 0

        def up():
            nonlocal n
            n += 1

        def get():
            return n

        return up, get

    up, get = copy_for_rank(make())
    up()
    assert get() == 1


def test_a_function_that_refers_to_itself_is_copied():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    copied = copy_for_rank(factorial)
    assert copied is not factorial and copied(4) == 24


def test_ties_flags_and_gradients_are_kept():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model[1].bias.grad = torch.ones(2)
    copied = copy_for_rank(model)
    assert copied[1].weight is copied[0].weight is not model[0].weight
    assert not copied[0].bias.requires_grad
    assert copied[1].bias.grad.tolist() == [1, 1]
    assert copied[1].bias.grad is not model[1].bias.grad


@pytest.mark.parametrize("where", ["closure", "argument"])
def test_what_cannot_be_copied_is_named(where):
    lock = threading.Lock()

    def closes_over_it():
        return lock

    def takes_it(held):
        return held

    with pytest.raises(TypeError) as refused:
        if where == "closure":
            run_virtual(closes_over_it)
        else:
            run_virtual(takes_it, kwargs={"held": lock})
    assert ("'lock'" if where == "closure" else "'held'") in str(refused.value)
    assert "(lock)" in str(refused.value)


def test_a_tensor_with_a_history_is_refused_with_the_way_out():
    result = torch.ones(2, requires_grad=True) * 2

    def step():
        return result

    with pytest.raises(TypeError, match=r"'result'.*detach"):
        run_virtual(step)


def test_a_notebooks_globals_are_copied_and_its_classes_are_shared():
    cells = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(
        """
import torch, torch.distributed as dist

class Net(torch.nn.Linear):
    pass

model, counter, unused = Net(2, 2), 0, object()

def count():
    global counter
    counter += 1
    return counter

def step():
    with torch.no_grad():
        model.weight.fill_(dist.get_rank())
    count()
    dist.barrier()
    return model.weight[0, 0].item(), count(), counter, type(model) is Net
""",
        cells,
    )
    before = cells["model"].weight.detach().clone()
    values, _ = run_virtual(cells["step"], world_size=3)
    assert values == ((0.0, 2, 2, True), (1.0, 2, 2, True), (2.0, 2, 2, True))
    assert torch.equal(cells["model"].weight, before) and cells["counter"] == 0


def test_a_global_that_cannot_be_copied_is_named():
    cells = {"__name__": "__main__", "lock": threading.Lock()}
    exec("def step():\n    return lock", cells)
    with pytest.raises(TypeError, match="the global 'lock' that step uses"):
        run_virtual(cells["step"])


def test_deepcopy_is_as_it_was_after_a_copy():
    import copy

    cell = []

    def closure():
        return cell

    copy_for_rank(closure)
    assert copy.deepcopy(closure) is closure
