"""`run`: one program, on the cluster of your choice.

Checks its arguments before anything starts, then hands over to the virtual cluster or
to processes. Knows what both give back, and neither how.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overlaplab.errors import check_count, plural
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import Finding, Program
from overlaplab.timeline import Timeline

CLUSTERS = ("virtual", "gloo", "nccl")
# More processes or threads than this on one machine are a slip of the keyboard.
_MAX_PROCESSES = 64
_LONGEST_S = 1_000_000  # eleven days: the system takes no deadline without end
_MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """What a run leaves.

    Args:
        values: what each rank's function returned, by rank; one value where one rank
            stands for all (`fake=True`). Tensors of GPU processes come back on the
            CPU.
        timeline: what happened, when: resolved for the hardware profile on `virtual`,
            measured on `gloo` and `nccl`.
        program: the record, on `virtual`; None on processes.
        warnings: what the run should not have done: hazards, works that nobody waited
            for, collectives that were never matched. Processes see only the second.
    """

    values: tuple[Any, ...]
    timeline: Timeline
    program: Program | None = None
    warnings: tuple[Finding, ...] = ()

    @property
    def cluster(self) -> str:
        """ "virtual", "gloo" or "nccl"."""
        return self.timeline.origin

    def __repr__(self) -> str:
        report = self.timeline.report()
        num_ranks = self.timeline.num_ranks * self.timeline.represents
        num_steps = len(self.timeline.steps)
        what = "step" if num_steps <= 1 else f"{num_steps} steps"
        parts = [
            self.cluster + (f" ({name})" if (name := self.timeline.hardware) else ""),
            plural(num_ranks, "rank"),
            f"{what} {report.step_ns / 1e6:.3f} ms",
            f"exposed {report.exposed_ns / 1e6:.3f} ms of communication",
            f"{plural(len(self.warnings), 'finding')} in .warnings"
            if self.warnings
            else "no findings",
        ]
        return f"Run({', '.join(parts)})"


def run(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    cluster: str = "virtual",
    hardware: str | Hardware = "h100-nvlink",
    timeout_s: float = 60,
    fake: int = False,
    check: bool = True,
    **kwargs: Any,
) -> Run:
    """Call `fn(*args, **kwargs)` once on every rank of a cluster.

    Each rank gets its own copy of the function's closure and of the arguments, the
    same random state, and an initialised torch.distributed. The main function of a
    script for `torchrun` runs unchanged: RANK, LOCAL_RANK, WORLD_SIZE and their like
    are set in each rank, and its `init_process_group` is accepted if it asks for the
    same world. Under `torchrun` every process calls `run`, and each is one rank of
    `cluster="gloo"` or `"nccl"`.

    A run counts as one step, set-up and all; a program of several runs each `with
    ol.annotate("step"):`, and reports tell them apart.

    On the virtual cluster tensors lie in the GPU's memory unless the program says
    otherwise: `device="cpu"`, `.cpu()`, `pin_memory`, or a `DataLoader` that yields
    them. Threads that `fn` starts are its rank's, and one of all runs at a time. Escape
    characters that a rank prints are shown as text, on every cluster.

    Args:
        fn: may be defined in a notebook cell.
        args, kwargs: its arguments; tensors that share memory share it in the copies.
        world_size: number of ranks.
        cluster: "virtual" (ranks in this process, on a virtual clock), "gloo" (CPU
            processes of this machine) or "nccl" (a process a GPU).
        hardware: name of a profile, or a `Hardware`: times the virtual cluster.
        timeout_s: a guard. On processes it ends what hangs and says which rank was
            where; it counts from when all ranks are ready. On the virtual cluster it
            counts CPU time, and ten times as much on the wall for code that sleeps.
        fake: virtual only: compute shapes instead of values, on rank 0, which stands
            for all, over groups and meshes too. What needs a value (`item`, C++ DDP)
            and messages between ranks with roles of their own are refused; what else
            depends on `get_rank()` is done as rank 0 does it. Where ranks have roles, a
            number: `fake=4` records the first four ranks, and rank r stands for r + 4,
            r + 8 and so on; as the stages of a pipeline do whose ranks are next to one
            another.
        check: virtual only: look for hazards, works that nobody waited for and
            collectives that were never matched. False leaves `Run.warnings` empty and
            saves the time; `find_findings(run.program)` looks later.

    Returns:
        See `Run`.

    Raises:
        ValueError, TypeError: an argument is wrong, or cannot be copied to the ranks.
        RuntimeError: there cannot be a thread for each rank, or a run is in progress.
        RankError: a rank raised.
        DeadlockError, MismatchError: the ranks' collectives do not fit together.
        RunTimeoutError: the run took longer than `timeout_s`.

    Example:
        >>> import torch.distributed as dist
        >>> run(lambda: dist.get_rank(), world_size=3).values
        (0, 1, 2)
    """
    _check(fn, world_size, cluster, timeout_s, fake)
    machine = find_hardware(hardware)
    if cluster == "virtual":
        from overlaplab.cluster.virtual import run_virtual
        from overlaplab.program import find_findings, resolve

        values, program = run_virtual(
            fn, args, kwargs, world_size=world_size, timeout_s=timeout_s, fake=fake
        )
        timeline = resolve(program, machine)
        findings = find_findings(program, timeline) if check else ()
        return Run(values, timeline, program, findings)
    if _started_by_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if world_size != started:
            raise ValueError(
                f"world_size={world_size}, but this process is one of {started} that "
                f"torchrun started: pass world_size={started}"
            )
        from overlaplab.cluster.pool.torchrun import run_in_world

        outcome = run_in_world(fn, args, kwargs, cluster, timeout_s)
    else:
        from overlaplab.cluster.pool.pool import the_pool

        seconds = min(timeout_s, _LONGEST_S)
        outcome = the_pool().run(fn, args, kwargs, world_size, cluster, seconds)
    return Run(outcome.values, outcome.timeline, None, outcome.warnings)


def _started_by_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _check(
    fn: object, world_size: object, cluster: object, timeout_s: object, fake: object
) -> None:
    if not callable(fn):
        raise TypeError(
            f"the first argument of run is called on every rank; expected a function, "
            f"got {fn!r} ({type(fn).__name__})"
        )
    world_size = check_count("world_size", world_size, "ranks")
    if cluster not in CLUSTERS:
        raise ValueError(
            f"unknown cluster {cluster!r}; known are {', '.join(map(repr, CLUSTERS))}"
        )
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(
            f"timeout_s is a number of seconds; expected an int or a float, got "
            f"{timeout_s!r} ({type(timeout_s).__name__})"
        )
    if not timeout_s > 0:
        raise ValueError(
            f"timeout_s is a number of seconds; expected more than 0, got {timeout_s}"
        )
    if os.environ.get("OVERLAPLAB_RANK"):
        raise ValueError(
            "run was called inside a rank of another run: a rank cannot have ranks of "
            "its own; call torch.distributed directly"
        )
    if cluster != "virtual":
        _check_processes(world_size, str(cluster), fake)
    elif isinstance(fake, int) and (fake < 0 or (fake and world_size % fake)):
        raise ValueError(
            f"fake={fake} lets the first {fake} ranks stand for all, as many ranks for "
            f"each, but world_size={world_size}; pass True or a divisor of it"
        )
    elif (int(fake) or world_size) > _MAX_THREADS:  # type: ignore[call-overload]
        raise ValueError(
            f"world_size={world_size} would start as many threads, each with a copy of "
            f"what it is given; at most {_MAX_THREADS}. With fake=True one rank stands "
            "for all, and there may be any number"
        )


def _check_processes(world_size: int, cluster: str, fake: object) -> None:
    if fake:
        raise ValueError(
            f"fake=True computes no values, so cluster={cluster!r} has nothing to "
            "send: use cluster='virtual'"
        )
    if _started_by_torchrun():
        return
    if world_size > _MAX_PROCESSES:
        raise ValueError(
            f"world_size={world_size} would start as many processes; at most "
            f"{_MAX_PROCESSES} on one machine: use cluster='virtual'"
        )
    if cluster == "nccl":
        import torch

        available = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if available < world_size:
            raise ValueError(
                f"nccl needs {plural(world_size, 'CUDA device')}, this machine has "
                f"{available}: use cluster='virtual' or 'gloo'"
            )
