"""The prompt law and its neighbours, on backward passes written by hand."""

from __future__ import annotations

from overlaplab.grading.laws import (
    overlap_law,
    prompt_law,
    same_order_law,
    step_law,
    unblocked_law,
)
from overlaplab.grading.program_laws import slow_law, slower
from overlaplab.hardware import find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve
from tests.grading.handmade import GRADIENT_BYTES as SIZE
from tests.grading.handmade import LAYER_NS, Script, on_every_rank, part

BUCKETS = [["3", "2"], ["1", "0"]]


def bucketed(s: Script, r: int) -> None:
    """Each bucket coalesced, as soon as it is full; one wait at the end."""
    works = []
    for names in BUCKETS:
        works.append(s.send(r, *[s.gradient(r, name) for name in names]))
    for work in works:
        s.builder.wait(r, work)
    s.compute(r, "optimizer", ns=100)


def late(s: Script, r: int) -> None:
    """All in the last hook."""
    gradients = [[s.gradient(r, name) for name in names] for names in BUCKETS]
    for bucket in gradients:
        s.builder.wait(r, s.send(r, *bucket))
    s.compute(r, "optimizer", ns=100)


def waiting_in_the_hook(s: Script, r: int) -> None:
    for names in BUCKETS:
        work = s.send(r, *[s.gradient(r, name) for name in names])
        s.builder.wait(r, work)
    s.compute(r, "optimizer", ns=100)


def test_a_bucket_sent_by_the_hook_that_fills_it_is_prompt():
    assert prompt_law(on_every_rank(bucketed), BUCKETS) == []


def test_one_collective_a_parameter_is_prompt_too():
    def write(s: Script, r: int) -> None:
        for names in BUCKETS:
            for name in names:
                s.send(r, s.gradient(r, name))

    assert prompt_law(on_every_rank(write), BUCKETS) == []


def test_buckets_sent_in_the_last_hook_are_late_and_the_message_has_the_times():
    first, *_ = prompt_law(on_every_rank(late), BUCKETS)
    assert first.message == (
        "right gradients, no overlap: bucket 0 was full at 0.010 ms, the wire was "
        "free, it started at 0.020 ms"
    )
    assert (first.law, first.bucket, first.step) == ("prompt", 0, 1)


def test_one_bucket_that_is_late_among_others_is_not_called_no_overlap():
    def write(s: Script, r: int) -> None:
        first = [s.gradient(r, name) for name in BUCKETS[0]]
        second = [s.gradient(r, BUCKETS[1][0])]
        s.send(r, *first)
        s.send(r, *second, s.gradient(r, BUCKETS[1][1]))

    (violation,) = prompt_law(on_every_rank(write), BUCKETS)
    assert violation.message == (
        "bucket 0 was full at 0.010 ms, the wire was free, it started at 0.015 ms"
    )


def test_times_in_messages_count_from_the_beginning_of_their_step():
    script = Script(2)
    for rank in range(2):
        script.step(rank, 1)
        script.compute(rank, "mm", ns=1_000_000)
        script.step(rank, 2)
        late(script, rank)
    first, *_ = prompt_law(script.evidence(), BUCKETS)
    assert "full at 0.010 ms" in first.message and first.step == 2


def test_one_collective_for_everything_is_late_for_the_first_bucket():
    def write(s: Script, r: int) -> None:
        everything = [s.gradient(r, n) for names in BUCKETS for n in names]
        s.builder.wait(r, s.send(r, *everything))

    found = prompt_law(on_every_rank(write), BUCKETS)
    assert [violation.bucket for violation in found] == [0]


def test_a_bucket_may_start_late_while_the_wire_is_busy():
    def write(s: Script, r: int) -> None:
        for names in BUCKETS:
            s.send(r, *[s.gradient(r, n, ns=100) for n in names])

    evidence = on_every_rank(write)
    bucket = evidence.bucket(BUCKETS[1], 1)
    assert bucket is not None
    assert bucket.ready_ns == 400
    assert bucket.start_ns == 200 + 1_000 + 2 * SIZE // 10
    assert prompt_law(evidence, BUCKETS, slack_ns=0) == []


def test_all_behind_the_backward_pass_is_late_in_whichever_order():
    """In the wrong order each bucket but the first only waits for the one before."""

    def write(s: Script, r: int) -> None:
        gradients = {name: s.gradient(r, name) for names in BUCKETS for name in names}
        for names in reversed(BUCKETS):
            s.send(r, *[gradients[name] for name in names])

    (violation,) = prompt_law(on_every_rank(write), BUCKETS)
    assert violation.message == (
        "right gradients, no overlap: bucket 0 was full at 0.010 ms, the wire was "
        "free, it started at 0.023 ms"
    )


def test_the_learners_own_copies_are_granted_and_nothing_else():
    def write(s: Script, r: int, *, idle_ns: int) -> None:
        for names in BUCKETS:
            flat = s.builder.storage(r, bytes=2 * SIZE)
            gradients = [s.gradient(r, name) for name in names]
            s.compute(r, "mm", ns=idle_ns)
            s.compute(r, "cat", ns=700, reads=gradients, writes=(flat,))
            s.send(r, flat)

    packed = on_every_rank(lambda s, r: write(s, r, idle_ns=0))
    assert prompt_law(packed, BUCKETS, slack_ns=0) == []
    dawdling = on_every_rank(lambda s, r: write(s, r, idle_ns=900))
    assert len(prompt_law(dawdling, BUCKETS, slack_ns=800)) == 2


def test_what_autograd_launches_before_the_hook_is_granted():
    def write(s: Script, r: int) -> None:
        for names in BUCKETS:
            gradients = []
            for name in names:
                access = s.builder.storage(r, bytes=SIZE)
                s.compute(r, "mm", ns=LAYER_NS, writes=(access,))
                s.compute(r, "mm", ns=LAYER_NS)  # the gradient of the input
                s.name(r, access, f"grad {name}")
                gradients.append(access)
            s.send(r, *gradients)

    evidence = on_every_rank(write)
    bucket = evidence.bucket(BUCKETS[0], 1)
    assert bucket is not None
    assert bucket.start_ns == bucket.ready_ns + LAYER_NS
    assert prompt_law(evidence, BUCKETS, slack_ns=0) == []


def test_the_cpus_launches_are_granted_where_the_gpu_waits_for_them():
    script = Script(2)
    for rank in range(2):
        script.step(rank, 1)
        for names in BUCKETS:
            flat = script.builder.storage(rank, bytes=2 * SIZE)
            for slot, name in enumerate(names):
                script.compute(
                    rank,
                    "copy_",
                    ns=10,
                    reads=(script.gradient(rank, name, ns=10),),
                    writes=(part(flat, slot * SIZE, SIZE),),
                )
            script.send(rank, flat)
    evidence = script.evidence("h200-nvlink")
    assert prompt_law(evidence, BUCKETS) == []


def test_a_bucket_that_is_never_sent_is_named():
    def write(s: Script, r: int) -> None:
        s.send(r, *[s.gradient(r, name) for name in BUCKETS[0]])
        for name in BUCKETS[1]:
            s.gradient(r, name)

    (violation,) = prompt_law(on_every_rank(write), BUCKETS)
    assert "never sent" in violation.message and "1, 0" in violation.message


def test_a_collective_that_does_not_wait_for_the_gradient_is_early():
    def write(s: Script, r: int) -> None:
        gradients = [s.gradient(r, name) for name in BUCKETS[0]]
        s.send(r, *gradients, stream="stream 1")  # no edge from the default stream

    first, *_ = prompt_law(on_every_rank(write), BUCKETS[:1])
    assert first.law == "early"
    assert "began to send the gradient of 3 at 0.000 ms" in first.message
    assert "complete at 0.005 ms" in first.message


def test_the_slowest_rank_decides_when_a_bucket_is_full():
    script = Script(2)
    for rank in range(2):
        script.step(rank, 1)
        for names in BUCKETS:
            grads = [script.gradient(rank, n, ns=LAYER_NS * (1 + rank)) for n in names]
            script.send(rank, *grads)
    evidence = script.evidence()
    assert prompt_law(evidence, BUCKETS, slack_ns=0) == []
    bucket = evidence.bucket(BUCKETS[0], 1)
    assert bucket is not None and (bucket.rank, bucket.ready_ns) == (1, 4 * LAYER_NS)


def test_waiting_in_the_hook_is_prompt_and_yet_found():
    evidence = on_every_rank(waiting_in_the_hook)
    assert prompt_law(evidence, BUCKETS) == []
    first, *_ = unblocked_law(evidence)
    assert "gradient of 1 was computed only after a collective" in first.message


def test_waiting_at_the_end_blocks_nothing():
    assert unblocked_law(on_every_rank(bucketed)) == []


def test_blocking_the_cpu_in_the_hook_is_found():
    def write(s: Script, r: int) -> None:
        for names in BUCKETS:
            work = s.send(r, *[s.gradient(r, name) for name in names])
            s.builder.host_wait(r, [work])
            s._next[r] += 1

    assert unblocked_law(on_every_rank(write)) != []


def test_waiting_through_another_stream_is_found():
    def write(s: Script, r: int) -> None:
        for names in BUCKETS:
            work = s.send(r, *[s.gradient(r, name) for name in names])
            s.builder.wait(r, work, stream="stream 1")
            s.compute(r, "copy_", ns=1, stream="stream 1")
            s.builder.wait_stream(r, "default", "stream 1")

    assert unblocked_law(on_every_rank(write)) != []


def test_a_step_as_fast_as_the_reference_passes_whatever_its_design():
    evidence = on_every_rank(late)
    slow = evidence.step_ns
    assert overlap_law(evidence, BUCKETS, slow) == []
    fast = on_every_rank(bucketed).step_ns
    assert overlap_law(evidence, BUCKETS, fast) != []
    assert fast[0] < slow[0]


def test_step_law_has_two_percent_and_no_more():
    assert step_law(1_020, 1_000) == []
    assert step_law(1_021, 1_000) != []


def test_on_a_clock_with_expensive_launches_many_small_kernels_are_slow():
    def of_kernels(number: int) -> Program:
        builder = ProgramBuilder(num_ranks=1)
        for _ in range(number):
            builder.compute(0, "mm", ns=100_000 // number)
        return builder.build()

    one, many = of_kernels(1), of_kernels(50)
    clock = slower(find_hardware("chalk"), launch_ns=10_000)
    assert resolve(one, "chalk").step_ns == resolve(many, "chalk").step_ns
    (slow,) = slow_law(clock, many, one)
    assert slow.message == "chalk, slow launches and link: the step took 0.502 ms"
    assert slow_law(clock, one, many) == []


def test_ranks_that_send_different_gradients_in_one_collective_are_found():
    script = Script(2)
    for rank, order in enumerate(("ab", "ba")):
        script.step(rank, 1)
        for name in order:
            script.send(rank, script.gradient(rank, name))
    first, *_ = same_order_law(script.evidence())
    assert first.message == (
        "in step 1 rank 0 sends the gradient of a in collective #0 of process group "
        "'default', rank 1 in collective #1 of process group 'default'"
    )
    assert same_order_law(on_every_rank(bucketed)) == []
