"""Backward passes written by hand: gradients, hooks and copies on the virtual clock.

On `chalk` a kernel lasts as long as it says, two ranks all-reduce n bytes in
1000 + n/10 ns, and launches are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from overlaplab.grading.evidence import Evidence
from overlaplab.grading.reading import collect_evidence
from overlaplab.program import (
    Access,
    Program,
    ProgramBuilder,
    TensorName,
    resolve,
)

GRADIENT_BYTES = 10_000  # 2 us on chalk's wire, latency included
LAYER_NS = 5_000


class Script:
    """A `ProgramBuilder` with names, and one storage for each gradient."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.builder = ProgramBuilder(num_ranks=num_ranks)
        self.num_ranks = num_ranks
        self._names: list[TensorName] = []
        self._next = [0] * num_ranks
        self._steps: list[dict[str, object]] = [{} for _ in range(num_ranks)]
        for rank in range(num_ranks):
            self.builder.storage(rank, bytes=4)

    def compute(self, rank: int, name: str, **fields: object) -> int:
        fields["attributes"] = self._steps[rank]
        self._next[rank] = self.builder.compute(rank, name, **fields) + 1
        return self._next[rank] - 1

    def send(self, rank: int, *what: Access, into: Sequence[Access] = (), **more):
        """An all-reduce of `what`, in place unless `into` is given."""
        index = self.builder.collective(
            rank,
            more.pop("operation", "all_reduce"),
            bytes=sum(access.run_bytes for access in what),
            reads=what,
            writes=tuple(into) or what,
            attributes=self._steps[rank],
            **more,
        )
        self._next[rank] = index + 1
        return index

    def name(self, rank: int, access: Access, name: str) -> None:
        self._names.append(TensorName(rank, access, name, self._next[rank]))

    def step(self, rank: int, number: int) -> None:
        self._steps[rank] = {"step": number}

    def gradient(self, rank: int, name: str, *, ns: int = LAYER_NS, **more) -> Access:
        """The kernel that computes it, and the harness's hook that names it."""
        access = self.builder.storage(rank, bytes=more.pop("bytes", GRADIENT_BYTES))
        self.compute(rank, "mm", ns=ns, writes=(access,), **more)
        self.name(rank, access, f"grad {name}")
        return access

    def program(self) -> Program:
        return replace(self.builder.build(), names=tuple(self._names))

    def evidence(self, hardware: str = "chalk") -> Evidence:
        program = self.program()
        return collect_evidence(program, resolve(program, hardware))


def on_every_rank(
    write: Callable[[Script, int], None], *, num_ranks: int = 2
) -> Evidence:
    """The evidence of a script in which all ranks do the same, in one step."""
    script = Script(num_ranks)
    for rank in range(num_ranks):
        script.step(rank, 1)
        write(script, rank)
    return script.evidence()


def part(access: Access, first: int, size: int) -> Access:
    """`size` bytes of `access`, from byte `first` of it."""
    return Access(access.storage, access.offset_bytes + first, size)
