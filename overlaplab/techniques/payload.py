"""What travels: gradients themselves where they can, copies where they must.

Knows no stream; what it launches runs on the current one.

[Note: whose memory travels]
The allocator hands freed memory out again on the stream that allocated it, its owner,
without waiting for the wire. Who allocated a gradient is not known: the stream of the
launch and all that wrote count as its owners, and it stays referenced until each of
them waits. A copy is owned by the stream of its launch, and is dropped as soon as that
stream waits.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from overlaplab.techniques.model_facts import ParameterInfo, marks_of, overlaps_itself


class Wire(Protocol):
    """How tensors become their averages over the ranks; the counterpart of a comm hook.

    Ranks launch and finish in the same order. Tensors of one launch have one dtype, and
    on all ranks the same shapes and strides. The last of them may be a row of flags,
    see agreement, [Note: parameters without a gradient]: where every rank has 0 the
    average must be 0, and above 0 elsewhere.
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
        marks: of `grads`, as the launch left them; set again where `CappedInFlight`
            (options) finishes before `wait`.
    """

    tensors: list[Tensor] = field(default_factory=list)
    holders: Sequence[ParameterInfo] = ()
    grads: list[Tensor] = field(default_factory=list)
    staged: list[tuple[ParameterInfo, Tensor, Tensor]] = field(default_factory=list)
    absent: list[tuple[ParameterInfo, Tensor]] = field(default_factory=list)
    flags: Tensor | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """One launch.

    Args:
        payload: what travels; kept alive.
        launched: what the wire needs to finish it; dropped once it has.
        key: of the stream of the launch.
        owners: keys of streams that must wait before the gradients are let go, see
            [Note: whose memory travels].
        finished: the stream of the launch waits for the averages.
    """

    payload: Payload
    launched: Any
    key: Hashable
    owners: Iterable[Hashable]
    finished: bool = False


def load(
    parameters: Sequence[ParameterInfo],
    dtype: torch.dtype,
    missing: Container[int] = (),
) -> Payload:
    """The gradients of `parameters` as they travel: in `dtype`, zeros where is none.

    `missing` has the indices of parameters that no backward of this step has reached:
    where one is frozen, a `.grad` left there is an old one, and zeros travel; where it
    trains, the old one counts as accumulated, and travels. A gradient is copied only
    if its dtype or strides differ from those on the wire, if it has a graph
    (create_graph), or if its memory does not hold its values (a lazy conjugate or
    negative).

    Raises:
        TypeError: a sparse gradient.
    """
    grads = list(map(_grad, map(_parameter, parameters)))
    if not missing and _travel_themselves(parameters, grads, dtype):
        return Payload(list(grads), parameters, grads)
    payload, holders = Payload(), []
    for info, grad in zip(parameters, grads, strict=True):
        frozen = not info.parameter.requires_grad
        if grad is None or (frozen and info.index in missing):
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
    `.grad`, and kept until `InFlight.clear`: its owner does not wait yet.
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


def touched(payloads: Sequence[Payload]) -> ParameterInfo | None:
    """A parameter whose `.grad` was replaced, freed or written since `marks`."""
    for payload in payloads:
        grads = map(_grad, map(_parameter, payload.holders))
        same = list(map(operator.is_, grads, payload.grads))
        if not all(same):
            return payload.holders[same.index(False)]
    return written(payloads)


def written(payloads: Sequence[Payload]) -> ParameterInfo | None:
    """A parameter whose gradient was written since `marks`, `.grad` or not."""
    for payload in payloads:
        same = list(map(operator.eq, marks_of(payload.grads), payload.marks))
        if not all(same):
            return payload.holders[same.index(False)]
    return None


_kept: list[tuple[list[Tensor], Any]] = []


def keep_unfinished(flights: list[Flight]) -> None:
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
