"""What may be set: a bound on what is in flight, a dtype for the wire, another wire."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.techniques.groups import checked_group
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ParameterInfo, as_real, marks_of
from overlaplab.techniques.payload import Payload, Wire
from overlaplab.torch_versions import all_gather_single


def check_reduce_dtype(reduce_dtype: object) -> None:
    """Raise TypeError or ValueError if no group sums in it."""
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(
            f"reduce_dtype is {reduce_dtype!r}; expected a dtype, such as torch.float32"
        )
    if not reduce_dtype.is_floating_point:
        raise ValueError(f"reduce_dtype is {reduce_dtype}; expected a float dtype")
    if reduce_dtype.itemsize == 1:
        raise ValueError(
            f"reduce_dtype is {reduce_dtype}, which process groups do not sum; "
            "expected a float dtype of 16 bits or more"
        )


def checked_wire(wire: Wire, reduce_dtype: torch.dtype | None) -> Wire:
    """The caller's; TypeError if it is none, ValueError if a dtype stands beside it."""
    methods = ("dtype_of", "launch", "finish")
    if isinstance(wire, type) or not all(
        callable(getattr(wire, m, 0)) for m in methods
    ):
        raise TypeError(
            f"wire is {wire!r}; expected an object with dtype_of, launch and finish"
        )
    if reduce_dtype is not None:
        raise ValueError(
            f"reduce_dtype={reduce_dtype} beside a wire, whose dtype_of says what "
            "travels. Leave one of them out."
        )
    return wire


class CappedInFlight(InFlight):
    """At most so many launched and not finished.

    A side stream waits for the oldest and launches the next, beside the backward pass:
    without it the compute stream would wait. With gloo the CPU waits. Raises TypeError
    or ValueError where `max_in_flight` is no int, or below 1.
    """

    holds_up = True

    def __init__(self, wire: Wire, max_in_flight: int) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int):
            raise TypeError(f"max_in_flight is {max_in_flight!r}; expected an int")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
        super().__init__(wire)
        self._most = max_in_flight
        self._side = self._provider.make_stream(0)

    def launch(
        self,
        parameters: Sequence[ParameterInfo],
        writers: Iterable[Hashable],
        flags: Callable[[list[Payload]], Tensor] | None = None,
        missing: Container[int] = (),
    ) -> None:
        """As `InFlight.launch`, once few enough are left."""
        owners = (self._stream_key(), *writers)
        with self._provider.stream(self._side):
            for flight in self._flights[: max(0, len(self) - self._most + 1)]:
                if not flight.finished:
                    self._finish(flight)
                    flight.payload.marks = marks_of(flight.payload.grads)
            super().launch(parameters, owners, flags, missing)


class BFloat16Wire:
    """Gradients travel in bfloat16 and are summed in float32; another wire to learn by.

    Each rank receives its slice of everybody's bucket (all-to-all), averages it in
    float32, and sends the average to all (all-gather): half the bytes of a ring
    all-reduce in float32. The average is rounded once, not once per rank. The
    all-gather starts in `finish`, so nothing hides it.

    Args:
        group: the ranks, those of the reducer.

    Raises:
        TypeError, ValueError: it is no process group, or one without this rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = checked_group(group)
        self._size = dist.get_world_size(group)

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        return gradient

    def launch(self, tensors: list[Tensor]) -> Any:
        flat = torch.cat([as_real(t).reshape(-1).bfloat16() for t in tensors])
        padding = -len(flat) % self._size
        sent = torch.nn.functional.pad(flat, (0, padding))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return work, tensors, sent, received

    def finish(self, launched: Any) -> None:
        work, tensors, sent, received = launched
        work.wait()
        mine = received.view(self._size, -1).float().mean(0).bfloat16()
        all_gather_single(sent, mine, group=self._group)
        numbers = [as_real(t) for t in tensors]
        chunks = sent[: sum(n.numel() for n in numbers)].split(
            [n.numel() for n in numbers]
        )
        for number, chunk in zip(numbers, chunks, strict=True):
            number.copy_(chunk.view(number.shape))
