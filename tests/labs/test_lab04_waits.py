"""4.2 and 4.3: waits that stand too early, too late or on the CPU are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab.program import ProgramBuilder, resolve
from overlaplab_course.lab04 import checks, given, reference
from overlaplab_course.lab04.given import BOARD


def send(tensor):
    return dist.all_reduce(tensor, async_op=True)


def waits_at_once(x, w):
    a = x @ w["a"]
    send(a).wait()
    b = x @ w["b"]
    send(b).wait()
    c = x @ w["c"]
    return a @ w["d"] + b @ w["e"] + c


def waits_for_both_before_the_first_reader(x, w):
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    sum_a.wait()
    sum_b.wait()
    return a @ w["d"] + b @ w["e"] + c


def waits_after_the_reader(x, w):
    """z reads b while it is being summed."""
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    sum_a.wait()
    y = a @ w["d"]
    z = b @ w["e"]
    sum_b.wait()
    return y + z + c


def forgets_one(x, w):
    a = x @ w["a"]
    send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    sum_b.wait()
    return a @ w["d"] + b @ w["e"] + c


def waits_for_the_wrong_one(x, w):
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    z = b @ w["e"]
    sum_a.wait()
    y = a @ w["d"]
    sum_b.wait()
    return y + z + c


def blocks_the_cpu(x, w):
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    while not (sum_a.is_completed() and sum_b.is_completed()):
        pass
    return a @ w["d"] + b @ w["e"] + x @ w["c"]


def waits_on_a_stream_that_nobody_reads_on(x, w):
    """Errata: wait() holds the stream that is current at the call."""
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    with streams.stream(streams.Stream()):
        sum_a.wait()
        sum_b.wait()
    return a @ w["d"] + b @ w["e"] + c


def forgets_to_sum(x, w):
    a, b = x @ w["a"], x @ w["b"]
    return a @ w["d"] + b @ w["e"] + x @ w["c"]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (waits_at_once, checks.STEP),
        (waits_for_both_before_the_first_reader, checks.STEP),
        (waits_after_the_reader, checks.NO_RACE),
        (forgets_one, checks.WAITED),
        (waits_for_the_wrong_one, checks.NO_RACE),
        (blocks_the_cpu, checks.STEP),
        (waits_on_a_stream_that_nobody_reads_on, checks.NO_RACE),
        (forgets_to_sum, checks.VALUES),
    ],
)
def test_wrong_waits_are_refused_for_their_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.2"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)
    assert verdict.timeline is not None


def test_who_waits_at_once_learns_that_nothing_is_hidden():
    assert "nothing is hidden" in judge(find_exercise("4.2"), waits_at_once).hint


def test_who_blocks_the_cpu_learns_so():
    assert "the CPU itself waits" in judge(find_exercise("4.2"), blocks_the_cpu).hint


def each_sum_on_a_stream_of_its_own(x, w):
    current = streams.current_stream()
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    other = streams.Stream()
    with streams.stream(other):
        sum_a.wait()
        y = a @ w["d"]
        sum_b.wait()
        z = b @ w["e"]
    current.wait_stream(other)
    return y + z + c


def futures(x, w):
    a = x @ w["a"]
    sum_a = send(a)
    b = x @ w["b"]
    sum_b = send(b)
    c = x @ w["c"]
    sum_a.get_future().wait()
    y = a @ w["d"]
    sum_b.get_future().wait()
    return y + b @ w["e"] + c


def the_larger_sum_first(x, w):
    """Another order, as short."""
    b = x @ w["b"]
    sum_b = send(b)
    a = x @ w["a"]
    sum_a = send(a)
    c = x @ w["c"]
    sum_b.wait()
    z = b @ w["e"]
    sum_a.wait()
    return a @ w["d"] + z + c


@pytest.mark.parametrize("right", [each_sum_on_a_stream_of_its_own, futures])
def test_unusual_waits_pass(right):
    verdict = judge(find_exercise("4.2"), right)
    assert verdict.passed, str(verdict)


def in_the_order_of_the_paper(x, w):
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    gate = x @ w["gate"]
    dist.all_reduce(gate)
    routed = x @ w["routed_in"]
    dist.all_reduce(routed)
    return (routed @ w["routed_out"] + shared) * gate


def the_gate_first(x, w):
    """Everything is asynchronous; the long chain sets out second."""
    gate = x @ w["gate"]
    sum_gate = send(gate)
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_gate.wait()
    sum_routed.wait()
    return (routed @ w["routed_out"] + shared) * gate


def the_shared_branch_first(x, w):
    """What is free is computed when nothing travels."""
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    gate = x @ w["gate"]
    sum_gate = send(gate)
    sum_routed.wait()
    y = routed @ w["routed_out"]
    sum_gate.wait()
    return (y + shared) * gate


def both_waits_before_the_long_chain(x, w):
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    gate = x @ w["gate"]
    sum_gate = send(gate)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_gate.wait()
    sum_routed.wait()
    y = routed @ w["routed_out"]
    return (y + shared) * gate


def one_message_for_both(x, w):
    """A coalesced message: the long chain waits for the gate's bytes too."""
    gate, routed = x @ w["gate"], x @ w["routed_in"]
    with dist._coalescing_manager(async_ops=True) as work:
        dist.all_reduce(routed)
        dist.all_reduce(gate)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    work.wait()
    return (routed @ w["routed_out"] + shared) * gate


def adds_before_the_sum(x, w):
    """Errata: half of a sum."""
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    gate = x @ w["gate"]
    sum_gate = send(gate)
    y = routed @ w["routed_out"]
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_routed.wait()
    sum_gate.wait()
    return (y + shared) * gate


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (in_the_order_of_the_paper, checks.STEP),
        (the_gate_first, checks.STEP),
        (the_shared_branch_first, checks.STEP),
        (both_waits_before_the_long_chain, checks.STEP),
        (one_message_for_both, checks.STEP),
        (adds_before_the_sum, checks.NO_RACE),
    ],
)
def test_a_wrong_order_is_refused_for_its_own_reason(wrong, sentence, faults):
    verdict = judge(find_exercise("4.3"), wrong)
    assert not verdict.passed
    assert sentence in faults(verdict), str(verdict)


def test_who_sends_the_gate_first_learns_which_message_is_late():
    hint = judge(find_exercise("4.3"), the_gate_first).hint
    assert hint.endswith("Launch that message first")


def the_gate_between(x, w):
    """The shared branch is cut by the gate's matmul."""
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    hidden = (x @ w["shared_in"]).relu()
    gate = x @ w["gate"]
    sum_gate = send(gate)
    shared = hidden @ w["shared_out"]
    sum_routed.wait()
    y = routed @ w["routed_out"] + shared
    sum_gate.wait()
    return y * gate


def on_two_streams(x, w):
    side = streams.Stream()
    current = streams.current_stream()
    routed = x @ w["routed_in"]
    sum_routed = send(routed)
    gate = x @ w["gate"]
    sum_gate = send(gate)
    side.wait_stream(current)
    with streams.stream(side):
        shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_routed.wait()
    y = routed @ w["routed_out"]
    current.wait_stream(side)
    sum_gate.wait()
    return (y + shared) * gate


@pytest.mark.parametrize("right", [the_gate_between, on_two_streams])
def test_an_unusual_order_passes(right):
    verdict = judge(find_exercise("4.3"), right)
    assert verdict.passed, str(verdict)


# What `experts` launches, with the times of the board, and what each waits for.
COMPUTE_NS = {
    "routed": 160_000,
    "gate": 64_000,
    "shared in": 40_000,
    "shared out": 40_000,
    "y": 160_000,
    "product": 0,
}
AFTER = {
    "sum routed": ("routed",),
    "sum gate": ("gate",),
    "shared out": ("shared in",),
    "y": ("sum routed",),
    "product": ("y", "shared out", "sum gate"),
}
BYTES = {"sum routed": 800_000, "sum gate": 320_000}


def orders(done=()):
    names = [*COMPUTE_NS, *BYTES]
    if len(done) == len(names):
        yield done
    for name in names:
        if name not in done and set(AFTER.get(name, ())) <= set(done):
            yield from orders((*done, name))


def step_ns(order):
    builder = ProgramBuilder(num_ranks=1, represents=4)
    index = {}
    for name in order:
        for earlier in AFTER.get(name, ()):
            if earlier in BYTES:
                builder.wait(0, index[earlier])
        if name in BYTES:
            index[name] = builder.collective(0, "all_reduce", bytes=BYTES[name])
        else:
            index[name] = builder.compute(0, name, ns=COMPUTE_NS[name])
    return resolve(builder.build(), BOARD).step_ns


def test_no_order_of_the_launches_beats_the_reference_of_4_3():
    every = list(orders())
    assert len(every) > 100
    best = min(map(step_ns, every))
    reference_ns = checks.best_run(
        reference.experts, given.experts_inputs, checks.STEPS_ON[0]
    ).timeline.step_ns
    small_ns = 2_500  # relu, two additions and a product, which `orders` leaves out
    assert best >= reference_ns - small_ns


def test_the_references_pass():
    for number, solution in (("4.2", reference.two_sums), ("4.3", reference.experts)):

        def step(x, w, solution=solution):
            return solution(x, w)

        assert judge(find_exercise(number), step).passed


def test_each_rank_has_matrices_of_its_own():
    for first, second in pairwise(given.two_sums_inputs()):
        assert not (first[1]["a"] == second[1]["a"]).any()
