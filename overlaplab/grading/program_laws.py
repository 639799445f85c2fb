"""The laws that every program of a learner's is held to, whatever its exercise asks.

An exercise says which of its sentences carries each law (`laws` in its exercises.toml),
or why it leaves one out (`left_out`); a test walks all exercises. Its grader calls
`hold` for every run of the learner's code, not for the first alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.violation import Violation, broken
from overlaplab.hardware import Hardware
from overlaplab.program import Program, resolve
from overlaplab.program.access import num_bytes as num_bytes_of

_FINDINGS = {"unwaited": ("unwaited",), "hazard": ("hazard", "unmatched")}
# Where launches cost time, a stream or a copy more is no fault.
SLACK = 1.10
_NO_HINTS: Mapping[str, str] = MappingProxyType({})


def hold(
    sheet: Sheet,
    run: Any,
    *,
    wrong: Sequence[Violation] = (),
    once: Sequence[Violation] | None = None,
    what: str = "the result",
    values: str = "",
    cpu: bool = True,
    but: Iterable[str] = (),
    hints: Mapping[str, str] = _NO_HINTS,
    told: Callable[[list[Violation]], Sequence[Violation]] = list,
) -> bool:
    """Hold one run to the laws of the sheet's exercise; whether all hold.

    Beside a hazard or an unwaited message results are wrong or not judged: right by
    luck says nothing.

    Args:
        run: `ol.Run` of the virtual cluster.
        wrong: the results that are not right.
        once: what was run or sent more or less than once.
        what: the results are, for a message.
        values: the sentence of the results of this run, if not that of "recorded".
        cpu: whether the CPU has to go on; False where the task needs a value on it.
        but: labels of operators in which the harness makes the CPU wait.
        hints: by law, in the place of its own.
        told: findings as the lab tells them, from their violations.

    Raises:
        LookupError: the exercise has the law "once", and nothing was counted.
    """
    found: dict[str, Sequence[Violation]] = {
        law: told(laws.no_findings_law(run.warnings, kinds=kinds))
        for law, kinds in _FINDINGS.items()
    }
    is_safe = not any(found.values())
    if once is None and "once" in sheet.laws:
        raise LookupError(f"nobody counted for the law 'once' of {sheet.exercise}")
    found["recorded"] = wrong or laws.origin_law(run.program, what=what)
    found["once"] = once or ()
    if cpu:
        found["cpu"] = cpu_law(run.program, but=but)
    holds = True
    for law, violations in found.items():
        sentence = sheet.laws.get(law, "")
        if law == "recorded":
            sentence = values or sentence
            if not is_safe and not violations:
                continue
        if sentence:
            holds &= sheet.verify(sentence, violations, hint=hints.get(law, ""))
    return holds


def order_law(
    what: str, play: Callable[[], Any], wrong: Callable[[Any], Sequence[Violation]]
) -> list[Violation]:
    """No order of messages comes from a set, an `id` or a `hash`.

    Ask last: what is wrong on ranks that agree is another fault.

    Args:
        what: is run, for the message.
        play: runs what `orders.disagree` makes of the learner's solution on each rank.
        wrong: what is wrong with that run.
    """
    try:
        found = wrong(play())
    except (DeadlockError, MismatchError) as error:
        was = str(error)
    except Exception:  # the twin's own: it is not what was handed in
        return []
    else:
        if not found:
            return []
        was = found[0].message
    return [broken("order set", what=what, was=was)]


def cpu_law(program: Program, *, but: Iterable[str] = ()) -> list[Violation]:
    """On no rank does the CPU wait for its device: no `synchronize()`, no `item()`.

    What a fixture's own net reads is not the learner's: no line of theirs is there.

    Args:
        program: the record.
        but: labels of operators in which it may: the harness's own.
    """
    allowed = set(but)
    waits = (op for ops in program.ranks for op in ops if op.kind == "host_wait")
    return [
        broken(
            "cpu",
            rank=op.rank,
            name=op.name,
            where=f" [{op.source}]" if op.source else "",
        )
        for op in waits
        if op.source and op.label not in allowed
    ]


def read_law(program: Program, num_bytes: int, *, rank: int = 0) -> list[Violation]:
    """As many bytes came to the CPU, where the record sees it, as were returned.

    Who reads a tensor's memory past torch (dlpack, modes switched off) waits for
    nothing here, and on a GPU would find what is there by chance.

    Args:
        program: the record.
        num_bytes: of the numbers that the learner's code returned.
        rank: whose.
    """
    came = ("host_wait", "memcpy", "host")
    reads = [a for op in program.ranks[rank] if op.kind in came for a in op.reads]
    read = sum(num_bytes_of(access) for access in reads)
    return [] if read >= num_bytes else [broken("read", read=read, wanted=num_bytes)]


def tasks_law(program: Program, reference: Program) -> list[Violation]:
    """Every task (a label) launches as many operators as in the reference's run.

    Args:
        program: the record of the learner's run.
        reference: of the course's, on the same fixture.
    """
    found = []
    for rank, ops in enumerate(program.ranks):
        right = Counter(op.label for op in reference.ranks[rank] if op.label)
        seen = Counter(op.label for op in ops)
        for task, number in right.items():
            if seen[task] != number:
                times = f"{seen[task] / number:g} times" if seen[task] else "not"
                found.append(broken("once task", rank=rank, task=task, times=times))
    return found


def slow_law(
    clock: Hardware, program: Program, best: Program, *, factor: float = SLACK
) -> list[Violation]:
    """On a second clock, too, the step is as short as the reference's.

    Args:
        clock: see `slower`.
        program: the record of the learner's run.
        best: of the course's, on the same fixture.
        factor: as in `laws.step_law`.
    """
    took_ns, best_ns = (resolve(one, clock).step_ns for one in (program, best))
    slow = laws.step_law(took_ns, best_ns, factor=factor)
    return on_clock(clock, slow)


def on_clock(clock: Hardware, found: Iterable[Violation]) -> list[Violation]:
    """What was found on a second clock, which is named."""
    return [replace(v, message=f"{clock.name}: {v.message}") for v in found]


def slower(hardware: Hardware, launch_ns: int, wire: int = 3) -> Hardware:
    """A second clock: launches cost `launch_ns`, messages take `wire` times as long.

    What costs nothing on the first clock (a launch more, a wait for what has ended
    already) may cost time on this.
    """
    link = hardware.link
    return replace(
        hardware,
        name=f"{hardware.name}, slow launches and link",
        launch_ns=launch_ns,
        backward_launch_ns=None,
        collective_launch_ns=launch_ns,
        link=replace(
            link,
            latency_ns=wire * link.latency_ns,
            bytes_per_s=link.bytes_per_s // wire,
        ),
    )
