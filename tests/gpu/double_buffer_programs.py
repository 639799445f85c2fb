"""Double buffers in which one thing is slow, with and without the wait for it.

They run unchanged on GPUs and on `virtual`: on a GPU a delay kernel makes the race
visible in values, on `virtual` it is a finding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import overlaplab as ol
from overlaplab import streams
from overlaplab.models import TOY_NETS
from overlaplab.techniques.data_parallel import AllReduce
from tests.gpu.stream_programs import delay
from tests.techniques.double_buffer import delayed_training

WIDTH = 256
NUM_LAYERS = 3
NUM_STEPS = 6
BUCKET_MIB = WIDTH**2 * 4 / 2**20  # a layer
LEARNING_RATE = 20.0  # these gradients are small; old weights must show

# Differences to one process, in lengths of its training: sums in another order, and
# what other gradients make.
RIGHT, WRONG = 1e-3, 1e-1


class SlowWire(AllReduce):
    """All-reduces that begin long after their launch.

    Args:
        waits: False: `finish` waits for nothing.
    """

    def __init__(self, waits: bool = True) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)
        self._waits = waits
        self._stream = streams.Stream()
        self._launched: list[Any] = []

    def launch(self, tensors: list[Tensor]) -> Any:
        self._stream.wait_stream(streams.current_stream())
        with streams.stream(self._stream):
            delay()
            self._launched.append(super().launch(tensors))
        return self._launched[-1]

    def finish(self, launched: Any) -> None:
        if self._waits:
            super().finish(launched)

    def is_idle(self) -> bool:
        """Whether the device has begun all that was launched."""
        return bool(self._stream.query())

    def settle(self) -> None:
        """Let the current stream wait for all, so that the program ends."""
        for work, _ in self._launched:
            work.wait()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers).to(streams.device())


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, WIDTH, generator=generator).to(streams.device())


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE)


def train_alone() -> list[Tensor]:
    """One process on all batches, each gradient one step late."""
    model = make_model()
    optimizer, parameters = make_optimizer(model), list(model.parameters())
    late: list[Any] = [None] * len(parameters)
    for step in range(NUM_STEPS):
        ranks = range(dist.get_world_size())
        loss_of(model, torch.cat([batch_of(rank, step) for rank in ranks])).backward()
        now = [p.grad for p in parameters]
        for parameter, gradient in zip(parameters, late, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        late = now
    return parameters


def difference(model: nn.Module) -> float:
    """The largest of a weight to `train_alone`, as a part of how far that moved."""
    alone = train_alone()
    pairs = zip(model.parameters(), make_model().parameters(), alone, strict=True)
    with torch.no_grad():
        largest = torch.stack(
            [torch.stack([a - c, b - c]).abs().amax((1, 2)) for a, b, c in pairs]
        ).amax(0)
    off, moved = largest.tolist()
    return float(off / moved)


def averages_that_come_late(wait: bool, set_to_none: bool = True) -> float:
    """Messages begin long after their launch; `wait()` waits for them or not.

    Without it the optimizer reads a set while it is averaged, and the backward of the
    next step writes there, or into memory that was freed too early.
    """
    model = make_model()
    wire = SlowWire(wait)
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB, wire=wire)
    optimizer = make_optimizer(model)
    for step in range(NUM_STEPS):
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    reducer.remove()
    wire.settle()
    streams.synchronize()
    return difference(model)


def averages_in_a_set_that_is_kept(wait: bool) -> float:
    """As above; gradients are zeroed in place, so that both sets stay."""
    return averages_that_come_late(wait, set_to_none=False)


def an_optimizer_on_a_side_stream(wait: bool) -> float:
    """It reads a set late; the stream that refills the set waits for it or not."""
    model = make_model()
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB)
    optimizer, side = make_optimizer(model), streams.Stream()
    for step in range(NUM_STEPS):
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        reducer.wait()
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            delay()
            optimizer.step()
        if wait:
            streams.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=False)
    reducer.remove()
    streams.synchronize()
    return difference(model)


OLD, NEW, NEXT = 1.0, 2.0, 9.0  # of all weights of a model


def linear(value: float) -> nn.Linear:
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(streams.device())
    nn.init.constant_(model.weight, value)
    return model


def answer(model: nn.Module) -> Tensor:
    """WIDTH times the weights' value."""
    with torch.no_grad():
        found: Tensor = model(torch.ones(1, WIDTH, device=streams.device()))
    return found


def off(found: Tensor, value: float) -> float:
    """How far an answer is from that of weights of `value`, as a part of it."""
    streams.synchronize()
    return float((found / (WIDTH * value) - 1).abs().max().item())


def weights_of(value: float) -> ol.DoubleBufferedWeights:
    """Both sets have this value, and nothing runs on the device."""
    weights = ol.DoubleBufferedWeights(linear(value))
    weights.update_from(linear(value))
    weights.swap()
    streams.synchronize()
    return weights


def hold_up_the_copy(weights: ol.DoubleBufferedWeights) -> None:
    with streams.stream(weights._copying):
        delay()


def a_swap_before_the_copy_has_ended(wait: bool) -> float:
    """Who swaps waits for the copy, or reads the set before it is written."""
    weights, source = weights_of(OLD), linear(NEW)
    hold_up_the_copy(weights)
    weights.update_from(source)
    if not wait:
        weights._copied = None
    weights.swap()
    return off(answer(weights.model), NEW)


def a_source_that_is_written_during_the_copy(wait: bool) -> float:
    """Who writes the source waits for the copy, or the copy has the next values."""
    weights, source = weights_of(OLD), linear(NEW)
    hold_up_the_copy(weights)
    weights.update_from(source)
    if wait:
        weights.wait()
    source.weight.data.fill_(NEXT)  # as a kernel that autograd does not see
    weights.swap()
    return off(answer(weights.model), NEW)


def a_source_that_is_written_late(wait: bool) -> float:
    """The copy waits for who writes the source, or has the old values."""
    weights, source = weights_of(OLD), linear(OLD)
    streams.synchronize()
    calling = streams.Stream()
    delay()
    with torch.no_grad():
        source.weight.fill_(NEW)
    if wait:
        calling.wait_stream(streams.current_stream())
    with streams.stream(calling):
        weights.update_from(source)
    weights.swap()
    found = answer(weights.model)
    return off(found, NEW)


def a_front_that_is_read_late(wait: bool) -> float:
    """A server on its own stream reads its set long after the swap was launched; the
    next copy into that set waits for it or not."""
    weights, first, second = weights_of(OLD), linear(NEW), linear(NEXT)
    serving = streams.Stream()
    serving.wait_stream(streams.current_stream())
    weights.update_from(first)
    with streams.stream(serving):
        delay()
        found = answer(weights.model)
        weights.swap()
    if not wait:
        weights._last_read = None
    weights.update_from(second)
    streams.current_stream().wait_stream(serving)
    return off(found, OLD)


def late_as_one_process() -> dict[tuple[str, bool], float]:
    """Of each toy net: the largest difference after twenty steps of AdamW."""
    found = {}
    for net in TOY_NETS:
        for set_to_none in (True, False):
            got = delayed_training.train(net, set_to_none)
            want = delayed_training.late_oracle_of(
                net, dist.get_world_size(), set_to_none
            )
            found[net, set_to_none] = max(
                float((got[name].float() - want[name].float()).abs().max())
                for name in want
                if want[name].numel()
            )
    return found


def forwards_that_are_held_up() -> list[bool]:
    """Of each step: whether its messages are over when the next forward is."""
    model, wire = make_model(), SlowWire()
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB, wire=wire)
    loss_of(model, batch_of(dist.get_rank(), 0)).backward()  # sets everything up
    reducer.wait()
    reducer.flush()
    answer(model)
    streams.synchronize()
    found = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        reducer.wait()
        answer(model)
        forward = streams.current_stream().record_event()
        forward.synchronize()
        found.append(wire.is_idle())
    reducer.remove()
    return found


def waits_of_the_cpu() -> dict[str, str]:
    """What makes the CPU wait in a steady step: "" is nothing."""
    model = make_model()
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB)
    optimizer = make_optimizer(model)
    weights = ol.DoubleBufferedWeights(copy.deepcopy(model).bfloat16())
    batch = batch_of(dist.get_rank(), 0)

    def step() -> None:
        loss_of(model, batch).backward()
        reducer.wait()
        weights.wait()
        optimizer.step()
        optimizer.zero_grad()
        weights.update_from(model)

    state = model.state_dict()
    if streams.device().type == "cuda":
        state = {name: tensor.cpu().pin_memory() for name, tensor in state.items()}

    calls: dict[str, Callable[[], object]] = {
        "step": step,
        "swap": weights.swap,
        "update from pinned memory": lambda: weights.update_from(state),
    }
    for _ in range(3):
        for call in calls.values():
            call()
    found = {}
    streams.synchronize()
    for name, call in calls.items():
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
            found[name] = ""
        except RuntimeError as error:
            found[name] = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    reducer.remove()
    return found


def steps_ahead() -> bool:
    """Whether the CPU is through with steps whose messages are held up."""
    model, wire = make_model(), SlowWire()
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB, wire=wire)
    for step in range(4):
        loss_of(model, batch_of(dist.get_rank(), step)).backward()
        reducer.wait()
        model.zero_grad()
    is_ahead = not streams.current_stream().record_event().query()
    reducer.remove()
    streams.synchronize()
    return is_ahead


def captured() -> tuple[str, list[bool]]:
    """What a capture of the step says; then whether `.grad` is there, step by step."""
    model = make_model()
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=BUCKET_MIB)

    def step(batch: Tensor) -> None:
        model.zero_grad()
        loss_of(model, batch).backward()
        reducer.wait()

    batch, says = batch_of(dist.get_rank(), 0), ""
    captured_step = ol.capture_step(step)
    try:
        for _ in range(5):
            captured_step(batch)
    except ol.CaptureError as error:
        says = str(error)
    captured_step.release()
    reducer.flush()
    found = []
    for _ in range(2):
        step(batch)
        found.append(model[0].weight.grad is not None)
    reducer.remove()
    return says, found


OF_GRADIENTS: tuple[Callable[[bool], float], ...] = (
    averages_that_come_late,
    averages_in_a_set_that_is_kept,
    an_optimizer_on_a_side_stream,
)
OF_WEIGHTS: tuple[Callable[[bool], float], ...] = (
    a_swap_before_the_copy_has_ended,
    a_source_that_is_written_during_the_copy,
    a_source_that_is_written_late,
    a_front_that_is_read_late,
)
PROGRAMS = {fn.__name__: fn for fn in (*OF_GRADIENTS, *OF_WEIGHTS)}


def run_programs() -> dict[str, tuple[float, float]]:
    """Of each program what it gives with the wait, and without."""
    return {name: (fn(True), fn(False)) for name, fn in PROGRAMS.items()}
