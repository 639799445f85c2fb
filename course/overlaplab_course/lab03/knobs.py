"""Exercise 3.7: what it costs when messages go through the host's memory.

Eight nodes of one GPU. A step copies its next batch from the host and sends each
layer's gradients over the network, beside the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Hardware, Link, find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab.view import Knob
from overlaplab_course.lab03.play import by_label

MIB = 2**20
NUM_NODES, LAYERS, WIDTH = 8, 6, 4096

KNOBS = {
    "staged": Knob((False, True), True, "through the host's memory"),
    "gbit_per_s": Knob((25, 100, 200, 400), 200, "network (Gbit/s)"),
    "batch_mib": Knob((1, 16, 64, 256, 512), 64, "batch (MiB)"),
    "ktokens": Knob((2, 4, 8, 16, 32), 8, "tokens a GPU (thousands)"),
}

DEAR, FREE, COPY = "dear", "free", "copy"
SETTINGS = "every setting is one that the sliders have"
IS_DEAR = "'dear': staging makes the step 20 % longer or more"
IS_FREE = (
    "'free': the network is busy for half of the step, and staging costs under 1 %"
)
IS_COPY = "'copy': staging makes the copy 1.5 times as long, the step under 1 % longer"


def turn(
    staged: Any = KNOBS["staged"].default,
    gbit_per_s: Any = KNOBS["gbit_per_s"].default,
    batch_mib: Any = KNOBS["batch_mib"].default,
    ktokens: Any = KNOBS["ktokens"].default,
) -> Timeline:
    """The step with these knobs; one that is left out stands where it starts."""
    return by_label(
        resolve(
            _written_step(batch_mib, 1024 * ktokens),
            _hardware(bool(staged), gbit_per_s),
        )
    )


def _hardware(staged: bool, gbit_per_s: int) -> Hardware:
    base = find_hardware("h100-ib400")
    assert base.network is not None
    network = Link(
        latency_ns=base.network.latency_ns,
        bytes_per_s=gbit_per_s * 10**9 // 8,
        source="the knob",
    )
    return replace(
        base,
        gpus_per_node=1,
        network=network,
        network_staged=staged,
        launch_ns=0,
        backward_launch_ns=0,
        collective_launch_ns=0,
        compute_rate_permille=1000,
        wire_rate_permille=1000,
    )


def _written_step(batch_mib: int, tokens: int) -> Program:
    """The step, written down and not run: it takes a millisecond."""
    builder = ProgramBuilder(num_ranks=1, represents=NUM_NODES)
    builder.copy(0, "h2d", bytes=batch_mib * MIB, stream="loading", label="batch")
    square = WIDTH * WIDTH
    for layer in range(LAYERS, 0, -1):
        for part in ("weights", "inputs"):  # a matmul for the gradient of each
            builder.compute(
                0,
                f"gradient of {part}",
                flops=2 * tokens * square,
                dtype="bfloat16",
                label=f"back {layer}",
            )
        builder.collective(0, "all_reduce", bytes=2 * square, label=f"send {layer}")
    return builder.build()


def staging_costs_percent(settings: Mapping[str, Any]) -> float:
    """How much longer the step is through the host's memory, in percent."""
    direct = turn(**{**settings, "staged": False}).step_ns
    return 100 * (turn(**{**settings, "staged": True}).step_ns / direct - 1)


def copy_ms(timeline: Timeline) -> float:
    """How long the batch's copy takes."""
    return sum(s.duration_ns for s in timeline.spans if s.kind == "memcpy") / 1e6


def wire_share(timeline: Timeline) -> float:
    """The part of the step in which the network is busy."""
    return timeline.report().communication_ns / timeline.step_ns


@exercise(
    "3.7",
    title="through the host, or past it",
    solution="found",
    verifies=(SETTINGS, IS_DEAR, IS_FREE, IS_COPY),
    points=1,
    optional=True,
    timeout_s=60.0,
)
def grade_knobs(sheet: Sheet, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Resolve the learner's settings, staged and direct."""
    sheet.ran("your three settings, each with staging and without")
    problems = {n: p for n in (DEAR, FREE, COPY) if (p := problem_with(n, found))}
    sheet.expect(
        SETTINGS,
        not problems,
        seen="\n".join(problems.values()),
        expected=f"some of {[k for k in KNOBS if k != 'staged']}; the others stand "
        "where the sliders start",
    )
    for name, sentence in ((DEAR, IS_DEAR), (FREE, IS_FREE), (COPY, IS_COPY)):
        if name in problems:
            continue
        settings = dict(found[name])
        direct = turn(**{**settings, "staged": False})
        staged = turn(**{**settings, "staged": True})
        costs = staging_costs_percent(settings)
        longer = copy_ms(staged) / copy_ms(direct)
        busy = wire_share(direct)
        sheet.expect(
            sentence,
            {
                IS_DEAR: costs >= 20,
                IS_FREE: abs(costs) < 1 and busy >= 0.5,
                IS_COPY: longer >= 1.5 and abs(costs) < 1,
            }[sentence],
            seen=f"{settings}: staging costs {costs:.1f} % of the step, the network is "
            f"busy {busy:.0%} of it, the copy takes {longer:.2f} times as long",
            expected=sentence,
        )


def problem_with(name: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Why `found[name]` is no setting of the knobs, or ""."""
    settings = found.get(name) if isinstance(found, Mapping) else None
    if not settings:
        return f"you have not filled in {name!r}"
    if not isinstance(settings, Mapping):
        return f"{name!r} is {settings!r}, not a dict"
    for knob, value in settings.items():
        if knob not in KNOBS:
            return f"{name!r}: there is no knob {knob!r}"
        if value not in KNOBS[knob].values:
            return f"{name!r}: {knob} is {value!r}, not one of {KNOBS[knob].values}"
    return ""
