"""Right solutions that nobody expects, of labs 04 to 10."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import overlaplab as ol
from overlaplab import streams
from overlaplab.torch_versions import all_gather_single as all_gather
from overlaplab_course.lab04 import given as given04
from overlaplab_course.lab05 import checks as lab05
from overlaplab_course.lab06 import reference as ref06
from overlaplab_course.lab06.given import MIB
from overlaplab_course.lab06.show import message_points
from overlaplab_course.lab10.given import new_slots
from tests.labs.unusual import Cases

NUMBER = 5
np64 = np.int64


# -- lab 04


def two_sums_functional(x, w):
    world = dist.group.WORLD
    a = functional.all_reduce(x @ w["a"], "sum", world)
    b = functional.all_reduce(x @ w["b"], "sum", world)
    c = x @ w["c"]
    return a @ w["d"] + b @ w["e"] + c


def two_sums_by_future(x, w):
    works, parts = [], {}
    for name in "ab":
        parts[name] = torch.matmul(input=x, other=w[name])
        works.append(dist.all_reduce(parts[name], op=dist.ReduceOp.SUM, async_op=True))
    out = x.matmul(w["c"])
    for work, (name, then) in zip(works, (("a", "d"), ("b", "e")), strict=True):
        work.get_future().wait()
        out = torch.addmm(out, parts[name], w[then])
    return out


def experts_functional(x, w):
    world = dist.group.WORLD
    routed = functional.all_reduce(x @ w["routed_in"], "sum", world)
    gate = functional.all_reduce(x @ w["gate"], "sum", world)
    shared = torch.relu(x @ w["shared_in"]) @ w["shared_out"]
    return (routed @ w["routed_out"] + shared).mul(gate)


def chunk_as_numpy(rank, step, num_ranks):
    return np64(rank - step) % num_ranks


def chunk_as_float(rank, step, num_ranks):
    return float((rank - step) % num_ranks)


def chunk_as_tensor(rank, step, num_ranks):
    return torch.tensor((rank - step) % num_ranks)


def bus_in_numpy(operation, num_ranks, size, us):
    from overlaplab_course.lab04 import given

    return np.float32(given.bus_of_ours(operation, num_ranks, size, us))


def bus_as_a_fraction(operation, num_ranks, size, us):
    share = {"all_reduce": Fraction(2 * (num_ranks - 1), num_ranks), "broadcast": 1}
    factor = share.get(operation, Fraction(num_ranks - 1, num_ranks))
    return factor * size / Fraction(us) / 1000


def sum_all_stacked(tensors):
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        own = [t for t in tensors if t.dtype == dtype]
        flat = torch.empty(sum(t.numel() for t in own), dtype=dtype)
        torch.cat([t.ravel() for t in own], out=flat)
        dist.all_reduce(flat)
        at = 0
        for t in own:
            t.view(-1)[:] = flat[at : at + t.numel()]
            at += t.numel()


# -- labs 05, 06, 08, 10


def windows_in_numpy(backward_ms, layers):
    left = np.cumsum([0, *backward_ms])
    return {name: left[layers.index(name)] for name in dict.fromkeys(layers)}


def windows_as_fractions(backward_ms, layers):
    found: dict[str, Fraction] = {}
    for i, name in reversed(list(enumerate(layers))):
        found[name] = sum(map(Fraction, backward_ms[:i]), Fraction(0))
    return OrderedDict(sorted(found.items()))


def exposed_in_numpy(windows_ms, message_ms):
    order = sorted(windows_ms, key=windows_ms.get)
    sent = np.cumsum([message_ms[name] for name in order])
    return np.max([0.0, *(s - windows_ms[n] for s, n in zip(sent, order, strict=True))])


def hooks_of(number: int, kind: Any) -> dict[str, Any]:
    right = lab05.true_answers(lab05.hook_case(number))
    answers: dict[str, Any] = {
        name: {key: kind(x) for key, x in row.items()} for name, row in right.items()
    }
    answers["backward returns"] = "None"
    answers["send from"] = "register_post_accumulate_grad_hook"
    return answers


class PromptByStream:
    """Sums on a stream of its own, and divides there."""

    def __init__(self, model):
        self.side = streams.Stream()
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.side.wait_stream(streams.current_stream())
        with streams.stream(self.side):
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())

    def wait(self):
        streams.current_stream().wait_stream(self.side)


class PromptByMean:
    def __init__(self, model):
        self.works = []

        def hook(param):
            op = dist.ReduceOp.AVG
            self.works += [dist.all_reduce(param.grad, op=op, async_op=True)]

        for param in filter(lambda p: p.requires_grad, model.parameters()):
            param.register_post_accumulate_grad_hook(hook)

    def wait(self):
        while self.works:
            self.works.pop(0).wait()


def plan_as_tuples(params, cap_bytes):
    return tuple(map(tuple, ref06.plan_buckets(params, cap_bytes)))


def plan_in_numpy(params, cap_bytes):
    return [np.array(bucket) for bucket in ref06.plan_buckets(params, cap_bytes)]


def plan_one_by_one(params, cap_bytes):
    found = ref06.plan_buckets(params, cap_bytes)
    return iter([iter(bucket) for bucket in found])


def install_hooks_in_one_copy(state):
    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        while None in state.works and not state.missing[state.works.index(None)]:
            bucket = state.works.index(None)
            places, grads = [], []
            for p, place in state.pairs(bucket):
                places.append(place)
                grads.append(p.grad)
            torch._foreach_copy_(places, grads)
            state.works[bucket] = dist.all_reduce(state.buffers[bucket], async_op=True)

    state.handles += [p.register_post_accumulate_grad_hook(hook) for p in state.params]


def choose_cap_in_numpy(grad_bytes, ready_ns, latency_ns, bytes_per_s):
    whole = np.sum(np.array(grad_bytes))
    backward_s = np.max(ready_ns) / 1e9
    alpha_s = np.maximum(latency_ns / 1e9, 1e-9)
    number = np.clip(np.sqrt(min(backward_s, 1) / alpha_s), 1, len(grad_bytes))
    return np.ceil(whole / number).astype(np.int64)


def shard_in_pieces(weights):
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = torch.cat([w.reshape(-1) for w in weights])
    size = math.ceil(flat.numel() / n)
    out = flat.new_zeros(size)
    own = flat[rank * size : (rank + 1) * size]
    out[: own.numel()] = own
    return out


def halves_functional(x):
    n, flat, world = dist.get_world_size(), x.reshape(-1), dist.group.WORLD
    size = -(-flat.numel() // n)
    padded = torch.nn.functional.pad(flat, (0, size * n - flat.numel()))
    mine = functional.reduce_scatter_tensor(padded, "sum", 0, world)
    whole = functional.all_gather_tensor(mine, 0, world)
    x.copy_(whole[: flat.numel()].view_as(x))


def halves_of_lists(x):
    n, flat = dist.get_world_size(), x.reshape(-1)
    size = -(-flat.numel() // n)
    padded = torch.cat([flat, flat.new_zeros(size * n - flat.numel())])
    mine = torch.empty(size)
    dist.reduce_scatter(mine, [part.contiguous() for part in padded.chunk(n)])
    parts = [torch.empty(size) for _ in range(n)]
    dist.all_gather(tensor_list=parts, tensor=mine)
    x.view(-1)[:] = torch.stack(parts).flatten()[: flat.numel()]


def window_in_a_deque(layers, k):
    main, side = streams.current_stream(), streams.Stream()
    waiting, grads, n = deque(), [], dist.get_world_size()

    def finish():
        grad, message, work = waiting.popleft()
        work.wait()
        grad.copy_(message.mul_(1 / n))

    for layer in layers:
        grads.append(given04.backward(layer))
        side.wait_event(main.record_event())
        with streams.stream(side):
            if len(waiting) >= k:
                finish()
            message = grads[-1].to(torch.float32)
            waiting.append(
                (grads[-1], message, dist.all_reduce(message, async_op=True))
            )
            del message
    with streams.stream(side):
        while waiting:
            finish()
    main.wait_stream(side)
    return tuple(grads)


def finish_in_place(state):
    for bucket in range(len(state.plan)):
        if state.works[bucket] is None:
            for param, place in state.pairs(bucket):
                got = param.grad
                place.copy_(torch.zeros_like(place) if got is None else got)
            buffer = state.buffers[bucket]
            state.works[bucket] = dist.all_reduce(buffer, async_op=True)
    for bucket, work in enumerate(state.works):
        work.wait()
        state.buffers[bucket].mul_(1 / dist.get_world_size())
        for param, place in state.pairs(bucket):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(place)
    state.missing[:] = map(len, state.plan)
    state.works[:] = [None] * len(state.plan)


def prefetch_in_a_deque(loader):
    main, copying, ready = streams.current_stream(), streams.Stream(), deque()

    def first():
        batch, event = ready.popleft()
        event.wait(main)
        for tensor in batch:
            tensor.record_stream(main)
        return batch

    for batch in loader:
        with streams.stream(copying):
            ours = [t.to(ol.device(), non_blocking=True) for t in batch]
            ready.append((ours, copying.record_event()))
        if len(ready) > 1:
            yield first()
    while ready:
        yield first()


class LateByMean:
    def __init__(self, model):
        self.parameters, self.before = [*model.parameters()], None

    def wait(self):
        how = {"op": dist.ReduceOp.AVG, "async_op": True}
        coming = [(p.grad, dist.all_reduce(p.grad, **how)) for p in self.parameters]
        self.flush()
        self.before = coming

    def flush(self):
        for i, param in enumerate(self.parameters):
            param.grad = None
            if self.before:
                param.grad, work = self.before[i]
                work.wait()
        was, self.before = self.before is not None, None
        return was


def serve_by_events(front, back, versions, answer):
    main, loading = streams.current_stream(), streams.Stream()
    for version in versions:
        loading.wait_event(main.record_event())
        with streams.stream(loading):
            back.copy_(version, non_blocking=True)
            loaded = loading.record_event()
        answer(front)
        main.wait_event(loaded)
        front, back = back, front
    answer(front)


def on_demand_by_work(units):
    slot = new_slots(units, 1)[0]
    for unit in units:
        all_gather(slot[: unit.numel], unit.shard, async_op=True).wait()
        yield slot


def prefetched_on_a_stream(units, depth):
    main, side = streams.current_stream(), streams.Stream()
    slots, arrived = new_slots(units, depth + 1), {}

    def launch(i):
        if i < len(units):
            side.wait_stream(main)
            with streams.stream(side):
                all_gather(slots[i % len(slots)][: units[i].numel], units[i].shard)
                arrived[i] = side.record_event()

    for i in range(depth):
        launch(i)
    for i in range(len(units)):
        launch(i + depth)
        main.wait_event(arrived.pop(i))
        yield slots[i % len(slots)]


def unshard_by_split(slot, shapes):
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.split(slot[: sum(sizes)], sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def choose_chunks_in_numpy(*numbers):
    from overlaplab_course.lab04 import extras

    (case,) = [case for case in extras.CASES if tuple(case)[1:] == numbers]
    return np64(case.best)


CASES = Cases()
add = CASES.add


for f in (two_sums_functional, two_sums_by_future):
    add("4.2", f)
add("4.3", experts_functional)
add("4.5", sum_all_stacked)
for f in (chunk_as_numpy, chunk_as_float, chunk_as_tensor):
    add("4.6", f)
for f in (bus_in_numpy, bus_as_a_fraction):
    add("4.7", f)
for f in (windows_in_numpy, windows_as_fractions):
    add("5.1", f, exposed_in_numpy)
add("5.2", np64(NUMBER), hooks_of(NUMBER, np.float32), name="in float32")
add("5.2", NUMBER, hooks_of(NUMBER, Fraction), name="in Fraction")
for c in (PromptByStream, PromptByMean):
    add("5.3", c)
us = message_points()
rate = 75 * MIB / ((us[100] - us[25]) * 1e3)
fit = np.float64(us[100] - 100 * MIB / (rate * 1e3)), np.float32(rate), np64(1)
add("6.0", *fit, name="in numpy")
for f in (plan_as_tuples, plan_in_numpy, plan_one_by_one):
    add("6.1", f)
add("6.2", install_hooks_in_one_copy)
add("6.4a", choose_cap_in_numpy)


for f in (halves_functional, halves_of_lists):
    add("4.1", f)
add("4.4", window_in_a_deque)
add("4.9", choose_chunks_in_numpy)
add("6.3", finish_in_place)
add("8.1", prefetch_in_a_deque)
add("8.3", LateByMean)
add("8.6", serve_by_events)
add("10.1", shard_in_pieces, unshard_by_split)
add("10.2", on_demand_by_work)
add("10.3", prefetched_on_a_stream)
