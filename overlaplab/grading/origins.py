"""What a step was given and what it returned, noted in the record of its run.

`hold(step, ...)` runs on a rank of the virtual cluster in the place of `step(...)`;
`release(run)` gives the run back with the values as they were. `origin_law` then knows
where to begin and what to ask for. Records no operator and costs the step no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from overlaplab.grading.law_origin import GIVEN, RETURNED
from overlaplab.program import TensorName

if TYPE_CHECKING:
    from overlaplab.cluster.run import Run


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank's step returned, and what was noted of it.

    Args:
        value: what the step returned.
        notes: of `given` and `returned`.
    """

    value: Any
    notes: tuple[TensorName, ...]


def hold(
    step: Callable[..., Any],
    *args: Any,
    results: Callable[[Any], Any] = lambda value: value,
) -> Held:
    """`step(*args)` on this rank, with both ends noted.

    Args:
        step: the learner's.
        args: tensors, modules, and whatever Python makes of them.
        results: what is graded, from what `step` returned.
    """
    before = given(args)
    value = results(step(*args))
    return Held(value, (*before, *returned(value)))


def given(values: Any) -> tuple[TensorName, ...]:
    """Notes: the tensors in `values` are there before the learner's code runs."""
    return _noted(GIVEN, values)


def returned(values: Any) -> tuple[TensorName, ...]:
    """Notes: what the tensors in `values` hold now is graded."""
    return _noted(RETURNED, values)


def release(run: Run) -> Run:
    """The run of functions that return `Held`, with what they held.

    The notes join the program's names. Findings are made already: no message of theirs
    speaks of them.
    """
    assert run.program is not None, "the virtual cluster records"
    notes = [note for held in run.values for note in held.notes]
    program = replace(run.program, names=(*run.program.names, *notes))
    return replace(run, values=tuple(v.value for v in run.values), program=program)


def _noted(name: str, values: Any) -> tuple[TensorName, ...]:
    from overlaplab.cluster.virtual.world import current_recorder

    recorder = current_recorder()
    if recorder is None:
        return ()
    found, _ = recorder.storages.accesses(_tensors(values), recorder.current().name)
    since = len(recorder.ops)
    return tuple(TensorName(recorder.rank, access, name, since) for access in found)


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.nn.Module):
            found += [*leaf.parameters(), *leaf.buffers()]
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found
