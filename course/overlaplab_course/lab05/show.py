"""What lab 05 prints: outcomes, messages by rank, tables, stored measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading.fixtures import Fixture, oracle
from overlaplab.timeline import Timeline
from overlaplab.view.units import percentages
from overlaplab_course import stored
from overlaplab_course.lab05.given import MakeReducer, Model, Played, play
from overlaplab_course.lab05.setups import Setup


def layers_table(model: Model) -> str:
    """Each layer, its weight, its backward pass and its gradient's message."""
    rows = [
        (f"layer {i}", name, f"{ms:g}", f"{model.message_ms[name]:g}")
        for i, (name, ms) in enumerate(
            zip(model.layers, model.backward_ms, strict=True)
        )
    ]
    return stored.text_table(("", "weight", "backward (ms)", "message (ms)"), rows)


def windows_table(model: Model, windows: Mapping[str, Mapping[str, float]]) -> str:
    """Windows by weight, the last one used first; beside them each message, in ms."""
    rows = [
        (name, *(f"{ms.get(name, nan):g}" for ms in windows.values()), f"{message:g}")
        for name, message in reversed(model.message_ms.items())
    ]
    return stored.text_table(("in ms", *windows, "message"), rows)


def orders(seen: Played, step: int = 1) -> str:
    """Whose gradients each message carries, rank by rank, in the order of launch."""
    lines = []
    for rank in range(seen.ranks):
        sends = seen.evidence.sends_of(rank, step)
        carried = (
            " + ".join(name for name, _ in s.covers) or "no gradient" for s in sends
        )
        numbered = (f"{i}: {names}" for i, names in enumerate(carried))
        lines.append(f"rank {rank}  " + "   ".join(numbered))
    return "\n".join(lines)


def repair_report(seen: Played) -> str:
    """A run's findings, its messages, and its gradients beside right ones."""
    found, lines = seen.findings, [f"{len(seen.findings)} findings"]
    lines += [str(finding) for finding in found[:1]]
    lines += ["whose gradients each message of step 1 carries:", orders(seen)]
    right, _ = oracle(seen.fixture, steps=1, world_size=seen.ranks)
    name, grad = next((n, g) for n, g in right[0].items() if g is not None)
    mine = seen.trained.gradients[0][0][name]
    if mine is not None:
        ratio = (mine / grad).median()
        lines.append(f"{name} is {ratio:.2f} times the right mean (median, step 1)")
    return "\n".join(lines)


def must_be_exposed(model: Model) -> float:
    """The answer of exercise 5.1 for a model, in ms."""
    # Imported here: a notebook holds no solutions before a cell runs one.
    from overlaplab_course.lab05 import reference

    ours: float = reference.least_exposed(
        reference.windows(model.backward_ms, model.layers), model.message_ms
    )
    return ours


def outcome(make_reducer: MakeReducer, fixture: Fixture, ranks: int = 3) -> str:
    """What becomes of three steps: "right", "wrong" or "stuck"."""
    try:
        seen = play(make_reducer, fixture, ranks)
    except (DeadlockError, MismatchError):
        return "stuck"
    return "wrong" if seen.wrong() else "right"


def how_it_ended(make_reducer: MakeReducer, fixture: Fixture, ranks: int = 3) -> str:
    """The order of messages, or why the ranks do not meet."""
    try:
        return orders(play(make_reducer, fixture, ranks))
    except (DeadlockError, MismatchError) as error:
        return str(error)


def steps_table(setups: Sequence[Setup]) -> str:
    """Both ways on each machine: the step, and what bounds it."""
    rows = []
    for setup in setups:
        each, one = (setup.timeline(way) for way in ("each", "one"))
        ms = (f"{t.step_ns / 1e6:.1f}" for t in (each, one))
        rows.append((setup.name, *ms, bound_of(each), bound_of(one)))
    head = ("", "each (ms)", "one (ms)", "each waits for", "one waits for")
    return stored.text_table(head, rows)


def bound_of(timeline: Timeline) -> str:
    """The largest share of the critical path: "launch 98 %"."""
    shares_ns = timeline.critical_path().shares_ns
    named = dict(zip(shares_ns, percentages(shares_ns.values()), strict=True))
    largest = max(named, key=lambda share: shares_ns[share])
    return f"{largest} {named[largest]} %"


def _measured() -> Mapping[str, Any]:
    found = stored.read("05")
    assert found is not None
    return found


def machine() -> str:
    """The machine of the stored steps."""
    found = _measured()
    return f"{found['source']}\n{stored.machine(found)}"


def measured_ms(way: str, batch: int) -> float:
    """The median step of a way, in ms."""
    found = _measured()
    value: float = found["ms"][way][found["batches"].index(batch)][0]
    return value


def measured_table() -> str:
    """Median steps, and where one step in ten is shorter or longer."""
    found = _measured()
    head = ("ms per step", *(f"batch {batch}" for batch in found["batches"]))
    rows = [
        (way, *(f"{m:.1f} ({low:.0f} to {high:.0f})" for m, low, high in cells))
        for way, cells in found["ms"].items()
    ]
    return stored.text_table(head, rows)
