"""16.2, 16.5 and 16.6: segments, two runs, and masks; all are run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
)

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab16 import (
    compare_checks,
    mask_checks,
    masks,
    stack,
)
from overlaplab_course.lab16 import segment_checks as segments
from overlaplab_course.lab16.stack import Stack

# -- 16.2


def parts(layers, k):
    n = len(layers)
    return [layers[n * i // k : n * (i + 1) // k] for i in range(k)]


def through(part):
    def run(x):
        for layer in part:
            x = layer(x)
        return x

    return run


def in_segments(layers, x, k):
    for part in parts(layers, k):
        x = checkpoint(through(part), x, use_reentrant=False)
    return x


def the_last_is_kept(layers, x, k):
    *again, last = parts(layers, k)
    for part in again:
        x = checkpoint(through(part), x, use_reentrant=False)
    return through(last)(x)


def of_equal_length(layers, x, k):
    """The longer segments first, cut by a step of the range."""
    n, x = len(layers), x.requires_grad_()
    sizes = [n // k + (i < n % k) for i in range(k)]
    while sizes:
        part, layers = layers[: sizes[0]], layers[sizes.pop(0) :]
        x = checkpoint(torch.nn.Sequential(*part), x, use_reentrant=True)
    return x


def plain(layers, x, k):
    return through(layers)(x)


def each_layer(layers, x, k):
    """k is not used."""
    return in_segments(layers, x, len(layers))


def the_rest_is_one(layers, x, k):
    """torch's own: the last segment has all that does not divide."""
    return checkpoint_sequential(list(layers), k, x, use_reentrant=False)


def nested(layers, x, k):
    """A checkpoint inside a checkpoint: computed a third time."""

    def twice(part):
        def run(x):
            for layer in part:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

        return run

    for part in parts(layers, k):
        x = checkpoint(twice(part), x, use_reentrant=False)
    return x


def from_the_beginning(layers, x, k):
    """Boundaries are freed, too: each segment begins again at x."""
    whole = checkpoint(through(layers), x, use_reentrant=False)
    for i in range(1, k):
        start = checkpoint(
            through(layers[: len(layers) * i // k]), x, use_reentrant=False
        )
        whole = whole + 0 * start.sum()
    return whole


def the_old_way(layers, x, k):
    """An input without gradient cuts the graph."""
    for part in parts(layers, k):
        x = checkpoint(through(part), x, use_reentrant=True)
    return x


def detached(layers, x, k):
    for part in parts(layers, k):
        x = checkpoint(through(part), x.detach(), use_reentrant=False)
    return x


def another_mask(layers, x, k):
    for part in parts(layers, k):
        x = checkpoint(through(part), x, use_reentrant=False, preserve_rng_state=False)
    return x


def draws_once_more(layers, x, k):
    """For luck."""
    y = in_segments(layers, x, k)
    torch.rand(1)
    return y


WRONG_SEGMENTS = {
    plain: segments.SEGMENTS,
    each_layer: segments.SEGMENTS,
    the_rest_is_one: segments.SEGMENTS,
    nested: segments.TWICE,
    from_the_beginning: segments.TWICE,
    the_old_way: segments.VALUES,
    detached: segments.VALUES,
    another_mask: segments.VALUES,
    draws_once_more: segments.STATE,
}


@pytest.mark.parametrize("function", WRONG_SEGMENTS, ids=lambda f: f.__name__)
def test_wrong_segments_are_refused_for_their_own_reason(function, faults):
    wrong = faults(judge(find_exercise("16.2"), function))
    assert WRONG_SEGMENTS[function] in wrong, wrong


@pytest.mark.parametrize("function", [in_segments, the_last_is_kept, of_equal_length])
def test_right_segments_pass_however_they_are_cut(function):
    verdict = judge(find_exercise("16.2"), function)
    assert verdict.passed, str(verdict)


def test_the_lane_of_64_layers_is_k_plus_64_over_k_and_three_gradients():
    seen = stack.sweep(in_segments, 64, (1, 4, 8, 16, 64))
    assert seen == {k: k + 64 / k + 3 for k in (1, 4, 8, 16, 64)}


# -- 16.5


def peak(run):
    return max(size for _, size in run.curve)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def compare(plain, other, *, peak=peak, extra=None, same=same):
    """What the exercise asks for, with a knob for each mistake."""
    extra = extra or (lambda a, b: 100 * (b / a - 1))
    return (
        (peak(plain) - peak(other)) / 2**20,
        extra(plain.step_ns, other.step_ns),
        same(plain.grads, other.grads),
    )


def by_numpy(plain, other):
    """An iterator, torch's numbers, bytes compared."""
    most = [torch.tensor([s for _, s in run.curve]).max() for run in (plain, other)]
    names = sorted(plain.grads)
    equal = names == sorted(other.grads) and all(
        plain.grads[n].numpy().tobytes() == other.grads[n].numpy().tobytes()
        for n in names
    )
    ratio = torch.tensor(other.step_ns / plain.step_ns, dtype=torch.float64)
    saved = float(most[0] - most[1]) / 2**20
    return iter([saved, (ratio - 1) * 100, torch.tensor(equal)])


def close(a, b):
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n]) for n in a)


def in_common(a, b):
    return all(torch.equal(a[n], b[n]) for n in a if n in b)


def in_order(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.values(), b.values(), strict=False))


def at_the_end(run):
    return run.curve[-1][1]


def in_the_middle(run):
    """Where forward and backward meet, more or less."""
    time = run.step_ns / 3
    return [size for at, size in run.curve if at <= time][-1]


def mean(run):
    return sum(size for _, size in run.curve) / len(run.curve)


WRONG_COMPARES = {
    "close is equal": ({"same": close}, compare_checks.EQUAL),
    "names in common": ({"same": in_common}, compare_checks.EQUAL),
    "in order": ({"same": in_order}, compare_checks.EQUAL),
    "a number of them": ({"same": lambda a, b: len(a)}, compare_checks.EQUAL),
    "a text": ({"same": lambda a, b: str(same(a, b))}, compare_checks.EQUAL),
    "at the end": ({"peak": at_the_end}, compare_checks.SAVED),
    "at the border": ({"peak": in_the_middle}, compare_checks.SAVED),
    "the mean": ({"peak": mean}, compare_checks.SAVED),
    "in MB": ({"peak": lambda run: peak(run) * 2**20 / 1e6}, compare_checks.SAVED),
    "of the other": ({"extra": lambda a, b: 100 * (b - a) / b}, compare_checks.EXTRA),
    "a ratio": ({"extra": lambda a, b: b / a}, compare_checks.EXTRA),
    "in ms": ({"extra": lambda a, b: (b - a) / 1e6}, compare_checks.EXTRA),
}


@pytest.mark.parametrize("name", WRONG_COMPARES)
def test_a_wrong_comparison_is_refused_for_its_own_reason(name, faults):
    knobs, sentence = WRONG_COMPARES[name]

    def wrong(plain, other):
        return compare(plain, other, **knobs)

    assert list(faults(judge(find_exercise("16.5"), wrong))) == [sentence]


@pytest.mark.parametrize("function", [compare, by_numpy])
def test_a_right_comparison_passes_however_it_is_written(function):
    verdict = judge(find_exercise("16.5"), function)
    assert verdict.passed, str(verdict)


# -- 16.6


def forward(block, x):
    state = torch.get_rng_state()
    with torch.no_grad():
        return block(x), state


def run_again(block, x, grad):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = block(x)
    y.backward(grad)
    return x.grad


def backward(block, x, remembered, grad):
    now = torch.get_rng_state()
    torch.set_rng_state(remembered)
    found = run_again(block, x, grad)
    torch.set_rng_state(now)
    return found


def with_fork(block, x, remembered, grad):
    """torch's own way back."""
    with torch.random.fork_rng([]):
        torch.set_rng_state(remembered)
        return run_again(block, x, grad)


def by_autograd_grad(block, x, remembered, grad):
    """Gradients are asked for, and added by hand."""
    now = torch.get_rng_state()
    torch.set_rng_state(remembered)
    weights = list(block.parameters())
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = block(x)
    of_x, *others = torch.autograd.grad(y, [x, *weights], grad)
    for weight, of_weight in zip(weights, others, strict=True):
        weight.grad = of_weight if weight.grad is None else weight.grad + of_weight
    torch.set_rng_state(now)
    return of_x


def drawn_anew(block, x, remembered, grad):
    return run_again(block, x, grad)


def remembered_too_late(block, x):
    with torch.no_grad():
        y = block(x)
    return y, torch.get_rng_state()


def a_seed_of_its_own(block, x, remembered, grad):
    torch.manual_seed(0)
    return run_again(block, x, grad)


def never_set_back(block, x, remembered, grad):
    torch.set_rng_state(remembered)
    return run_again(block, x, grad)


def set_back_to_the_first(block, x, remembered, grad):
    found = backward(block, x, remembered, grad)
    torch.set_rng_state(remembered)
    return found


def keeps_the_graph(block, x):
    """Nothing is computed again; all is kept."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = block(x)
    return y.detach(), (x, y)


def of_the_graph(block, x, remembered, grad):
    leaf, y = remembered
    y.backward(grad)
    return leaf.grad


def without_dropout(block, x, remembered, grad):
    block.eval()
    found = run_again(block, x, grad)
    block.train()
    return found


def looks_first(block, x, remembered, grad):
    """One more forward, to see."""
    now = torch.get_rng_state()
    with torch.no_grad():
        block(x)
    torch.set_rng_state(now)
    return backward(block, x, remembered, grad)


WRONG_MASKS = {
    "drawn anew": (forward, drawn_anew, mask_checks.VALUES),
    "remembered too late": (remembered_too_late, backward, mask_checks.VALUES),
    "a seed of its own": (forward, a_seed_of_its_own, mask_checks.VALUES),
    "without dropout": (forward, without_dropout, mask_checks.VALUES),
    "never set back": (forward, never_set_back, mask_checks.STATE),
    "set back to the first": (forward, set_back_to_the_first, mask_checks.STATE),
    "looks first": (forward, looks_first, mask_checks.TWICE),
    "keeps the graph": (keeps_the_graph, of_the_graph, mask_checks.KEEPS),
}


@pytest.mark.parametrize("name", WRONG_MASKS)
def test_a_wrong_mask_is_refused_for_its_own_reason(name, faults):
    first, second, sentence = WRONG_MASKS[name]
    wrong = faults(judge(find_exercise("16.6"), first, second))
    assert sentence in wrong, wrong


@pytest.mark.parametrize("second", [backward, with_fork, by_autograd_grad])
def test_the_same_mask_passes_however_it_is_drawn_again(second):
    verdict = judge(find_exercise("16.6"), forward, second)
    assert verdict.passed, str(verdict)


def test_a_mask_drawn_anew_gives_gradients_of_another_network():
    text = masks.draws_text(forward, drawn_anew).splitlines()
    assert text[0].endswith("0%") and not text[2].endswith(" 0%")
    assert stack.num_forwards(stack.right(Stack(6))) == 6
