"""Right solutions that nobody expects, of labs 00 to 03."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from fractions import Fraction
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import overlaplab as ol
from overlaplab import streams
from overlaplab_course.lab00 import checks as lab00
from overlaplab_course.lab00 import given as given00
from overlaplab_course.lab00 import reference as ref00
from overlaplab_course.lab00.launches import own_products, resolved, six_launches
from overlaplab_course.lab01 import checks as lab01
from overlaplab_course.lab01 import given as given01
from overlaplab_course.lab01 import reference as ref01
from overlaplab_course.lab02 import given as given02
from overlaplab_course.lab02 import reference as ref02
from overlaplab_course.lab02.show import pay, read
from tests.labs.unusual import Cases

NUMBER = 5
np64 = np.int64


# -- lab 00


def rows_of(launches: Any, launch_us: int) -> list[tuple[int, int]]:
    return [(row[0], row[1]) for row in resolved(launches, launch_us)]


def as_an_array(launches, launch_us):
    return np.array(rows_of(launches, launch_us))


def as_a_generator(launches, launch_us):
    yield from ([Fraction(a), np64(b)] for a, b in rows_of(launches, launch_us))


def as_a_tensor(launches, launch_us):
    return torch.tensor(rows_of(launches, launch_us)).double()


def times_of(number: int) -> dict[str, Any]:
    products = own_products(number)
    running_us = products.number * products.each_us
    return {"returns_us": 10 * products.number, "finishes_us": 10 + running_us}


def counts_of(number: int) -> dict[str, Any]:
    timeline, slower = lab00.step_and_slower(number)
    keys = (one["entry"] for one in lab00.LAB.tables("0.2"))
    return dict(
        zip(keys, (*given00.count(timeline), given00.count(slower)[3]), strict=True)
    )


def typed(answers: Any, kind: Any) -> dict[str, Any]:
    return {k: kind(v) if isinstance(v, int | float) else v for k, v in answers.items()}


def losses_in_numpy(model, batches):
    losses, worst = ref00.train(model, batches)
    return np.array(losses), np.float32(worst)


def losses_in_a_tuple(model, batches):
    losses, worst = ref00.train(model, batches)
    return tuple(map(np.float64, losses)), worst


def losses_a_step_late(model, batches):
    kept = torch.zeros(len(batches))
    for i, x in enumerate(batches):
        loss = torch.nn.functional.mse_loss(model(x), x)
        loss.backward()
        kept[i] = loss.detach()
        with torch.no_grad():
            for param in model.parameters():
                param.sub_(param.grad, alpha=2)
        model.zero_grad()
    losses = [float(x) for x in kept.tolist()]
    return losses, float(max(losses))


def sum_functional(x, a):
    total = functional.all_reduce(x, "sum", dist.group.WORLD)
    return torch.add(input=a @ a, other=total)


def sum_by_operator(x, a):
    name = dist.group.WORLD.group_name
    total = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    product = torch.matmul(a, a)
    return torch.ops._c10d_functional.wait_tensor(total).add(product)


def sum_on_a_stream(x, a):
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        dist.all_reduce(tensor=x, op=dist.ReduceOp.SUM)
    product = a @ a
    streams.current_stream().wait_stream(side)
    return torch.stack([x, product]).sum(0)


def sum_coalesced(x, a):
    with dist._coalescing_manager(async_ops=True) as work:
        dist.all_reduce(x)
    product = torch.mm(a, a)
    work.wait()
    return product.add_(x)


# -- lab 01


def bounds_of_fractions(tc, tm):
    tc, tm = Fraction(tc), Fraction(tm)
    return [tc + tm, max(tc, tm), (tc + tm) / max(tc, tm)]


def bounds_in_numpy(tc, tm):
    both = np.array([tc, tm], dtype=np.float64)
    return np.array([both.sum(), both.max(), both.sum() / both.max()])


def bounds_in_torch(tc, tm):
    both = torch.tensor([tc, tm], dtype=torch.float64)
    return both.sum(), both.max(), both.sum() / both.max()


def ratios_of_fractions(tc, tm, sent, hidden, step):
    tc, tm, sent, hidden, step = map(Fraction, (tc, tm, sent, hidden, step))
    saved, most = tc + tm - step, min(tc, tm)
    return (
        hidden / sent if sent else None,
        saved / tm if tm else None,
        saved / most if most else None,
    )


def ratios_in_numpy(tc, tm, sent, hidden, step):
    found = ref01.ratios(tc, tm, sent, hidden, step)
    return [None if x is None else np.float64(x) for x in found]


def schedule_with_accumulate(num_layers, layer_ms, message_ms, per_bucket):
    sizes = [per_bucket] * (num_layers // per_bucket)
    sizes += [num_layers % per_bucket] if num_layers % per_bucket else []
    ready = [layer_ms * n for n in accumulate(sizes)]
    free, pairs = 0, []
    for size, at in zip(sizes, ready, strict=True):
        free = (start := np.maximum(at, free)) + np.multiply(size, message_ms)
        pairs.append(np.array([start, free]))
    return np.stack(pairs)


def chains_of(number: int) -> dict[str, Any]:
    right, _ = lab01._chains(given01.job(number))
    keys = (one["entry"] for one in lab01.LAB.tables("1.1"))
    return dict(zip(keys, right, strict=True))


# -- lab 02


def timed_in_pairs(step):
    for _ in range(3):
        step()
    pairs = []
    for _ in range(15):
        start, end = (streams.Event(enable_timing=True) for _ in "ab")
        start.record()
        step()
        end.record()
        pairs.append((start, end))
    pairs[-1][1].synchronize()
    return np.median([a.elapsed_time(b) for a, b in pairs])


def timed_with_torch(step):
    for _ in range(5):
        step()
    marks = [streams.Event(enable_timing=True)]
    marks[0].record()
    for _ in range(25):
        step()
        marks.append(streams.Event(enable_timing=True))
        marks[-1].record()
    streams.synchronize()
    return torch.tensor([a.elapsed_time(b) for a, b in pairwise(marks)]).median()


def timed_as_a_fraction(step):
    return Fraction(ref02.time_step(step))


def merge_in_numpy(intervals):
    found: list[list[Any]] = []
    for start, end in sorted(intervals):
        if end > start and found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        elif end > start:
            found.append([start, end])
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def merge_with_steps(intervals):
    """+1 where one begins, -1 where one ends."""
    steps = defaultdict(int)
    for start, end in intervals:
        if end > start:
            steps[start] += 1
            steps[end] -= 1
    found, open_since, height = [], None, 0
    for at in sorted(steps):
        height += steps[at]
        if height and open_since is None:
            open_since = at
        elif not height and open_since is not None:
            found.append((open_since, at))
            open_since = None
    return iter(found)


def overlap_in_numpy(rows):
    return MappingProxyType(
        {
            k: v if v is None else (np.float64(v) if k == "fraction" else np64(v))
            for k, v in ref02.overlap(rows).items()
        }
    )


def overlap_as_a_fraction(rows):
    found = ref02.overlap(rows)
    if found["communication_ns"]:
        found["fraction"] = Fraction(found["hidden_ns"], found["communication_ns"])
    return OrderedDict(reversed(found.items()))


def is_communication_as_number(row):
    return np.bool_(ref02.is_communication(row))


def is_communication_as_match(row):
    return 1 if ref02.is_communication(row) else None


def gaps_in_numpy(timeline):
    return [(np64(a), np64(b), np.str_(w)) for a, b, w in ref02.find_gaps(timeline)]


def gaps_as_floats(timeline):
    return tuple([float(a), float(b), w] for a, b, w in ref02.find_gaps(timeline))


def gaps_one_by_one(timeline):
    yield from map(list, ref02.find_gaps(timeline))


def summary_in_numpy(rows):
    found = ref02.summary(rows)
    sums = defaultdict(np64, {k: np64(v) for k, v in found["by_name"].items()})
    return {**found, "step_ns": np64(found["step_ns"]), "by_name": sums}


def summary_as_floats(rows):
    return {
        k: float(v) if k == "busy_ns" else v for k, v in ref02.summary(rows).items()
    }


# -- lab 03


def issue_with_waits_on_all_needs(tasks):
    """An event per task; each stream entered once per task, by keyword."""
    main = streams.current_stream()
    lanes = {"compute": main, "wire": streams.Stream()}
    begin = main.record_event()
    lanes["wire"].wait_event(begin)
    done: dict[str, Any] = {}
    for task in tasks:
        lane = lanes[task.on]
        with streams.stream(lane):
            for need in set(task.needs):
                streams.current_stream().wait_event(done[need])
            task.run()
            done[task.name] = streams.current_stream().record_event()
    for event in done.values():
        main.wait_event(event)


def issue_on_two_new_streams(tasks):
    main = streams.current_stream()
    lanes = {"compute": streams.Stream(), "wire": streams.Stream()}
    for lane in lanes.values():
        lane.wait_stream(main)
    done = {}
    for task in tasks:
        with streams.stream(lanes[task.on]):
            for need in task.needs:
                done[need].wait()
            task.run()
            done[task.name] = event = streams.Event()
            event.record()
    for lane in lanes.values():
        main.wait_stream(lane)


def feed_with_three_buffers(samples, step):
    main, loading = streams.current_stream(), streams.Stream()
    batches = []
    for i, sample in enumerate(samples):
        pinned = sample.pin_memory()
        with streams.stream(loading):
            batch = torch.empty_like(pinned, device=ol.device())
            batch.copy_(pinned, non_blocking=True)
            batches.append((batch, loading.record_event(), pinned))
        if i:
            first, event, _ = batches.pop(0)
            main.wait_event(event)
            first.record_stream(main)
            step(first)
            del first
    last, event, _ = batches.pop()
    main.wait_event(event)
    last.record_stream(main)
    step(last)


CASES = Cases()
add = CASES.add


def add_typed(id: str, number: int | None, answers: Any) -> None:
    before = () if number is None else (number,)
    for kind in (np.float32, Fraction, torch.tensor):
        name = f"in {getattr(kind, '__name__', kind)}"
        add(id, *before, typed(answers, kind), name=name)


add_typed("0.0", NUMBER, times_of(NUMBER))
for f in (as_an_array, as_a_generator, as_a_tensor):
    add("0.1", NUMBER, f)
add("0.1", np64(NUMBER), np.array(rows_of(six_launches(NUMBER), 10)), name="array")
add_typed("0.2", NUMBER, counts_of(NUMBER))
add(
    "0.2",
    NUMBER,
    {k: np64(round(v)) for k, v in counts_of(NUMBER).items()},
    name="int64",
)
for f in (losses_in_numpy, losses_in_a_tuple, losses_a_step_late):
    add("0.3", f)
for f in (sum_functional, sum_by_operator, sum_on_a_stream, sum_coalesced):
    add("0.4", f)
reading00 = lab00.read(given00.two_ranks(NUMBER))
add_typed("0.5", NUMBER, reading00)
add_typed("1.1", NUMBER, chains_of(NUMBER))
for f in (bounds_of_fractions, bounds_in_numpy, bounds_in_torch):
    add("1.2", f)
for f in (ratios_of_fractions, ratios_in_numpy):
    add("1.4", f)
add("1.5", schedule_with_accumulate)
for f in (timed_in_pairs, timed_with_torch, timed_as_a_fraction):
    add("2.1", f)
for f in (merge_in_numpy, merge_with_steps):
    add("2.2", f)
for f in (overlap_in_numpy, overlap_as_a_fraction):
    add("2.3", f)
for f in (is_communication_as_number, is_communication_as_match):
    add("2.4", f)
add_typed("2.5", NUMBER, read(given02.trace_step("overlapped, batch 8", NUMBER)))
for f in (gaps_in_numpy, gaps_as_floats, gaps_one_by_one):
    add("2.6", f)
add_typed("2.7", NUMBER, pay(*given02.both_steps(NUMBER)))
for f in (summary_in_numpy, summary_as_floats):
    add("2.8b", f)

for f in (issue_with_waits_on_all_needs, issue_on_two_new_streams):
    add("3.1", f)
add("3.4", feed_with_three_buffers)
