"""What ranks must know of each other: who has a gradient, and what trains.

[Note: parameters without a gradient]
A rank whose hook never fires for some parameter cannot know whether another rank
used it. So `wait` sends the buckets that are left, with zeros for missing gradients,
and the last bucket of each step carries two flags per parameter: "has a gradient here"
and "trains (or is frozen) as planned here". A rank that sent zeros reads the averages
of the flags: where some rank used the parameter, the average becomes its `.grad`; where
none did, `.grad` stays as it is on every rank, so that momentum and decay leave the
parameter alone. A rank that froze or unfroze something reads them too: once all ranks
have done so, the plan changes, from the next step on. Only such ranks read, and reading
makes the CPU wait; in the usual step nobody does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from overlaplab.techniques.in_flight import Payload
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo

Average = tuple[ParameterInfo, Tensor]


class Flags:
    """Two flags per parameter, and what they change on the rank that reads them.

    Attributes:
        planned: whether each parameter is in the plan; the same on all ranks.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self.planned = facts.trains()

    @property
    def members(self) -> list[ParameterInfo]:
        """What the plan is made of."""
        pairs = zip(self._facts.parameters, self.planned, strict=True)
        return [info for info, planned in pairs if planned]

    def write(self, absent: list[ParameterInfo], like: Tensor) -> Tensor:
        """1 for each gradient here, then 1 for each parameter that trains as planned.

        Args:
            absent: the planned parameters without a gradient.
            like: its dtype and device are taken, so that both travel together.

        Returns:
            Shape (2 n,) for n parameters, on the current stream.
        """
        number = len(self.planned)
        flags = torch.ones(2 * number, dtype=like.dtype, device=like.device)
        for info in absent:
            flags[info.index] = 0
        for info in self._changed():
            flags[number + info.index] = 0
        return flags

    def averages_elsewhere(self, payloads: list[Payload]) -> list[Average]:
        """Those of what has no gradient here and has one on another rank.

        Waits for the GPU where something is missing.

        Args:
            payloads: of a step, finished, in order; the last one has the flags.
        """
        absent = [pair for payload in payloads for pair in payload.absent]
        if not absent or (values := _values(payloads)) is None:
            return []
        return [
            (info, average.to(info.parameter.dtype))
            for info, average in absent
            if values[info.index] > 0
        ]

    def changed_everywhere(self, payloads: list[Payload]) -> list[ParameterInfo]:
        """What every rank has frozen or unfrozen since the plan was made.

        Waits for the GPU where this rank has.

        Args:
            payloads: as above, and launched since then.

        Raises:
            RuntimeError: a parameter trains here that is frozen elsewhere.
        """
        changed = self._changed()
        if not changed or (values := _values(payloads)) is None:
            return []
        everywhere = []
        for info in changed:
            if not values[len(self.planned) + info.index]:
                everywhere.append(info)
            elif info.parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {info.name} trains on this rank and is frozen on "
                    "another one. Freeze and unfreeze on every rank alike."
                )
        return everywhere

    def adopt(self, changed: list[ParameterInfo]) -> bool:
        """Plan without what froze and with what trains again.

        Returns:
            False, and nothing changes, where no parameter would be left.
        """
        planned = list(self.planned)
        for info in changed:
            planned[info.index] = info.parameter.requires_grad
        if any(planned):
            self.planned = planned
        return any(planned)

    @property
    def changed(self) -> bool:
        """Whether this rank has frozen or unfrozen something since the plan."""
        return self._facts.trains() != self.planned

    def _changed(self) -> list[ParameterInfo]:
        now = self._facts.trains()
        if now == self.planned:
            return []
        states = zip(self._facts.parameters, now, self.planned, strict=True)
        return [info for info, trains, planned in states if trains != planned]


def _values(payloads: list[Payload]) -> list[float] | None:
    """The flags' averages; None if one rank stands for all, and lacks what all lack."""
    flags = payloads[-1].flags
    assert flags is not None
    return None if is_fake(flags) else flags.real.tolist()


def presence(payload: Payload) -> Tensor:
    """The flag of a payload of one parameter, shape (1,): 1 if a gradient is here."""
    like = payload.tensors[0]
    return torch.full((1,), float(not payload.absent)).to(like)


def present_elsewhere(payload: Payload) -> list[Average]:
    """The average of such a payload, if another rank alone had the gradient."""
    assert payload.flags is not None
    if not payload.absent or payload.flags.real.item() <= 0:
        return []
    return [(i, average.to(i.parameter.dtype)) for i, average in payload.absent]
