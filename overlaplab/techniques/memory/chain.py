"""A training step as a chain of blocks: what each keeps and needs, in bytes and ns.

Pure data and sums. Knows no tensor: `costs.py` fills it in, `knapsack.py` chooses.

[Note: how the peak adds up]
A step is a row of phases: what comes before the first block, each block's forward, what
lies between blocks, the loss, and all of it backwards. The *skeleton* is the model with
its blocks cut out: it has the blocks' inputs and outputs, the values that live across
blocks (a U-net's skips), logits and loss. In each phase there live

    the resident bytes + the skeleton's + what earlier blocks keep for their backward
    + what this phase needs at most + the gradients that have arrived

and the step's peak is the largest of these sums. What a phase needs contains temporary
memory, and in a backward all that is computed once more. So every bound has the form
`kept by earlier blocks + need of this block under its policy`: a chain can be planned
from left to right.

[Note: why a plan is per block]
A segment of m blocks that is computed again as one keeps one input instead of m, and
holds all m blocks in its backward. Of n blocks with inputs of b bytes, which keep k
each, twos need n b / 2 + 2 k instead of n b + k: they pay from n = 2 k / b on. A
transformer block keeps 15 times its input, so its model needs 30 blocks for that; here
plans stay sums over single blocks, and the knapsack exact. Who has more blocks, or ones
that keep little, nests them (an `nn.Sequential` of several is one block): sqrt(n) of
Chen et al. Nothing is computed a third time, as in Rotor's nested segments. What is
lost by both is at most what the inputs of the blocks take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Option:
    """One block under one policy.

    Args:
        policy: its name, of `policies.POLICIES`.
        kept_bytes: from its forward to its backward, beside its inputs and outputs.
        forward_bytes: the most at once in its forward, beside its inputs.
        backward_bytes: the most at once in its backward, what is kept and recomputed
            and its own gradients included, beside its inputs and its outputs' gradient.
        output_bytes: of its outputs, what it keeps itself even when nobody else does.
        gradient_bytes: of its parameters.
        step_ns: forward and backward, recomputation included.
        forward_ns: the forward alone, of the block as it is; 0: not known.
        launch_ns: of the CPU, to launch its kernels.
    """

    policy: str
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    output_bytes: int
    gradient_bytes: int
    step_ns: int
    forward_ns: int = 0
    launch_ns: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the chain.

    Args:
        name: in the model, "blocks.3".
        options: its menu; the first is the block as it is.
        forward_bytes: the skeleton's when its forward begins.
        backward_bytes: the skeleton's when its backward begins, the gradient of its
            outputs included.
        after_forward_bytes: the skeleton's most between its forward and the next
            block's, or the end of the step's forward.
        before_backward_bytes: the skeleton's most between the next block's backward,
            or the end of the forward, and its own.
    """

    name: str
    options: tuple[Option, ...]
    forward_bytes: int
    backward_bytes: int
    after_forward_bytes: int
    before_backward_bytes: int

    def option(self, policy: str) -> int:
        """The place of a policy in the menu.

        Raises:
            ValueError: it is not there.
        """
        names = [option.policy for option in self.options]
        if policy not in names:
            raise ValueError(
                f"block {self.name} has no policy {policy!r}; it has {', '.join(names)}"
            )
        return names.index(policy)


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole model under one policy: measured as a whole, no sum of blocks.

    Args:
        policy: its name.
        peak_bytes: the most that lives at once in a step, what is resident included.
        step_ns: forward and backward.
        launch_ns: of the CPU, to launch it.
    """

    policy: str
    peak_bytes: int
    step_ns: int
    launch_ns: int = 0


@dataclass(frozen=True)
class Chain:
    """A step.

    Args:
        blocks: in the order of the forward.
        resident_bytes: what lives all the time: parameters, buffers, inputs, the
            optimizer's states, workspaces.
        first_bytes: the skeleton's most before the first block's forward.
        last_bytes: the skeleton's most behind the first block's backward.
        rest_ns: forward and backward of the skeleton.
        notes: what was left out of the chain and why, in sentences.
        named_bytes: parts of `resident_bytes` that have a name: ((what, bytes), ...).
        rest_launch_ns: of the CPU, to launch the skeleton's kernels.
    """

    blocks: tuple[Block, ...]
    resident_bytes: int
    first_bytes: int = 0
    last_bytes: int = 0
    rest_ns: int = 0
    notes: tuple[str, ...] = ()
    named_bytes: tuple[tuple[str, int], ...] = ()
    rest_launch_ns: int = 0

    @cached_property
    def later_gradients(self) -> tuple[int, ...]:
        """For each block, bytes of the gradients of all blocks behind it; and of all.

        One entry more than blocks: the first counts every block.
        """
        total, found = 0, [0]
        for block in reversed(self.blocks):
            total += max(option.gradient_bytes for option in block.options)
            found.append(total)
        return tuple(reversed(found))

    def needs(self, number: int, option: Option) -> Iterator[tuple[str, int]]:
        """(phase, bytes) of a block's phases, beside what earlier blocks keep."""
        block, own = self.blocks[number], option.kept_bytes
        grads = self.later_gradients[number + 1]
        base = self.resident_bytes
        yield "forward of", base + block.forward_bytes + option.forward_bytes
        yield "after the forward of", base + block.after_forward_bytes + own
        yield (
            "before the backward of",
            base + block.before_backward_bytes + own + option.output_bytes + grads,
        )
        yield (
            "backward of",
            base + block.backward_bytes + option.backward_bytes + grads,
        )

    def need_bytes(self, number: int, option: Option) -> int:
        """The largest of `needs`."""
        return max(num_bytes for _, num_bytes in self.needs(number, option))

    @cached_property
    def ends_bytes(self) -> int:
        """The most before the first forward and behind the last backward."""
        last = self.last_bytes + self.later_gradients[0]
        return self.resident_bytes + max(self.first_bytes, last)

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """The most bytes that live at once in a step.

        Args:
            choice: for each block the place of its option in its menu.

        >>> keep = Option("keep", 10, 12, 14, 0, 0, 3)
        >>> again = Option("recompute", 0, 12, 16, 0, 0, 4)
        >>> chain = Chain(tuple(Block(n, (keep, again), 0, 0, 0, 0) for n in "ab"), 100)
        >>> [chain.peak_bytes(c) for c in ((0, 0), (0, 1), (1, 0), (1, 1))]
        [124, 126, 116, 116]
        """
        return max([peak for _, peak, _ in self._phases(choice)] + [self.ends_bytes])

    def step_ns(self, choice: Sequence[int]) -> int:
        """The time of a step."""
        return self.rest_ns + sum(o.step_ns for o in self.chosen(choice))

    def launch_ns(self, choice: Sequence[int]) -> int:
        """What the CPU takes to launch a step."""
        return self.rest_launch_ns + sum(o.launch_ns for o in self.chosen(choice))

    def chosen(self, choice: Sequence[int]) -> list[Option]:
        """The option of each block."""
        return [b.options[c] for b, c in zip(self.blocks, choice, strict=True)]

    def slower(self, factor: float) -> Chain:
        """The chain with all times multiplied."""

        def scaled(block: Block) -> Block:
            options = [
                replace(
                    option,
                    step_ns=round(factor * option.step_ns),
                    forward_ns=round(factor * option.forward_ns),
                )
                for option in block.options
            ]
            return replace(block, options=tuple(options))

        rest_ns = round(factor * self.rest_ns)
        return replace(self, blocks=tuple(map(scaled, self.blocks)), rest_ns=rest_ns)

    def holders(self, choice: Sequence[int]) -> tuple[str, tuple[tuple[str, int], ...]]:
        """When the peak is, and what holds it.

        Returns:
            The phase, in words, and ((what, bytes), ...), which add up to the peak.
        """
        phase, peak, number = max(
            [*self._phases(choice), ("outside the blocks", self.ends_bytes, -1)],
            key=lambda row: row[1],
        )
        named = sum(num_bytes for _, num_bytes in self.named_bytes)
        rows = [("resident", self.resident_bytes - named), *self.named_bytes]
        if number < 0:
            rows.append(("the model outside its blocks", peak - self.resident_bytes))
            return phase, tuple(rows)
        earlier = [o.kept_bytes for o in self.chosen(choice)[:number]]
        rows.append(("kept by earlier blocks", sum(earlier)))
        if "backward" in phase:
            grads = self.later_gradients[number + 1]
            rows.append(("gradients of later blocks", grads))
        block = self.blocks[number]
        outside = {
            "forward of": block.forward_bytes,
            "after the forward of": block.after_forward_bytes,
            "before the backward of": block.before_backward_bytes,
            "backward of": block.backward_bytes,
        }[phase]
        rows.append(("the model outside its blocks", outside))
        rows.append(("this block", peak - sum(n for _, n in rows)))
        held = [row for row in rows if row[1]]
        return f"{phase} {block.name}", tuple(held)

    def _phases(self, choice: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """(phase, bytes, block) of all blocks' phases."""
        kept = 0
        for number, option in enumerate(self.chosen(choice)):
            for phase, num_bytes in self.needs(number, option):
                yield phase, kept + num_bytes, number
            kept += option.kept_bytes
