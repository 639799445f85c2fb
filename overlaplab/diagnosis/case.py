"""Everything that the rules look at, put together once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlaplab.diagnosis.collectives import Collective, collectives_of
from overlaplab.diagnosis.contention import Contention, Twins, contention_of
from overlaplab.diagnosis.lookup import Lookup
from overlaplab.diagnosis.makers import Maker, makers_of
from overlaplab.diagnosis.steps import Step, steps_of
from overlaplab.hardware import PROFILES, Hardware, find_hardware
from overlaplab.timeline import Timeline

# A card by a word of its name, and the profile of machines that are built of it.
_GUESSES = (("H200", "h200-nvlink"), ("H100", "h100-nvlink"), ("A100", "a100-nvlink"))


@dataclass(frozen=True, slots=True)
class Case:
    """A timeline, taken apart."""

    lookup: Lookup
    steps: tuple[Step, ...]  # by step and rank
    collectives: tuple[Collective, ...]  # by start
    # kernels alone and beside communication, the costliest first
    twins: tuple[Twins, ...]
    contention: Mapping[tuple[int, int | None], Contention]  # by (rank, step)
    # the collectives of a (rank, step), by start
    by_step: Mapping[tuple[int, int | None], Sequence[Collective]]
    # the profile that bandwidths are compared with, None without one
    hardware: Hardware | None
    is_guess: bool  # whether the profile was guessed by the card's name
    makers: tuple[Maker, ...] = ()  # who launched the collectives

    @property
    def timeline(self) -> Timeline:
        return self.lookup.timeline

    def of(self, step: Step) -> Sequence[Collective]:
        """The collectives of one rank's step, by start."""
        return self.by_step.get((step.rank, step.step), ())

    def peers_of(self, step: Step) -> Sequence[Step]:
        """The same step on every rank, its own too."""
        return [s for s in self.steps if s.step == step.step]

    def contention_of(self, step: Step) -> Contention:
        return self.contention.get((step.rank, step.step), Contention())

    @property
    def described(self) -> Step | None:
        """The step that is described: of each rank's median steps the longest.

        Table, sentence, findings and drawing are all of its number.
        """
        own: dict[int, list[Step]] = defaultdict(list)
        for step in self.steps:
            own[step.rank].append(step)
        medians = [
            sorted(steps, key=lambda s: s.step_ns)[(len(steps) - 1) // 2]
            for steps in own.values()
        ]
        return max(medians, key=lambda s: (s.step_ns, -s.rank), default=None)

    @property
    def representative(self) -> tuple[Step, ...]:
        """The step that is described, on every rank that has it, by rank."""
        described = self.described
        return () if described is None else tuple(self.peers_of(described))

    def made_by(self, maker: str) -> bool:
        """Whether the trace says that `maker` launched some of the collectives."""
        return any(one.name == maker for one in self.makers)

    @property
    def on_gpus(self) -> bool:
        """Whether advice on cards and NCCL can apply: not to a trace of CPUs."""
        devices = self.timeline.source.devices
        kernels = any("stream" in c.span.attributes for c in self.collectives[:1])
        return self.timeline.origin == "virtual" or bool(devices) or kernels


def case_of(
    timeline: Timeline, hardware: str | Hardware | None, step: int | None = None
) -> Case:
    """Take `timeline` apart; with `step`, describe that one only.

    Raises:
        ValueError: nobody knows the hardware, or there is no such step.
    """
    if step is not None and step not in timeline.steps:
        known = f"it has {timeline.steps}" if timeline.steps else "it has none"
        raise ValueError(f"no step {step!r} in this timeline; {known}")
    hw, is_guess = _hardware(timeline, hardware)
    lookup = Lookup(timeline)
    steps = steps_of(lookup)
    twins, contention = contention_of(lookup, steps)
    if step is not None and any(one.step is None for one in steps):
        raise ValueError(
            f"step {step}: the launches of GPU events were not recorded, so it is not "
            "known which are of a step; leave the step out"
        )
    if step is not None:
        steps = tuple(one for one in steps if one.step == step)
    collectives = collectives_of(lookup, steps, hw)
    by_step: dict[tuple[int, int | None], list[Collective]] = defaultdict(list)
    for collective in collectives:
        by_step[collective.span.rank, collective.step.step].append(collective)
    return Case(
        lookup=lookup,
        steps=steps,
        collectives=collectives,
        twins=twins,
        contention=contention,
        by_step=by_step,
        hardware=hw,
        is_guess=is_guess,
        makers=makers_of(timeline, collectives),
    )


def _hardware(
    timeline: Timeline, hardware: str | Hardware | None
) -> tuple[Hardware | None, bool]:
    if hardware is not None:
        return find_hardware(hardware), False
    if timeline.hardware:
        # A virtual run's own; an edited profile has no entry.
        return PROFILES.get(timeline.hardware), False
    for _, device in timeline.source.devices:
        for word, name in _GUESSES:
            if word in device:
                return PROFILES[name], True
    return None, False
