"""What one call does, by its overload and arguments, as the mode of a rank asks."""

import pytest
import torch

from overlaplab.operators import aliased, operator, read, written

aten = torch.ops.aten


def effects(overload, *args, **kwargs):
    """The positions of what a call reads, writes and aliases, `out` as "out"."""
    facts = operator(overload)
    names = {id(t): i for i, t in enumerate(args)}
    names |= {id(t): name for name, t in kwargs.items()}
    writes = written(facts, args, kwargs)
    found = read(facts, args, kwargs, writes), writes, aliased(facts, args, kwargs)
    return [[names[id(tensor)] for tensor in tensors] for tensors in found]


def a():
    return torch.ones(4, 4)


@pytest.mark.parametrize(
    ("overload", "args", "reads", "writes", "aliases"),
    [
        (aten.mm.default, (a(), a()), [0, 1], [], []),
        (aten.add_.Tensor, (a(), a()), [0, 1], [0], [0]),
        (aten.copy_.default, (a(), a()), [1], [0], [0]),
        (aten.zero_.default, (a(),), [], [0], [0]),
        (aten.zeros_like.default, (a(),), [], [], []),
        (aten.view.default, (a(), [16]), [0], [], [0]),
        (aten._unsafe_view.default, (a(), [16]), [0], [], [0]),
        (aten.expand.default, (a(), [2, 4, 4]), [0], [], [0]),
        (aten.split.Tensor, (a(), 2), [0], [], [0]),
        (aten.clone.default, (a(),), [0], [], []),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_a_call_reads_writes_and_shares(overload, args, reads, writes, aliases):
    assert effects(overload, *args) == [reads, writes, aliases]


def test_what_is_written_under_a_name_is_not_read():
    x, y, out = a(), a(), a()
    assert effects(aten.mm.out, x, y, out=out) == [[0, 1], ["out"], ["out"]]


def test_running_statistics_are_written_though_no_schema_says_so():
    args = (torch.ones(2, 3), *(torch.ones(3) for _ in range(4)), True, 0.1, 1e-5)
    reads, writes, aliases = effects(aten.native_batch_norm.default, *args)
    assert (reads, writes, aliases) == ([0, 1, 2, 3, 4], [3, 4], [])


@pytest.mark.parametrize(
    ("overload", "draws"),
    [
        (aten.native_dropout.default, True),
        (aten.bernoulli_.float, True),
        (aten.rand_like.default, True),
        (aten.randperm.default, True),
        (aten.mul.Tensor, False),
        (aten.native_dropout_backward.default, False),
    ],
    ids=str,
)
def test_what_draws_random_numbers(overload, draws):
    assert operator(overload).draws is draws


def test_a_collective_is_one_and_its_wait_is_not():
    functional = torch.ops._c10d_functional
    assert operator(functional.all_reduce_coalesced.default).is_collective
    wait = operator(functional.wait_tensor.default)
    assert (wait.is_collective, wait.records, wait.aliases) == (False, False, (0,))


def test_the_same_product_counts_the_same_whatever_launches_it():
    x, y = torch.ones(3, 5), torch.ones(5, 7)
    mm, addmm = operator(aten.mm.default).flops, operator(aten.addmm.default).flops
    assert mm((x, y), {}, x @ y) == 2 * 3 * 5 * 7
    assert addmm((torch.ones(7), x, y), {}, x @ y) == 2 * 3 * 5 * 7
    convolve = operator(aten.convolution.default)
    args = (torch.ones(1, 2, 8, 8), torch.ones(4, 2, 3, 3), None, [1, 1], [0, 0])
    args = (*args, [1, 1], False, [0, 0], 1)
    out = aten.convolution.default(*args)
    assert convolve.flops(args, {}, out) == 2 * 4 * 6 * 6 * 2 * 3 * 3
