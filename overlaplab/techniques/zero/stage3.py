"""ZeRO stage 3: a rank keeps a part of everything and gathers what it computes with.

A unit's weights are gathered into a slot of a ring just before its forward and again
before its backward; meanwhile the unit before computes. Its gradients leave by
reduce-scatter, out of the same slot, while the units before it go backward. After
Rajbhandari et al., ZeRO (SC 2020); the ring is what makes it lean, see `ring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab import step_members
from overlaplab.errors import MismatchError
from overlaplab.techniques.groups import (
    checked_group,
    exchange_texts,
    job_group,
    number_in,
)
from overlaplab.techniques.model_facts import ModelFacts
from overlaplab.techniques.zero.deferred import Deferred, Init
from overlaplab.techniques.zero.full import give_back
from overlaplab.techniques.zero.gathering import Gathering
from overlaplab.techniques.zero.guards import Guards, refuse_model
from overlaplab.techniques.zero.memory import Memory, count_memory, count_slots
from overlaplab.techniques.zero.norms import clip_by_norm
from overlaplab.techniques.zero.plan import StepPlan
from overlaplab.techniques.zero.ring import Ring, ShardedUnit
from overlaplab.techniques.zero.saving import Saving
from overlaplab.techniques.zero.scatters import Scatters
from overlaplab.techniques.zero.units import make_units


class Zero3(Saving):
    """Shards a model's parameters, gradients and optimizer states over ranks.

    At construction rank 0's values are sharded, and the model's parameters become views
    of memory that has their values only while they are needed. One step is: forwards
    and backwards, `wait()`, the optimizer over `shards()`. With several backwards each
    adds its average; those inside `no_sync()` keep full gradients and send nothing.

    The model runs as a whole: its units compute inside its forward, or in a backward
    pass. Parameters must not be read at other times (`full_state_dict()` has them), and
    second derivatives are refused. Nor must they be written: their values are in the
    shards, and what is written to gathered memory is lost. A write in place is refused,
    but one through `.data` or NumPy is seen by nobody. Between steps write to
    `shards()`, on every rank, what goes element by element (decay, clamping, averages
    of weights), and all else by `full_state_dict()` and `load_full_state_dict()`.

    Where launches bind, `ol.capture_step` makes one CUDA graph of a whole step, with
    the optimizer (`capturable=True`) and, if there are any, clipping and `no_sync()`.
    Every parameter must get a gradient on every rank; the plan must not change.
    `torch.compile` may have the units (blocks, before or after) or the model: each unit
    is a graph of its own, and the hooks between them run as they are.

    Args:
        model: on the rank's device, or on meta: it is moved to the rank's and gets its
            values unit by unit, so that no rank has all of it at any time.
        units: modules whose parameters are gathered together; None: the members that
            repeat in a ModuleList or Sequential, and large layers beside them. What no
            unit has to itself is gathered for the whole step.
        prefetch: uses ahead that are gathered; the ring has `prefetch` + 1 slots.
        process_group: the ranks, for gathers and scatters both; None: the world, with
            a communicator for each.
        mixed_precision: such as torch.bfloat16: what is gathered and computes; inputs
            are the caller's to cast. Shards, averages and states stay in the
            parameters' own dtype. None: one dtype for all.
        reshard_after_forward: False: a slot for every unit, gathered once a step.
        init: gives values to what a module itself has on meta; None: the module's
            `reset_parameters()`. Rank 0's count; what is tied has its first owner's.

    Attributes:
        plan: of a step, None before the first one has ended.

    Raises:
        ValueError: units that are not the model's; a negative `prefetch`; what
            `ModelFacts` refuses; a model that has a reducer; a module on meta that
            nothing initialises; no process group.
        MismatchError: the ranks' models differ.

    Example:
        zero = Zero3(model)
        optimizer = torch.optim.AdamW(zero.shards(), fused=True)
        loss = model(tokens, targets)
        loss.backward()       # gradients leave during this call
        zero.wait()           # this rank's part of the averages is in .grad
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        units: Sequence[nn.Module] | None = None,
        prefetch: int = 1,
        process_group: dist.ProcessGroup | None = None,
        mixed_precision: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        init: Init | None = None,
    ) -> None:
        _check(prefetch, mixed_precision)
        self._model = model
        given = None if process_group is None else checked_group(process_group)
        self._group = given or job_group("gather")
        deferred = Deferred(model, init)
        self._facts = facts = ModelFacts(model, self._group)
        refuse_model(model, facts)
        made = make_units(model, facts.parameters, units)
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        num_slots = count_slots(made, prefetch, reshard_after_forward)
        self._memory = count_memory(made, size, num_slots, mixed_precision)
        with torch.no_grad():
            self._all = [
                ShardedUnit(i, u, size, rank, mixed_precision)
                for i, u in enumerate(deferred.units(made, facts))
            ]
            self._ring = Ring(self._all, num_slots, self._group)
        self._number = number_in(self._group)
        self._removed = False
        self._scatters = scatters = Scatters(
            facts, self._all, self._ring, given or job_group("scatter")
        )
        self._gathering = Gathering(
            model,
            self._all,
            self._ring,
            scatters,
            prefetch,
            self._exchange,
            self._forward_begins,
        )
        self._guards = Guards(model, self._all, lambda: scatters.is_open)
        step_members.join(self)

    # What people ask.

    @property
    def plan(self) -> StepPlan | None:
        """Of the next step."""
        return self._gathering.plan

    @property
    def num_steps(self) -> int:
        """Steps that have ended."""
        return self._scatters.num_steps

    def shards(self) -> list[nn.Parameter]:
        """What optimizers update: this rank's piece of each parameter that trains."""
        return [piece for _, piece in self.named_shards()]

    def named_shards(self) -> list[tuple[str, nn.Parameter]]:
        """(name, piece), in the model's order on every rank; flat, maybe empty."""
        found = {
            info.index: (info.name, piece)
            for unit in self._all
            for row in unit.rows
            for info, piece in zip(row.row.parameters, row.pieces, strict=True)
            if info.parameter.requires_grad
        }
        return [found[index] for index in sorted(found)]

    named_parameters = named_shards  # whose `.grad` a step writes: a step member's

    def summary(self) -> Memory:
        """Bytes of this rank by kind, counted from shapes before anything was made."""
        return self._memory

    # A step.

    def wait(self) -> None:
        """End the step: this rank's averages are in `.grad` of `shards()`.

        Sends what has not been and makes the current stream wait for all of it; a piece
        keeps `.grad` None where no rank had a gradient, or it has no element.
        Collective: every rank calls it once a step.

        Raises:
            RuntimeError: a backward of the step raised (`abandon()` gives it up);
                inside `no_sync()`; after `remove()`.
            MismatchError: ranks used their units in different orders.
        """
        self._refuse_removed("zero.wait()")
        self._guards.check_places()
        with torch.no_grad():
            self._scatters.finish()
            self._ring.drain()
            if self._gathering.end_step():
                self._guards.note_places()  # slots may be others
        self._end_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards in this block add up full gradients; the next one after it sends.

        If no backward follows, `wait` sends. Costs memory for full gradients and saves
        their reduce-scatters. Blocks nest.
        """
        return self._scatters.pausing()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that the norm of all of them is `max_norm` at most.

        Call it between `wait()` and the optimizer, on every rank. Padding counts
        nothing, and each element once.

        Returns:
            The norm before, of the whole model, the same on all ranks.
        """
        self._scatters.refuse_open("zero.clip_grad_norm_()")
        return clip_by_norm(self.shards(), max_norm, norm_type, self._group)

    def abandon(self) -> None:
        """Give up the open step after an error in it. Collective, instead of `wait()`.

        Raises:
            MismatchError: ranks have launched different collectives, and cannot meet
                again; end the run.
        """
        mine = (
            f"{self._scatters.num_launched} scatters, {len(self._gathering.uses)} uses"
        )
        everyone = self._exchange(f"abandon {self.num_steps}", mine)
        if len(set(everyone)) > 1:
            rows = "\n".join(f"  rank {r}: {text}" for r, text in enumerate(everyone))
            raise MismatchError(
                f"step {self.num_steps} ended at different places:\n{rows}\nThe "
                "collectives between are lost; end the run on all ranks."
            )
        with torch.no_grad():
            self._scatters.settle()
            self._ring.drain()
        self.abandon_step()

    def abandon_step(self) -> None:
        """Forget an open step on this rank alone; waits for nothing."""
        for parameter in self._facts.tensors:
            parameter.grad = None
        self._end_step()

    def remove(self) -> None:
        """Give the model its full parameters back; drops gradients. Collective."""
        self._refuse_removed("zero.remove()")
        with torch.no_grad():
            self._scatters.settle()
            self._ring.drain()
            give_back(self._all, self._group)
        self.abandon_step()
        self._scatters.remove()
        self._guards.remove()
        self._gathering.remove()
        step_members.leave(self)
        self._removed = True

    # How it goes on.

    def _end_step(self) -> None:
        self._gathering.close()
        self._scatters.close()

    def _forward_begins(self) -> None:
        self._scatters.forward_begins(self._gathering.is_open)
        self._facts.check_identity()
        self._guards.check_places()

    def _exchange(self, key: str, text: str) -> list[str]:
        if is_fake(self._facts.tensors[0]):
            return [text]  # one rank stands for all
        return exchange_texts(self._group, f"zero {self._number} {key}", text)

    def _refuse_removed(self, what: str) -> None:
        if self._removed:
            raise RuntimeError(f"{what} after remove(); build a new Zero3")

    def _refuse_open(self, what: str) -> None:
        self._refuse_removed(what)
        if self._gathering.is_open:
            raise RuntimeError(
                f"{what} in step {self.num_steps}, which is open. End it with "
                "zero.wait() first, or give it up with zero.abandon()."
            )


def _check(prefetch: object, mixed: object) -> None:
    if mixed is not None and not (
        isinstance(mixed, torch.dtype) and mixed.is_floating_point
    ):
        raise TypeError(
            f"mixed_precision is {mixed!r}; expected a floating point dtype, such as "
            "torch.bfloat16"
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"prefetch is {prefetch!r}; expected a number of uses")
    if prefetch < 0:
        raise ValueError(f"prefetch is {prefetch}; expected 0 or more")
