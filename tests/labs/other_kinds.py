"""The course's own solutions with one kind of fault: numpy's results, or a set's order.

Results that numpy made are right and cost nothing on the virtual clock. An order out of
a set is right, too, where all ranks share a process: sets of small numbers have one
order here, so that only `orders.disagree` gives each rank another.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab_course import lab04
from overlaplab_course.lab03 import reference as lab03_reference
from overlaplab_course.lab04 import reference as lab04_reference
from overlaplab_course.lab06 import reference as lab06_reference
from overlaplab_course.lab08 import reference as lab08_reference
from overlaplab_course.lab10 import reference as lab10_reference
from overlaplab_course.lab16 import reference as lab16_reference

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# -- results that numpy made


def by_numpy(tensor):
    """The same bits, which no operator wrote."""
    bits = tensor.detach().view(BITS[tensor.element_size()])
    return torch.from_numpy(bits.numpy().copy()).view(tensor.dtype)


def returned(step):
    """`step`, but what it returns."""

    def numpys(*args):
        return by_numpy(step(*args))

    return numpys


def yielded(feeder):
    """`feeder`, but what it yields."""

    def numpys(*args):
        for tensor in feeder(*args):
            yield by_numpy(tensor)

    return numpys


def left(params):
    """After a reducer's wait."""
    for param in params:
        if param.grad is not None:
            param.grad = by_numpy(param.grad)


def send_gradients(layers):
    lab03_reference.send_gradients(layers)
    for layer in layers:
        layer.flat.copy_(by_numpy(layer.flat))


def look_up(towers):
    lab03_reference.look_up(towers)
    for tower in towers:
        tower.out.copy_(by_numpy(tower.out))


def train(batches, step):
    for host in batches:
        step(torch.from_numpy(host.numpy()))


def install_hooks(state):
    def hook(param):
        state.missing[state.bucket_of(param)] -= 1
        for bucket, work in enumerate(state.works):
            if work is not None:
                continue
            if state.missing[bucket] > 0:
                return
            for p, place in state.pairs(bucket):
                place.copy_(by_numpy(p.grad))
            work = dist.all_reduce(state.buffers[bucket], async_op=True)
            state.works[bucket] = work

    for param in state.params:
        state.handles.append(param.register_post_accumulate_grad_hook(hook))


def serve(front, back, versions, answer):
    lab08_reference.serve(front, back, versions, lambda set_: answer(by_numpy(set_)))


def backward(grad, units, weights):
    lab10_reference.backward(grad, units, weights)
    for unit in units:
        unit.grad = by_numpy(unit.grad)


class ByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return by_numpy(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def segmented(layers, x, k):
    return ByNumpy.apply(lab16_reference.segmented(layers, x, k))


def forward(block, x):
    return lab16_reference.forward(block, x)


def grad_of_a_block(block, x, remembered, grad):
    return by_numpy(lab16_reference.backward(block, x, remembered, grad))


# -- an order out of a set


def issue(tasks):
    compute, wire = streams.current_stream(), streams.Stream()
    wire.wait_stream(compute)
    ended, missing = {}, {*range(len(tasks))}
    while missing:
        for place in list(missing):
            task = tasks[place]
            if any(name not in ended for name in task.needs):
                continue
            own = compute if task.on == "compute" else wire
            for name in task.needs:
                own.wait_event(ended[name])
            with streams.stream(own):
                task.run()
            ended[task.name] = own.record_event()
            missing.remove(place)
    compute.wait_stream(wire)


def two_sums(x, w):
    sums = {}
    for place in {0, 1}:
        name = "ab"[place]
        part = x @ w[name]
        sums[name] = part, dist.all_reduce(part, async_op=True)
    c = x @ w["c"]
    (a, sum_a), (b, sum_b) = sums["a"], sums["b"]
    sum_a.wait()
    y = a @ w["d"]
    sum_b.wait()
    return y + b @ w["e"] + c


def experts(x, w):
    sums = {}
    for place in {0, 1}:
        name = ("routed_in", "gate")[place]
        part = x @ w[name]
        sums[name] = part, dist.all_reduce(part, async_op=True)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    (routed, sum_routed), (gate, sum_gate) = sums["routed_in"], sums["gate"]
    sum_routed.wait()
    y = routed @ w["routed_out"]
    sum_gate.wait()
    return (y + shared) * gate


def average_gradients(layers, k):
    compute, side = streams.current_stream(), streams.Stream()
    grads, in_flight = {}, []

    def finish_oldest():
        grad, message, work = in_flight.pop(0)
        work.wait()
        grad.copy_(message / dist.get_world_size())

    for place in {*range(len(layers))}:
        grads[place] = lab04.backward(layers[place])
        side.wait_stream(compute)
        with streams.stream(side):
            if len(in_flight) == k:
                finish_oldest()
            message = grads[place].float()
            work = dist.all_reduce(message, async_op=True)
            in_flight.append((grads[place], message, work))
            del message, work  # alive no longer than what is in flight
    with streams.stream(side):
        while in_flight:
            finish_oldest()
    compute.wait_stream(side)
    return [grads[place] for place in range(len(layers))]


def sum_all(tensors):
    for place in {0, 1}:
        dtype = (torch.float32, torch.int64)[place]
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = torch.cat([t.reshape(-1) for t in chosen])
        dist.all_reduce(flat, async_op=True).wait()
        parts = flat.split([t.numel() for t in chosen])
        for tensor, part in zip(chosen, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


class PromptById:
    """Late where an address is below 0: on odd ranks, as `disagree` has it."""

    def __init__(self, model):
        self.late = []
        self.sent = []
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        if id(param) < 0:
            self.late.insert(0, param)
        else:
            self.sent.append((param, dist.all_reduce(param.grad, async_op=True)))

    def wait(self):
        for param in self.late:
            self.sent.append((param, dist.all_reduce(param.grad, async_op=True)))
        self.late.clear()
        for param, work in self.sent:
            work.wait()
            param.grad /= dist.get_world_size()
        self.sent.clear()


def finish(state):
    for bucket in {*range(len(state.works))}:
        if state.works[bucket] is None:
            for param, place in state.pairs(bucket):
                place.zero_() if param.grad is None else place.copy_(param.grad)
            work = dist.all_reduce(state.buffers[bucket], async_op=True)
            state.works[bucket] = work
    lab06_reference.finish(state)


class LateReducer:
    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.travelling = None

    def wait(self):
        grads = [p.grad for p in self.parameters]
        works = {}
        for place in {*range(len(grads))}:
            works[place] = dist.all_reduce(grads[place], async_op=True)
        self.flush()
        self.travelling = grads, works

    def flush(self):
        there_was_one = self.travelling is not None
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None
            if there_was_one:
                grads, works = self.travelling
                works[place].wait()
                parameter.grad = grads[place].div_(dist.get_world_size())
        self.travelling = None
        return there_was_one


RECORDED = {
    "3.3a": (send_gradients,),
    "3.3b": (look_up,),
    "3.3c": (train,),
    "4.8a": (returned(lab04_reference.blocks),),
    "4.8b": (returned(lab04_reference.accumulate),),
    "6.2a": (install_hooks,),
    "6.2": (install_hooks,),
    "8.4": (returned(lab08_reference.train_two),),
    "8.6": (serve,),
    "10.2": (yielded(lab10_reference.on_demand),),
    "10.3": (yielded(lab10_reference.prefetched),),
    "10.5": (backward,),
    "16.2": (segmented,),
    "16.6": (forward, grad_of_a_block),
}
ORDER = {
    "3.1": issue,
    "4.2": two_sums,
    "4.3": experts,
    "4.4": average_gradients,
    "4.5": sum_all,
    "5.3": PromptById,
    "6.3": finish,
    "8.3": LateReducer,
}
