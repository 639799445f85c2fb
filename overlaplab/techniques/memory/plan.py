"""The plan of a step's memory: which block keeps what. Data; `apply` carries it out."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from overlaplab.techniques.memory import messages
from overlaplab.techniques.memory.arguments import checked_model, checked_parts
from overlaplab.techniques.memory.chain import Chain, Whole
from overlaplab.techniques.memory.messages import Communication
from overlaplab.techniques.memory.policies import KEEP, Policy, compile_part, runner

_MIB = 2**20
_MOST_ROWS = 24  # of a printed curve


@dataclass(frozen=True, repr=False)
class CheckpointPlan:
    """One policy for each block, or one for the whole model.

    Args:
        chain: the step as it was measured.
        choice: for each block the place of its option.
        policies: the menu by name.
        budget_bytes: that it was made for; None: for none.
        compiled_parts: methods of the model that are compiled with it.
        backend: that compiles them.
        communication: messages in the backward; None: none.
        whole: what is done instead of a choice, which is empty then; None: nothing is.
    """

    chain: Chain
    choice: tuple[int, ...]
    policies: Mapping[str, Policy]
    budget_bytes: int | None = None
    compiled_parts: tuple[str, ...] = ()
    backend: str = "inductor"
    communication: Communication | None = None
    whole: Whole | None = None

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once in a step, as predicted."""
        if self.whole is not None:
            return self.whole.peak_bytes
        return self.chain.peak_bytes(self.choice)

    @property
    def step_ns(self) -> int:
        """A forward and backward, exposed messages included, as predicted.

        It is the GPU's time. A step whose CPU is slower than its GPU (small batches,
        policies that look at each operator) takes longer: up to its `launch_ns`.
        """
        if self.whole is not None:
            return self.whole.step_ns + self.exposed_ns
        return self.chain.step_ns(self.choice) + self.exposed_ns

    @property
    def launch_ns(self) -> int:
        """What the CPU takes to launch a step, as predicted.

        Where it was measured, it is the most: blocks alone have more to begin and end.
        """
        if self.whole is not None:
            return self.whole.launch_ns
        return self.chain.launch_ns(self.choice)

    @property
    def exposed_ns(self) -> int:
        """Of messages in the backward, what nothing is computed beside."""
        if self.communication is None:
            return 0
        if self.whole is not None:  # its backward gives all gradients at its end
            return sum(self.communication.block_ns(self.chain))
        return messages.step_ns(self.chain, self.choice, self.communication)[1]

    @property
    def names(self) -> tuple[str, ...]:
        """The policy of each block, or of the whole."""
        if self.whole is not None:
            return (self.whole.policy,)
        return tuple(option.policy for option in self.chain.chosen(self.choice))

    @property
    def holders(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """When the peak is and what holds it, see `Chain.holders`."""
        if self.whole is None:
            return self.chain.holders(self.choice)
        resident = self.chain.resident_bytes
        rest = self.peak_bytes - resident
        rows = (("resident", resident), ("activations, gradients, temporaries", rest))
        return "step of the whole model, which was measured as one", rows

    def __repr__(self) -> str:
        mib, ms = self.peak_bytes / _MIB, self.step_ns / 1e6
        return f"CheckpointPlan({mib:,.1f} MiB, {ms:.3f} ms: {self.summary})"

    @property
    def summary(self) -> str:
        """How many blocks do what."""
        if self.whole is not None:
            return self.whole.policy
        return "; ".join(f"{n} x {name}" for name, n in Counter(self.names).items())

    def __str__(self) -> str:
        phase, holders = self.holders
        budget = ""
        if self.budget_bytes is not None:
            budget = f" of {self.budget_bytes / _MIB:,.1f}"
        exposed = ""
        if self.communication is not None:
            exposed = f", {self.exposed_ns / 1e6:.3f} of them exposed communication"
        lines = [
            f"predicted: peak {self.peak_bytes / _MIB:,.1f}{budget} MiB, "
            f"step {self.step_ns / 1e6:.3f} ms{exposed}",
            f"the peak is {'' if phase.startswith('before') else 'in the '}{phase}:",
        ]
        if self.launch_ns > self.step_ns:
            lines[1:1] = [
                f"launches may bind: they take the CPU up to "
                f"{self.launch_ns / 1e6:.3f} ms; CUDA graphs, compiled blocks or a "
                "larger batch hide them"
            ]
        lines += [f"  {n / _MIB:>12,.1f} MiB  {what}" for what, n in holders]
        if self.whole is not None:
            return "\n".join([*lines, f"all blocks: {self.whole.policy}"])
        rows = zip(self.chain.blocks, self.chain.chosen(self.choice), strict=True)
        for (policy, kept, ns), group in groupby(
            rows, key=lambda r: (r[1].policy, r[1].kept_bytes, r[1].step_ns)
        ):
            names = [block.name for block, _ in group]
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(
                f"{where}: {policy}, each {kept / _MIB:,.1f} MiB and {ns / 1e6:.3f} ms"
            )
        return "\n".join([*lines, *self.chain.notes])

    def apply(self, model: nn.Module) -> AppliedPlan:
        """Let the blocks of `model` run as planned, until `undo`.

        Puts a function in front of the forward of each block that does not just keep
        everything; modules, parameters, hooks and names stay as they are.

        Args:
            model: the one that was planned, or one with blocks of the same names.

        Returns:
            What takes it back; as a context manager it does so at the end.

        Raises:
            TypeError: `model` is no module.
            ValueError: a block or a compiled part is not there, or has a plan or a
                forward of its own already. Nothing was changed then.
        """
        checked_model(model)
        parts = checked_parts(
            model, self.compiled_parts if self.whole is None else ("forward",)
        )
        modules = self._blocks_of(model)
        if self.whole is not None:
            modules, parts = [model], ()
        changes: list[tuple[nn.Module, str]] = []
        applied = AppliedPlan(changes)
        try:
            for module, name in zip(modules, self.names, strict=True):
                policy = self.policies[name]
                if policy != KEEP:
                    module.__dict__["forward"] = runner(policy, module)
                    changes.append((module, "forward"))
            for part in parts:
                compile_part(model, part, self.backend)
                changes.append((model, part))
        except BaseException:  # such as an unknown compiler
            applied.undo()
            raise
        return applied

    def _blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Those that were planned, if nothing stands in front of their forwards."""
        modules, found = dict(model.named_modules()), []
        for block in self.chain.blocks:
            module = modules.get(block.name)
            if module is None:
                raise ValueError(
                    f"{type(model).__name__} has no module {block.name}; the plan is "
                    "for another model"
                )
            if "forward" in vars(module):
                raise ValueError(
                    f"{block.name} has a forward of its own already: a plan that was "
                    "applied and not undone, or a patch. Undo that first"
                )
            found.append(module)
        return found


class Frontier(tuple[CheckpointPlan, ...]):
    """Plans by falling peak and rising step; prints as a table of at most 24."""

    __slots__ = ()

    def __str__(self) -> str:
        count = min(len(self), _MOST_ROWS)
        places = [i * (len(self) - 1) // max(1, count - 1) for i in range(count)]
        lines = [f"{'peak (MiB)':>12}  {'step (ms)':>10}  blocks"]
        for plan in map(self.__getitem__, places):
            mib, ms = plan.peak_bytes / _MIB, plan.step_ns / 1e6
            lines.append(f"{mib:>12,.1f}  {ms:>10.3f}  {plan.summary}")
        if count < len(self):
            lines.append(f"{count} of {len(self)} plans")
        return "\n".join(lines)

    __repr__ = __str__


class AppliedPlan:
    """A plan at work on a model. `undo()` leaves the model as it was before."""

    def __init__(self, changes: list[tuple[nn.Module, str]]) -> None:
        self._changes = changes

    def undo(self) -> None:
        """Take the plan off the model. A second time it does nothing."""
        while self._changes:
            module, name = self._changes.pop()
            module.__dict__.pop(name, None)

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.undo()
