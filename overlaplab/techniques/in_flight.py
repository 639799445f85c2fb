"""What has been launched and not finished: behind which streams, and who waits for it.

The current stream is where what the CPU launches next runs. `payload` copies gradients
that cannot travel themselves, there and back, and makes zeros where there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence

from torch import Tensor

from overlaplab import streams
from overlaplab.streams import stream_of
from overlaplab.techniques.model_facts import ParameterInfo, marks_of
from overlaplab.techniques.payload import (
    Flight,
    Payload,
    Wire,
    keep_unfinished,
    load,
    unload,
)


class InFlight:
    """The launches of a step, in order.

    Args:
        wire: makes the averages; the attribute may be set between steps.

    Attributes:
        holds_up: a launch may wait for what other ranks have not launched.
    """

    holds_up = False

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        self._flights: list[Flight] = []
        weakref.finalize(self, keep_unfinished, self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def payloads(self) -> list[Payload]:
        """Of everything since `clear`."""
        return [flight.payload for flight in self._flights]

    def launch(
        self,
        parameters: Sequence[ParameterInfo],
        writers: Iterable[Hashable],
        flags: Callable[[list[Payload]], Tensor] | None = None,
        missing: Container[int] = (),
    ) -> None:
        """Send the gradients of `parameters`, of one dtype, behind their writers.

        Args:
            parameters: in the same order on all ranks.
            writers: keys of the streams that wrote their gradients.
            flags: makes one more tensor, of all payloads, that travels along.
            missing: indices of parameters that no backward of this step has reached.

        Raises:
            TypeError: a sparse gradient.
            Exception: what the wire raises. Nothing was sent.
        """
        key = self._stream_key()
        # The gradients' memory may be any of these streams', who reuse it when it is
        # freed: so `finish` makes each wait.
        owners = dict.fromkeys((key, *writers))
        for owner in owners:
            if owner != key:
                stream_of(key).wait_stream(stream_of(owner))
        dtype = self.wire.dtype_of(parameters[0].parameter.dtype)
        payload = load(parameters, dtype, missing)
        if not payload.tensors[0].is_cuda:  # for reports of the virtual cluster
            for info, tensor in zip(parameters, payload.tensors, strict=True):
                streams.name_tensor(tensor, streams.GRADIENT + info.name)
        if flags is not None:
            payload.flags = flags([*self.payloads, payload])
            payload.tensors.append(payload.flags)
        launched = self.wire.launch(payload.tensors)
        payload.marks = marks_of(payload.grads)  # the guard sees if somebody writes
        self._flights.append(Flight(payload, launched, key, owners))

    def finish(self) -> None:
        """Make the current stream, and all owners, wait for the averages.

        They wait for the stream of the launch, which waits for the wire. The CPU goes
        on, except with gloo.
        """
        here = self._stream_key()
        waits: dict[tuple[Hashable, Hashable], None] = {}
        for flight in self._flights:
            if flight.key == here:
                self._finish(flight)
            else:
                with self._provider.stream(stream_of(flight.key)):
                    self._finish(flight)
                waits[here, flight.key] = None
            for owner in flight.owners:
                if owner != flight.key:
                    waits[owner, flight.key] = None
        for waiting, awaited in waits:
            stream_of(waiting).wait_stream(stream_of(awaited))

    def clear(self) -> None:
        """Let go of all launches; what was given up stays in memory."""
        keep_unfinished(self._flights)
        self._flights.clear()

    def _finish(self, flight: Flight) -> None:
        if not flight.finished:
            self.wire.finish(flight.launched)
            unload(flight.payload)
            flight.launched, flight.finished = None, True
