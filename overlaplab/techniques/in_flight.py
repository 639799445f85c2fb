"""What has been launched and not finished: who waits for it, and whose memory it is.

A collective starts behind the stream that launches it, so that stream first waits for
the streams that wrote the gradients. The allocator hands freed memory out again on the
stream that allocated it, its owner, without waiting for the collective. Who allocated a
gradient is not known: the stream of the launch and all writers count as its owners, and
it stays referenced here until each of them waits. A copy is owned by the stream of its
launch, and is dropped as soon as that stream waits.

Streams are named by keys, see `streams.key_reader`. Knows neither hooks nor what a
bucket is.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from overlaplab import streams
from overlaplab.streams import stream_of
from overlaplab.techniques.model_facts import (
    ParameterInfo,
    marks_of,
    overlaps_itself,
)


class Wire(Protocol):
    """How tensors become their averages over the ranks; the counterpart of a comm hook.

    Ranks launch and finish in the same order. Tensors of one launch have one dtype, and
    on all ranks the same shapes and strides. The last of them may be a row of flags,
    see [Note: parameters without a gradient]: where every rank has 0 the average must
    be 0, and above 0 elsewhere.
    """

    def dtype_of(self, gradient: torch.dtype) -> torch.dtype:
        """What a gradient of this dtype travels as."""

    def launch(self, tensors: list[Tensor]) -> Any:
        """Start to average `tensors` in place, behind the work of the current stream.

        Most calls come from inside a backward, on autograd's thread: what blocks here
        holds up the backward. The tensors belong to the wire until `finish`, which is
        given what this returns. It may raise as long as nothing has been sent.
        """

    def finish(self, launched: Any) -> None:
        """Make the current stream, that of the launch, wait for the averages.

        Called once for each launch, again only if it raised. What `launch` returned is
        dropped after it.
        """


@dataclass(slots=True)
class Payload:
    """Gradients on the wire: themselves where they can be, copies where they must.

    Args:
        tensors: what travels, the flags last; empty once it is finished.
        holders, grads: the parameters that had a gradient, and those gradients.
        staged: (parameter, gradient, its copy on the wire), until written back.
        absent: (parameter, zeros on the wire) where there is no gradient here.
        flags: what travels besides gradients, if anything does.
    """

    tensors: list[Tensor] = field(default_factory=list)
    holders: Sequence[ParameterInfo] = ()
    grads: list[Tensor] = field(default_factory=list)
    staged: list[tuple[ParameterInfo, Tensor, Tensor]] = field(default_factory=list)
    absent: list[tuple[ParameterInfo, Tensor]] = field(default_factory=list)
    flags: Tensor | None = None


def load(
    parameters: Sequence[ParameterInfo],
    dtype: torch.dtype,
    stale: Container[int] = (),
) -> Payload:
    """The gradients of `parameters` as they travel: in `dtype`, zeros for missing ones.

    Those with an index in `stale` are of an earlier step and count as missing. A
    gradient is copied only if its dtype or strides differ from those on the wire, if it
    has a graph (create_graph), or if its memory does not hold its values (a lazy
    conjugate or negative).

    Raises:
        TypeError: a sparse gradient.
    """
    grads = list(map(_grad, map(_parameter, parameters)))
    if not stale and _travel_themselves(parameters, grads, dtype):
        return Payload(grads.copy(), parameters, grads)
    payload, holders = Payload(), []
    for info, grad in zip(parameters, grads, strict=True):
        if grad is None or info.index in stale:
            sent = _empty(info, dtype).zero_()
            payload.absent.append((info, sent))
            payload.tensors.append(_as_sent(info, sent))
            continue
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {info.name} has layout {grad.layout}; reducers "
                "average dense gradients only. Use sparse=False in its module."
            )
        sent = grad
        if (
            (grad.dtype, grad.stride()) != (dtype, info.stride)
            or grad.requires_grad
            or _is_lazy(grad)
        ):
            sent = _empty(info, dtype)
            payload.staged.append((info, grad, sent))
        holders.append(info)
        payload.grads.append(grad)
        payload.tensors.append(_as_sent(info, sent))
    payload.holders = holders
    if payload.staged:
        plain = [
            grad.detach().resolve_conj().resolve_neg() for _, grad, _ in payload.staged
        ]
        torch._foreach_copy_([copy for _, _, copy in payload.staged], plain)
    return payload


def _travel_themselves(
    parameters: Sequence[ParameterInfo], grads: list[Tensor], dtype: torch.dtype
) -> bool:
    """Whether all are there, and none needs a copy: the usual case.

    Every loop of it runs in C, since the backward pass waits for it.
    """
    return (
        set(map(type, grads)) == {Tensor}
        and set(map(_look, grads)) == {(dtype, torch.strided, False)}
        and list(map(Tensor.stride, grads)) == list(map(_stride, parameters))
        and all(map(_in_rows, parameters))
        and not (dtype.is_complex and any(map(Tensor.is_conj, grads)))
        and not any(map(Tensor.is_neg, grads))
    )


def _is_lazy(tensor: Tensor) -> bool:
    """Whether its memory holds the conjugate or the negative of its values."""
    return tensor.is_conj() or tensor.is_neg()


_parameter = operator.attrgetter("parameter")
_grad = operator.attrgetter("grad")
_look = operator.attrgetter("dtype", "layout", "requires_grad")
_stride = operator.attrgetter("stride")
_in_rows = operator.attrgetter("in_rows")


def unload(payload: Payload) -> None:
    """Write averages that travelled as copies back into `.grad`; drop the copies.

    On the stream that owns them, and after it waits for the wire. A gradient that
    cannot be written into is replaced, in `grads` and where it is still its parameter's
    `.grad`, and kept: its owner does not wait yet.
    """
    into, averages, kept, new = [], [], [], {}
    for info, grad, copy in payload.staged:
        if overlaps_itself(grad) or _is_lazy(grad):
            new[id(grad)] = copy.to(grad.dtype)
            if info.parameter.grad is grad:
                info.parameter.grad = new[id(grad)]
            kept.append((info, grad, copy))
        else:
            into.append(grad.detach())
            averages.append(copy)
    if into:
        torch._foreach_copy_(into, averages)
    if new:
        payload.grads = [new.get(id(grad), grad) for grad in payload.grads]
    payload.tensors, payload.staged = [], kept


@dataclass(slots=True)
class _Flight:
    """One launch.

    Args:
        payload: kept alive.
        launched: what the wire needs to finish it; dropped once it has.
        key: of the stream of the launch, which owns the copies.
        owners: keys of the streams that own gradients.
        marks: of the gradients, as the launch (or the finish) left them.
        finished: the stream of the launch waits for the averages.
    """

    payload: Payload
    launched: Any
    key: Hashable
    owners: Iterable[Hashable]
    marks: list[tuple[int, int]]
    finished: bool = False


class InFlight:
    """Launches behind the streams that wrote; makes owners and readers wait.

    Args:
        wire: how averages are made; the attribute may be set between steps.
        max_in_flight: at most this many launched and not finished; None: no bound. A
            side stream waits for the oldest and launches the next, so that the
            compute stream goes on; with gloo the CPU waits.
    """

    def __init__(self, wire: Wire, max_in_flight: int | None = None) -> None:
        if max_in_flight is not None:
            _check_most(max_in_flight)
        self.wire = wire
        self._most = most = max_in_flight
        self._provider = streams.provider()
        self._stream_key = streams.key_reader(self._provider)
        # Capped launches run beside the backward pass; without a stream of their own
        # the cap would hold up the compute stream.
        self._side: Any = None if most is None else self._provider.make_stream(0)
        self._flights: list[_Flight] = []
        weakref.finalize(self, _keep_unfinished, self._flights)

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def payloads(self) -> list[Payload]:
        """Of everything since `clear`, in order of launch."""
        return [flight.payload for flight in self._flights]

    def launch(
        self,
        parameters: Sequence[ParameterInfo],
        writers: Iterable[Hashable],
        flags: Callable[[Payload], Tensor] | None = None,
        stale: Container[int] = (),
    ) -> None:
        """Send the gradients of `parameters`, of one dtype, behind their writers.

        Args:
            parameters: in an order that is equal on all ranks.
            writers: keys of the streams that wrote their gradients.
            flags: makes one more tensor of what was loaded, to travel with it.
            stale: indices of parameters whose gradient is not of this step.

        Raises:
            TypeError: a sparse gradient.
            Exception: what the wire raises. Nothing was sent.
        """
        here = self._stream_key()
        owners = dict.fromkeys((here, *writers))
        if self._most is None:
            self._flights.append(self._send(parameters, owners, flags, stale))
            return
        with self._provider.stream(self._side):
            for flight in self._flights[: max(0, len(self) - self._most + 1)]:
                if not flight.finished:
                    self._finish(flight)
                    flight.marks = marks_of(flight.payload.grads)
            self._flights.append(self._send(parameters, owners, flags, stale))

    def _send(
        self,
        parameters: Sequence[ParameterInfo],
        owners: dict[Hashable, None],
        flags: Callable[[Payload], Tensor] | None,
        stale: Container[int],
    ) -> _Flight:
        key = self._stream_key()
        for owner in owners:
            if owner != key:
                stream_of(key).wait_stream(stream_of(owner))
        dtype = self.wire.dtype_of(parameters[0].parameter.dtype)
        payload = load(parameters, dtype, stale)
        if not payload.tensors[0].is_cuda:  # for reports of the virtual cluster
            for info, tensor in zip(parameters, payload.tensors, strict=True):
                streams.name_tensor(tensor, streams.GRADIENT + info.name)
        if flags is not None:
            payload.flags = flags(payload)
            payload.tensors.append(payload.flags)
        launched = self.wire.launch(payload.tensors)
        return _Flight(payload, launched, key, owners, marks_of(payload.grads))

    def touched(self) -> ParameterInfo | None:
        """A parameter whose `.grad` was replaced, freed or written since its launch."""
        for flight in self._flights:
            holders, grads = flight.payload.holders, flight.payload.grads
            same = list(map(operator.is_, map(_grad, map(_parameter, holders)), grads))
            if not all(same):
                return holders[same.index(False)]
        return self.written()

    def written(self) -> ParameterInfo | None:
        """A parameter whose gradient was written since its launch, `.grad` or not."""
        for flight in self._flights:
            grads = flight.payload.grads
            same = list(map(operator.eq, marks_of(grads), flight.marks))
            if not all(same):
                return flight.payload.holders[same.index(False)]
        return None

    def finish(self) -> None:
        """Make the current stream, and those that own what travels, wait for it.

        The CPU goes on, except with gloo.
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
        """Let go of all launches, finished or given up."""
        _keep_unfinished(self._flights)
        self._flights.clear()

    def _finish(self, flight: _Flight) -> None:
        if not flight.finished:
            self.wire.finish(flight.launched)
            unload(flight.payload)
            flight.launched, flight.finished = None, True


def _check_most(max_in_flight: object) -> None:
    if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int):
        raise TypeError(f"max_in_flight is {max_in_flight!r}; expected an int")
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")


_kept: list[tuple[list[Tensor], Any]] = []


def _keep_unfinished(flights: list[_Flight]) -> None:
    """Nobody waited for these, after an error; gloo's threads may still write them."""
    # Not the flights: they hold the parameters, and with them the model.
    _kept.extend((f.payload.tensors, f.launched) for f in flights if not f.finished)


def _empty(info: ParameterInfo, dtype: torch.dtype) -> Tensor:
    parameter = info.parameter
    return torch.empty_strided(
        parameter.shape, info.stride, dtype=dtype, device=parameter.device
    )


def _as_sent(info: ParameterInfo, tensor: Tensor) -> Tensor:
    """The same memory, flat if not row-major: gloo (2.13) spoils channels_last."""
    return tensor if info.in_rows else tensor.as_strided((tensor.numel(),), (1,))
