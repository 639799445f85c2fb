"""Steps with messages: what is computed again in a backward hides what travels there.

A block's gradients are sent once its backward is done, one message a block, while the
backward of earlier blocks goes on. A block that computes its forward again delays its
own message and those behind it, and nothing else: near the input that is time in which
other messages travel. So where the wire is the last to end, the fastest step may
compute more than it had to. Peaks stay what they are.

[Note: what is left out]
Messages are of whole blocks, not of buckets; gradients outside the blocks do not
travel; kernels and messages do not slow one another (`Hardware.contention`); a gather
that comes late and makes a block wait is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from overlaplab.hardware import Hardware, collective_ns, find_hardware
from overlaplab.techniques.memory.chain import Chain
from overlaplab.techniques.memory.knapsack import Curve, find_curve

_PRECISION = 100_000  # the search ends where a step is known to this part of itself


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What a block sends in its backward.

    Args:
        world_size: ranks that average their gradients.
        hardware: a profile, or its name, whose links they use.
        operations: for each block, of as many bytes as its gradients have: an
            all-reduce for a reducer; for Zero3 ("all_gather", "reduce_scatter").
    """

    world_size: int
    hardware: str | Hardware
    operations: tuple[str, ...] = ("all_reduce",)

    def block_ns(self, chain: Chain) -> list[int]:
        """Of each block, how long its messages are on the wire.

        Raises:
            ValueError: an unknown operation or profile, or less than one rank.
            TypeError: operations are a string.
        """
        if isinstance(self.operations, str):
            raise TypeError(
                f"operations is {self.operations!r}; expected several: "
                f"({self.operations!r},)"
            )
        hw = self.hardware
        hw = find_hardware(hw) if isinstance(hw, str) else hw
        return [
            sum(
                sum(collective_ns(hw, operation, self.world_size, num_bytes))
                for operation in self.operations
            )
            for num_bytes in (block.options[0].gradient_bytes for block in chain.blocks)
        ]


def step_ns(
    chain: Chain, choice: Sequence[int], communication: Communication
) -> tuple[int, int]:
    """Of a choice, how long a step computes, and how long it waits then.

    >>> from overlaplab.techniques.memory.chain import Block, Option
    >>> keep = Option("keep", 9, 9, 9, 0, 1000, 3000, 1000)
    >>> again = Option("recompute", 0, 9, 9, 0, 1000, 4000, 1000)
    >>> chain = Chain(tuple(Block(n, (keep, again), 0, 0, 0, 0) for n in "ab"), 0)
    >>> sent = Communication(world_size=2, hardware="chalk")  # 1100 ns a message
    >>> step_ns(chain, (0, 0), sent), step_ns(chain, (1, 0), sent)
    ((6000, 1100), (7000, 1100))
    """
    forwards = _forwards_ns(chain)
    now, wire = chain.rest_ns + sum(forwards), 0
    rows = zip(
        chain.chosen(choice), forwards, communication.block_ns(chain), strict=True
    )
    for option, forward_ns, message_ns in reversed(list(rows)):
        now += option.step_ns - forward_ns
        wire = max(wire, now) + message_ns
    return now, max(0, wire - now)


def choose_with_messages(
    chain: Chain, budget_bytes: int, communication: Communication
) -> tuple[int, ...]:
    """The choice whose step ends first, its messages included, within a budget.

    A step ends by some time if each block is ready so long before it that its message
    and those behind it still arrive: the knapsack, with a latest time for each block.
    That time is searched for by halving.

    Args:
        chain, budget_bytes: see `Curve.choose`.
        communication: what is sent.

    Raises:
        BudgetError: no choice fits.
        ValueError: see `Communication.block_ns`.
    """
    best = find_curve(chain).choose(budget_bytes)
    messages, forwards = communication.block_ns(chain), _forwards_ns(chain)
    behind = list(accumulate(messages))  # of a block, its own message included
    before = [0, *accumulate(forwards)]  # forwards of earlier blocks

    def curve_of(end_ns: int) -> Curve:
        latest = [
            end_ns - wire - forward
            for wire, forward in zip(behind, before[:-1], strict=True)
        ]
        return find_curve(chain, latest_ns=latest, most_bytes=budget_bytes)

    least, exposed_ns = step_ns(chain, best, communication)  # none computes less
    most = least + exposed_ns
    while most - least > most // _PRECISION:
        middle = (least + most) // 2
        curve = curve_of(middle)
        if len(curve.peak_bytes):
            best = curve.choose(budget_bytes)
            most = sum(step_ns(chain, best, communication))
        else:
            least = middle + 1
    return best


def _forwards_ns(chain: Chain) -> list[int]:
    """Of the blocks as they are: what is computed again is so in the backward."""
    return [block.options[0].forward_ns for block in chain.blocks]
