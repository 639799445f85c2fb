"""What ranks must agree on: who has a gradient, what trains, and so the buckets.

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

from overlaplab import streams
from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.buckets import BucketPlan, plan_buckets
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo
from overlaplab.techniques.payload import Payload

Average = tuple[ParameterInfo, Tensor]


class Agreement:
    """The plan, the same on all ranks; two flags per parameter, and what they change.

    Args:
        facts: of the model.
        arrivals: is told to count by the plan.
        caps: of a bucket and of each dtype's first one, in bytes.

    Attributes:
        plan: of what trains on all ranks; changes between steps, on all ranks.
        members: by bucket of the plan, its parameters.
    """

    plan: BucketPlan
    members: list[tuple[ParameterInfo, ...]]

    def __init__(
        self, facts: ModelFacts, arrivals: Arrivals, caps: tuple[int, int]
    ) -> None:
        self._facts, self._arrivals, self._caps = facts, arrivals, caps
        self._planned = facts.trains()  # by parameter: whether it is in the plan
        self._make_plan()

    @property
    def changed(self) -> list[ParameterInfo]:
        """What this rank has frozen or unfrozen since the plan was made."""
        now = self._facts.trains()
        if now == self._planned:
            return []
        states = zip(self._facts.parameters, now, self._planned, strict=True)
        return [info for info, trains, planned in states if trains != planned]

    def step_opens(self) -> None:
        """Plan again after `model.to(dtype)`."""
        if self._facts.dtypes() != self._dtypes:
            self._make_plan()

    def write_flags(self, payloads: list[Payload]) -> Tensor:
        """1 for each gradient here, then 1 for each parameter that trains as planned.

        Args:
            payloads: of all buckets, in order. The last one's dtype and device are
                taken, so that the flags travel with it.

        Returns:
            Shape (2 n,) for n parameters, on the current stream.
        """
        number, like = len(self._planned), payloads[-1].tensors[0]
        flags = torch.ones(2 * number, dtype=like.dtype, device=like.device)
        for payload in payloads:
            for info, _ in payload.absent:
                flags[info.index] = 0
        for info in self.changed:
            flags[number + info.index] = 0
        return flags

    def averages_elsewhere(self, payloads: list[Payload]) -> list[Average]:
        """Those of what has no gradient here and has one on another rank.

        Waits for the GPU where something is missing.

        Args:
            payloads: of a step's buckets, finished; the last has the flags.
        """
        absent = [pair for payload in payloads for pair in payload.absent]
        if not absent or (values := _values(payloads)) is None:
            return []
        return [
            (info, average.to(info.parameter.dtype))
            for info, average in absent
            if values[info.index] > 0
        ]

    def _changed_everywhere(self, payloads: list[Payload]) -> list[ParameterInfo]:
        """What every rank has frozen or unfrozen since the plan was made.

        Waits for the GPU where this rank has; raises where it trains something that is
        frozen elsewhere.
        """
        changed = self.changed
        if not changed or (values := _values(payloads)) is None:
            return []
        everywhere = []
        for info in changed:
            if not values[len(self._planned) + info.index]:
                everywhere.append(info)
            elif info.parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {info.name} trains on this rank and is frozen on "
                    "another one. Freeze and unfreeze on every rank alike."
                )
        return everywhere

    def adopt(self, in_flight: InFlight) -> list[Average]:
        """Do what the flags say; see [Note: parameters without a gradient].

        Args:
            in_flight: the buckets of a step, finished.

        Returns:
            Averages of what has no gradient here; nobody's `.grad` yet.
        """
        found = self.averages_elsewhere(in_flight.payloads)
        planned = list(self._planned)
        changed = self._changed_everywhere(in_flight.payloads)
        for info in changed:
            planned[info.index] = info.parameter.requires_grad
        if not changed or not any(planned):  # a plan of nothing is none
            return found
        self._planned = planned
        # Rare: what trains again is in no bucket of this step, and is sent now.
        if unfrozen := [info for info in changed if info.parameter.requires_grad]:
            streams.synchronize()  # no hook has noted which stream wrote them
            for info in unfrozen:
                in_flight.launch([info], (), _presence)
            in_flight.finish()
        for payload in in_flight.payloads[len(self.plan) :]:
            found += _present_elsewhere(payload)
        self._make_plan()
        return found

    def _make_plan(self) -> None:
        self._dtypes = self._facts.dtypes()
        pairs = zip(self._facts.parameters, self._planned, strict=True)
        infos = [info for info, planned in pairs if planned]
        self.plan = plan_buckets([(i.name, i.parameter) for i in infos], *self._caps)
        self.members = [
            tuple(infos[position] for position in bucket.positions)
            for bucket in self.plan
        ]
        self._arrivals.plan([[i.index for i in bucket] for bucket in self.members])


def _values(payloads: list[Payload]) -> list[float] | None:
    """The flags' averages; None if one rank stands for all, and lacks what all lack."""
    flags = payloads[-1].flags
    assert flags is not None
    return None if is_fake(flags) else flags.real.tolist()


def _presence(payloads: list[Payload]) -> Tensor:
    """The flag of the last, of one parameter, shape (1,): 1 if a gradient is here."""
    payload = payloads[-1]
    like = payload.tensors[0]
    return torch.full((1,), float(not payload.absent)).to(like)


def _present_elsewhere(payload: Payload) -> list[Average]:
    """The average of such a payload, if another rank alone had the gradient."""
    assert payload.flags is not None
    if not payload.absent or payload.flags.real.item() <= 0:
        return []
    return [(i, average.to(i.parameter.dtype)) for i, average in payload.absent]
