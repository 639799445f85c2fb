"""The first line of a refusal says what is wrong, not what follows from it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab.grading.notebook import _first_reason
from overlaplab_course.lab00 import reference as ref00
from overlaplab_course.lab00.launches import resolved, six_launches
from overlaplab_course.lab02 import reference as ref02
from overlaplab_course.lab03 import reference as ref03
from overlaplab_course.lab05 import checks as lab05

NUMBER = 5
CASES: dict[str, tuple[str, tuple[Any, ...], str, str]] = {}


def refuse(id: str, *solutions: Any, says: str, hint: str = "", name: str = "") -> None:
    """A wrong solution, what its first line says, and its hint."""
    what = name or solutions[-1].__name__
    CASES[f"{id} {what}"] = id, solutions, says, hint


# -- lab 00


def rows(launches: Any, launch_us: int) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in resolved(launches, launch_us)]


def too_long(launches, launch_us):
    return [(a, b + 3 * (i == 2)) for i, (a, b) in enumerate(rows(launches, launch_us))]


def cpu_held_up(launches, launch_us):
    """Every operator that waits holds the CPU until it starts."""
    cpu, free, said = 0, {}, []
    for _, stream, took, waits in launches:
        ready = [said[i][1] for i in waits]
        if stream == "cpu":
            said.append((cpu, max([cpu, *ready])))
            cpu = said[-1][1]
            continue
        cpu += launch_us
        start = max([cpu, free.get(stream, 0), *ready])
        free[stream] = start + took
        said.append((start, start + took))
        cpu = start if waits else cpu
    return said


def losses_as_tensors(model, batches):
    losses, worst = ref00.train(model, batches)
    return [torch.tensor(x) for x in losses], worst


def async_op_forgotten(x, a):
    work = dist.all_reduce(x)
    product = a @ a
    work.wait()
    return product + x


table = rows(six_launches(NUMBER), 10)
table[1] = table[1][0], table[1][1] + 5
refuse(
    "0.1",
    NUMBER,
    table,
    says="line 1 (mm 2): 70 to 85 us",
    name="too long",
    hint="an end is the start plus what the operator takes",
)
refuse(
    "0.1",
    NUMBER,
    too_long,
    says="line 2 (mm 3): 80 to 93 us",
    hint="an end is the start plus what the operator takes",
)
refuse(
    "0.1",
    NUMBER,
    cpu_held_up,
    says="line 2 (copy 1): 55 to 107 us",
    hint="only a host sync holds the CPU",
)
refuse(
    "0.1",
    NUMBER,
    [1, 2],
    says="the schedule is [1, 2]; expected a list of 7",
    name="no pairs",
)
refuse(
    "0.2",
    NUMBER,
    {"returned_us": None},
    says="'returned_us' is not filled in",
    name="empty",
)
refuse("0.3", losses_as_tensors, says="losses is a list of Tensor, not a list of flo")
refuse("0.4", async_op_forgotten, says="wait() is called on None, where a work should")
refuse(
    "0.5",
    NUMBER,
    {"late_rank": None},
    says="'late_rank' is not filled in",
    name="empty",
)

# -- lab 02


def stopwatch(number: int, choose: Any) -> Any:
    def time_step(step):
        for _ in range(3):
            step()
        events = [streams.Event(enable_timing=True) for _ in range(number + 1)]
        for event in events[:-1]:
            event.record()
            step()
        events[-1].record()
        streams.synchronize()
        return choose([a.elapsed_time(b) for a, b in pairwise(events)])

    return time_step


def gaps_in_ms(timeline):
    return [(a / 1e6, b / 1e6, why) for a, b, why in ref02.find_gaps(timeline)]


def unsorted_summary(rows):
    """Merges neighbours only."""
    kernels = [row for row in rows if row.category == "kernel"]
    busy, end = 0, 0
    for row in kernels:
        busy += max(0, row.end_ns - max(row.start_ns, end))
        end = max(end, row.end_ns)
    return {**ref02.summary(rows), "busy_ns": busy}


def summary_of_all(rows):
    ends = max(r.end_ns for r in rows) - min(r.start_ns for r in rows)
    return {**ref02.summary(rows), "step_ns": ends}


refuse(
    "2.1",
    stopwatch(3, lambda ms: sorted(ms)[1]),
    says="step was called 6 times",
    hint="let it warm up first",
    name="six calls",
)
refuse("2.6", gaps_in_ms, says="your times are in ms; asked for are ns")
refuse("2.8b", unsorted_summary, says="right if the rows are sorted by their start")
refuse("2.8b", summary_of_all, says="right without the rows that are no kernels")

# -- lab 03


def issue_twice(tasks):
    ref03.issue(tasks[:-1])
    for _ in "ab":
        tasks[-1].run()


def waits_for_the_next_copy(samples, step):
    main, loading = streams.current_stream(), streams.Stream()
    pinned = [sample.pin_memory() for sample in samples]

    def load(i):
        with streams.stream(loading):
            return pinned[i].to(ol.device(), non_blocking=True)

    following = load(0)
    for i in range(len(samples)):
        batch = following
        if i + 1 < len(samples):
            following = load(i + 1)
        main.wait_stream(loading)  # too late: the next copy is in it
        batch.record_stream(main)
        step(batch)


refuse("3.1", issue_twice, says="rank 0 ran 'opt 1' 2 times")
refuse(
    "3.4",
    waits_for_the_next_copy,
    says="step 1 begins only when batch 2 has been copied too",
    hint="wait for the own batch's copy",
)

# -- lab 04


def sums_in_floats(tensors):
    flat = torch.cat([t.flatten().float() for t in tensors])
    dist.all_reduce(flat)
    parts = flat.split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


refuse("4.5", sums_in_floats, says="element 0 is 5,443,362,")

# -- lab 05

example = lab05.true_answers(lab05.EXAMPLE)
refuse(
    "5.2",
    NUMBER,
    example,
    says="register_hook, 'given': 7.0",
    name="the example's",
    hint="that is the example's number; yours are",
)

# -- lab 06


def hooks(body: Any) -> Any:
    def install_hooks(state):
        for param in state.params:
            hook = param.register_post_accumulate_grad_hook(lambda p: body(state, p))
            state.handles.append(hook)

    install_hooks.__name__ = body.__name__
    return install_hooks


def launch(state, param, *, count=1, **how):
    state.missing[state.bucket_of(param)] -= count
    for bucket, work in enumerate(state.works):
        if work is not None:
            continue
        if state.missing[bucket] > 0:
            return
        for p, place in state.pairs(bucket):
            place.copy_(p.grad)
        state.works[bucket] = dist.all_reduce(state.buffers[bucket], **how)


def forgotten_countdown(state, param):
    launch(state, param, count=0, async_op=True)


def blocking(state, param):
    launch(state, param)


def returning(state, param):
    launch(state, param, async_op=True)
    return param.grad


def finish(
    order: Any = lambda n: range(n), late: bool = True, zeros: bool = True
) -> Any:
    def finish_it(state):
        n, unsent = dist.get_world_size(), []
        for bucket in order(len(state.works)):
            if state.works[bucket] is None:
                unsent.append(bucket)
                for param, place in state.pairs(bucket):
                    if param.grad is not None:
                        place.copy_(param.grad)
                    elif zeros:
                        place.zero_()
                buffer = state.buffers[bucket]
                state.works[bucket] = dist.all_reduce(buffer, async_op=True)
        for bucket, work in enumerate(state.works):
            work.wait()
            for param, place in state.pairs(bucket):
                if late or bucket not in unsent:
                    param.grad = place / n
        state.missing = [len(bucket) for bucket in state.plan]
        state.works = [None] * len(state.plan)

    return finish_it


def reversed_on_rank_0(number):
    order = range(number)
    return order if dist.get_rank() else reversed(order)


refuse(
    "6.2",
    hooks(forgotten_countdown),
    says="your hooks launched 0 of 4 buckets, our finish sent them: after the backward "
    "pass missing[0] is still 2",
    hint="which line counts missing[b] down?",
)
refuse("6.2", hooks(blocking), says="works[b] is None after your launch")
refuse("6.2", hooks(returning), says="your hook returns something")
refuse(
    "6.3",
    finish(reversed_on_rank_0),
    says="in collective #0 of process group 'default', rank 1 in collective #1 of",
    hint="launch what the hooks left in the order of the plan, on every rank",
    name="reversed",
)
refuse(
    "6.3",
    finish(late=False),
    says="net 'unused': gradient of a.weight on rank 0",
    hint="still has this rank's own gradient: write it back",
    name="not written back",
)
refuse(
    "6.3",
    finish(zeros=False),
    says="net 'uneven': gradient of experts.0.weight on rank 0, step 2",
    hint="a place keeps what the step before left in it: place.zero_()",
    name="no zeros",
)


# A rank that stops because another one raised, from inside a hook of C++.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_first_line_of_a_refusal_fits_the_fault(case):
    id, solutions, says, hint = CASES[case]
    verdict = judge(find_exercise(id), *solutions)
    assert not verdict.passed
    assert says in _first_reason(verdict.to_dict()), str(verdict)
    assert hint in verdict.hint, str(verdict)
    assert max(len(line) for line in str(verdict).splitlines()) <= 95
