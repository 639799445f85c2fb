"""Exercise 1.1: the shortest step that any schedule could reach, by two chains.

The learner's number draws the step. All gradients are needed for the update, so two
chains bound it; a message a layer reaches the longer one, which the resolver shows.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01.numbers import as_number
from overlaplab_course.lab01.steps import CHALK, NS_PER_MS, write_step

LAST = "the chain that ends with the last message"
ALL = "the chain that has all messages"
SHORTEST = "the shortest step: the longer of the two"


@dataclass(frozen=True, slots=True)
class Job:
    """A step of equal layers; all times in ms."""

    num_layers: int
    forward_ms: int
    layer_ms: int
    message_ms: int
    update_ms: int

    @property
    def compute_ms(self) -> int:
        return self.forward_ms + self.num_layers * self.layer_ms + self.update_ms

    @property
    def communication_ms(self) -> int:
        return self.num_layers * self.message_ms

    @property
    def last_message_ms(self) -> int:
        """All the computing, and one message before the update."""
        return self.compute_ms + self.message_ms

    @property
    def all_messages_ms(self) -> int:
        """The first gradient, then the wire without a gap."""
        before = self.forward_ms + self.layer_ms
        return before + self.communication_ms + self.update_ms

    def timeline(self, per_bucket: int = 1) -> Timeline:
        """The step, with that many layers a message."""
        return resolve(
            write_step(
                [self.layer_ms * NS_PER_MS] * self.num_layers,
                [self.message_ms * NS_PER_MS] * self.num_layers,
                per_bucket=per_bucket,
                forward_ns=self.forward_ms * NS_PER_MS,
                update_ns=self.update_ms * NS_PER_MS,
            ),
            CHALK,
        )

    def __repr__(self) -> str:
        return "\n".join(
            (
                f"{self.num_layers} layers",
                f"forward pass            {self.forward_ms:>4} ms",
                f"backward pass, a layer  {self.layer_ms:>4} ms",
                f"message, a layer        {self.message_ms:>4} ms",
                f"update                  {self.update_ms:>4} ms",
            )
        )


@lru_cache(maxsize=64)
def job(number: int) -> Job:
    """The step that belongs to a learner's number.

    Odd numbers have the longer chain through the messages, even ones through the
    computing.
    """
    draw = random.Random(f"shortest {int(number)}")
    layers = draw.choice((6, 8, 12))
    layer = draw.choice((3, 4, 5, 6))
    more = draw.choice((1, 2, 3))
    message = layer + more if int(number) % 2 else max(1, layer - more)
    forward = layers * layer // 2
    return Job(layers, forward, layer, message, draw.choice((4, 7, 9)))


@exercise(
    "1.1",
    title="the shortest step",
    solution=("my_number", "chains"),
    verifies=(LAST, ALL, SHORTEST),
    points=1,
    timeout_s=20.0,
)
def grade_shortest(sheet: Sheet, my_number: int, chains: Mapping[str, Any]) -> None:
    """Each number alone; the shortest step is drawn for who has found it."""
    if not isinstance(chains, Mapping):
        raise TypeError(f"chains is {type(chains).__name__}; expected a dict")
    mine = job(int(my_number))
    timeline = mine.timeline()
    reached_ms = timeline.step_ns / NS_PER_MS
    sheet.ran("your step with no overlap, and with a message a layer")
    sheet.show(mine.timeline(mine.num_layers), title="your step, no overlap yet")
    sheet.note(f"a message a layer reaches it: {reached_ms:g} ms")
    slips = _slips(mine)
    all_right = True
    for sentence, key, right in (
        (LAST, "last message", mine.last_message_ms),
        (ALL, "all messages", mine.all_messages_ms),
        (SHORTEST, "shortest", reached_ms),
    ):
        said = as_number(chains.get(key))
        seen = f"{key!r} is {chains[key]!r}" if key in chains else f"no {key!r}"
        slip = "" if said is None else slips[key].get(said, "")
        if isinstance(chains.get(key), str):
            slip = "that is a string; expected a number"
        all_right &= sheet.expect(
            sentence,
            said is not None and abs(said - right) < 0.01,
            seen=f"{seen}\n{slip}" if slip else seen,
            expected=_HOW[key],
        )
    if all_right:  # before that it would be the answer
        sheet.show(
            timeline,
            step_ns=timeline.step_ns,
            target_ns=max(mine.last_message_ms, mine.all_messages_ms) * NS_PER_MS,
            title="your step, a message a layer",
        )


_HOW: Mapping[str, str] = {
    "last message": "forward, every layer's backward, one message, update, in ms",
    "all messages": "forward, one layer's backward, every message, update, in ms",
    "shortest": "as long as the longer of the two chains",
}


def _slips(mine: Job) -> Mapping[str, Mapping[float, str]]:
    """What people say, and what it leaves out."""
    bound = max(mine.compute_ms, mine.communication_ms)
    serial = mine.compute_ms + mine.communication_ms
    last, all_ = mine.last_message_ms, mine.all_messages_ms
    return {
        "last message": {
            mine.compute_ms: "that is the computing alone: the last gradient comes "
            "when nothing is left to compute beside its message",
            serial: "all messages, one after the other: all but one can go earlier",
            last - mine.update_ms: "the update needs the last message: it comes after",
            last - mine.forward_ms: "the forward pass stands in the chain too",
        },
        "all messages": {
            mine.communication_ms: "the wire cannot start before there is a gradient",
            all_ - mine.layer_ms: "the first gradient takes one layer's backward pass",
            all_ - mine.update_ms: "the update comes after the last message",
            all_ - mine.forward_ms: "there is no gradient before the forward pass",
            serial: "the other layers' backward passes run beside the wire",
        },
        "shortest": {
            serial: "that is the step with no overlap",
            min(last, all_): "both chains must fit into the step",
            bound: "max(Tc, Tm) is a bound that this step cannot reach",
        },
    }
