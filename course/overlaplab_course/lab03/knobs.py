"""Exercise 3.7: what it costs when messages go through the host's memory.

Eight nodes of one GPU. A step copies its next batch from the host and sends each
layer's gradients over the network, beside the backward pass.
"""

from __future__ import annotations

from dataclasses import replace

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import KnobProgram, KnobTask, KnobTasks, Settings
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


def _timed(s: Settings) -> Timeline:
    program = _written_step(s["batch_mib"], 1024 * s["ktokens"])
    return by_label(resolve(program, _hardware(s["staged"], s["gbit_per_s"])))


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


turn = KnobProgram(KNOBS, _timed)
problem_with = turn.problem_with


def copy_ms(timeline: Timeline) -> float:
    """How long the batch's copy takes."""
    return sum(s.duration_ns for s in timeline.spans if s.kind == "memcpy") / 1e6


def measured(settings: Settings) -> dict[str, float]:
    """What staging costs: of the step in percent, of the copy as a factor."""
    direct = turn(**{**settings, "staged": False})
    staged = turn(**{**settings, "staged": True})
    return {
        "costs": 100 * (staged.step_ns / direct.step_ns - 1),
        "busy": direct.report().communication_ns / direct.step_ns,
        "longer": copy_ms(staged) / copy_ms(direct),
    }


SETTINGS = "every setting is one that the sliders have"
IS_DEAR = "'dear': staging makes the step 20 % longer or more"
IS_FREE = (
    "'free': the network is busy for half of the step, and staging costs under 1 %"
)
IS_COPY = "'copy': staging makes the copy 1.5 times as long, the step under 1 % longer"
TASKS = KnobTasks(
    turn,
    usable=SETTINGS,
    measure=measured,
    seen="staging costs {costs:.1f} % of the step, the network is busy {busy:.0%} of "
    "it, the copy takes {longer:.2f} times as long",
    listed=[name for name in KNOBS if name != "staged"],
    tasks=(
        KnobTask("dear", IS_DEAR, lambda n: n["costs"] >= 20),
        KnobTask("free", IS_FREE, lambda n: abs(n["costs"]) < 1 and n["busy"] >= 0.5),
        KnobTask("copy", IS_COPY, lambda n: n["longer"] >= 1.5 and abs(n["costs"]) < 1),
    ),
)


@exercise(
    "3.7",
    title="through the host, or past it",
    solution="found",
    verifies=TASKS.sentences,
    points=1,
    optional=True,
    timeout_s=60.0,
)
def grade_knobs(sheet: Sheet, found: object) -> None:
    """Resolve the learner's settings, staged and direct."""
    sheet.ran("your three settings, each with staging and without")
    TASKS.grade(sheet, found)
