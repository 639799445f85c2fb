"""What takes part in training steps: reducers now, sharded optimizers later.

A technique that does something once per step joins here, and `ol.capture_step` watches
its members, so that neither needs to know the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable
from weakref import WeakSet

from torch import nn


@runtime_checkable
class StepMember(Protocol):
    """What a member of a training step must answer."""

    @property
    def num_steps(self) -> int:
        """Steps that it has finished."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """(name, parameter) of each parameter whose `.grad` it writes."""

    def abandon_step(self) -> None:
        """Forget a step that did not end, after an error in it; waits for nothing."""


_members: WeakSet[StepMember] = WeakSet()


def join(member: StepMember) -> None:
    """Add `member`, for as long as it lives or until `leave`.

    Raises:
        TypeError: it is no `StepMember`; the message names what it lacks.
    """
    if not isinstance(member, StepMember):
        wanted = ("num_steps", "named_parameters", "abandon_step")
        lacking = [name for name in wanted if not hasattr(member, name)]
        raise TypeError(
            f"{type(member).__name__} cannot take part in training steps: it has no "
            f"{', '.join(lacking)}. Expected {', '.join(wanted)}, see StepMember."
        )
    _members.add(member)


def leave(member: StepMember) -> None:
    """Take `member` out, if it is in."""
    _members.discard(member)


def members() -> Iterator[StepMember]:
    """All that have joined and not left, in no particular order."""
    return iter(tuple(_members))
