"""Steps of ZeRO-3 in which one thing is slow, with and without the wait for it.

They run unchanged on GPUs and on `virtual`: on a GPU a delay kernel makes the race
visible in values, on `virtual` it is a finding. What is changed is how the collectives
of Zero3 are launched and waited for, not Zero3.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.techniques.zero import Zero3, ring, scatters
from tests.gpu.stream_programs import delay

WIDTH = 256
NUM_LAYERS = 5
LEARNING_RATE = 100.0  # these gradients are small; old weights must show

# Differences to one process, in lengths of its last step: sums in another order, and
# what old or other weights make of a gradient.
RIGHT, WRONG = 1e-3, 1e-2


class Delayed(torch.autograd.Function):
    """Identity; the stream is busy for long before the backward goes on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        delay()
        return grad.clone()


class Layer(nn.Module):
    """Computes with its weight long after its weight is there, if it is `slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.slow = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.slow == "forward":
            delay()
        x = torch.tanh(self.linear(x))
        return Delayed.apply(x) if self.slow == "backward" else x


class Wires:
    """How this rank's collectives of Zero3 go, while it is `open`.

    Args:
        slow: "gather" or "scatter": those begin long after their launch.
        early: gathers wait for the begin of the step alone, not for what computes.
        waits: False: `work.wait()` does nothing until `settle`.
    """

    def __init__(
        self, slow: str = "", *, early: bool = False, waits: bool = True
    ) -> None:
        self._slow, self._early, self._waits = slow, early, waits
        self._stream = streams.Stream()
        self._works: list[Any] = []

    def begin(self) -> None:
        """A step begins; nothing runs on the device."""
        self._stream.wait_stream(streams.current_stream())

    def launch(self, kind: str, real: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        if kind == self._slow:
            self._stream.wait_stream(streams.current_stream())
            with streams.stream(self._stream):
                delay()
                work = real(*args, **kw)
        elif kind == "gather" and self._early:
            with streams.stream(self._stream):
                work = real(*args, **kw)
        else:
            return real(*args, **kw)
        self._works.append(work)
        return self if kind == self._slow and not self._waits else work

    def wait(self) -> None:
        """What stands for a work's own wait where there is none."""

    def settle(self) -> None:
        """Let the current stream wait for all that was launched otherwise."""
        for work in self._works:
            work.wait()
        streams.current_stream().wait_stream(self._stream)
        self._works.clear()


_PLACES: dict[str, tuple[Any, str]] = {
    "gather": (ring, "launch_all_gather"),
    "scatter": (scatters, "launch_reduce_scatter"),
}
_REAL = {kind: getattr(module, name) for kind, (module, name) in _PLACES.items()}
_open: dict[int, Wires] = {}  # by rank: on `virtual` ranks are threads
_lock = threading.Lock()


@contextlib.contextmanager
def through(wires: Wires) -> Iterator[None]:
    """This rank's collectives go through `wires`."""
    rank = dist.get_rank()
    with _lock:
        _open[rank] = wires
        for kind, (module, name) in _PLACES.items():
            setattr(module, name, functools.partial(_launch, kind))
    try:
        yield
    finally:
        with _lock:
            del _open[rank]
            if not _open:
                for kind, (module, name) in _PLACES.items():
                    setattr(module, name, _REAL[kind])


def _launch(kind: str, *args: Any, **kw: Any) -> Any:
    wires = _open.get(dist.get_rank())
    if wires is None:
        return _REAL[kind](*args, **kw)
    return wires.launch(kind, _REAL[kind], *args, **kw)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    return model.to(streams.device())


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    return torch.randn(64, WIDTH, generator=generator).to(streams.device())


def train(
    make_wires: Callable[[], Wires],
    *,
    slow: str = "",
    beside: str = "",
    prefetch: int = 1,
) -> float:
    """The largest difference of a parameter to one process, in lengths of a step.

    Args:
        make_wires: how collectives go in the second step; the first one finds the plan.
        slow: "forward" or "backward", of every second layer.
        beside: the optimizer runs on a stream of its own: "joined", "not joined".
    """
    model, whole = make_model(), make_model()
    zero = Zero3(model, prefetch=prefetch)
    ours = torch.optim.SGD(zero.shards(), lr=LEARNING_RATE)
    alone = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    side, wires = streams.Stream(), make_wires()
    before: list[Tensor] = []
    for step in range(3):
        batches = [batch_of(rank, step) for rank in range(dist.get_world_size())]
        if step == 1:
            for layer in list(model)[::2]:
                layer.slow = slow
            streams.synchronize()
            wires.begin()
            with through(wires):
                model(batches[dist.get_rank()]).square().mean().backward()
                wires.settle()
                zero.wait()
        else:
            model(batches[dist.get_rank()]).square().mean().backward()
            zero.wait()
        for layer in model:
            layer.slow = ""
        if beside:
            side.wait_stream(streams.current_stream())
        with streams.stream(side if beside else streams.current_stream()):
            if beside and step == 1:
                delay()
            ours.step()
            ours.zero_grad()
        if beside and (beside == "joined" or step != 1):
            streams.current_stream().wait_stream(side)
        # One process.
        before = [p.detach().clone() for p in whole.parameters()]
        whole(torch.cat(batches)).square().mean().backward()
        alone.step()
        alone.zero_grad()
    streams.synchronize()
    found = zero.full_state_dict()
    moved = max(
        float((p.detach() - old).abs().max())
        for p, old in zip(whole.parameters(), before, strict=True)
    )
    worst = max(
        float((found[name] - value).abs().max())
        for name, value in whole.state_dict().items()
    )
    return worst / moved


def weights_that_come_late(wait: bool) -> float:
    """A gather begins long after its launch; its unit waits for it or not."""
    return train(lambda: Wires("gather", waits=wait))


def a_slot_that_is_read_in_a_forward(wait: bool) -> float:
    """A unit computes long after its launch; the next gather waits for it or not."""
    return train(lambda: Wires(early=not wait), slow="forward")


def a_slot_that_is_read_in_a_backward(wait: bool) -> float:
    return train(lambda: Wires(early=not wait), slow="backward")


def gradients_that_leave_late(wait: bool) -> float:
    """A scatter reads long after its launch; who writes there next waits or not."""
    return train(lambda: Wires("scatter", waits=wait))


def an_optimizer_on_a_side_stream(wait: bool) -> float:
    """It is slow; the next step's gathers wait for it or not."""
    return train(Wires, beside="joined" if wait else "not joined")


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        weights_that_come_late,
        a_slot_that_is_read_in_a_forward,
        a_slot_that_is_read_in_a_backward,
        gradients_that_leave_late,
        an_optimizer_on_a_side_stream,
    )
}


def run_programs() -> dict[str, tuple[float, float]]:
    """Of each program what it gives with the wait, and without."""
    return {name: (fn(True), fn(False)) for name, fn in PROGRAMS.items()}
