"""Exercise 4.9: in how many chunks? One is synchronous. Graded by its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import regret, regret_law
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import Program, ProgramBuilder

CHUNKS = (1, 2, 4, 8, 16)
AT_MOST = 0.15
USABLE = "each answer is one of 1, 2, 4, 8, 16"
REGRET = "on each case, at most 15 % of what there was to gain is lost"


@dataclass(frozen=True, slots=True)
class Case:
    """One layer whose output is summed over the ranks, in us.

    Args:
        name: what it is like.
        compute_us: its matmul in one piece.
        overhead_us: what each chunk adds to that.
        latency_us: alpha, of each message.
        wire_us: the bytes of the whole output on the wire.
    """

    name: str
    compute_us: float
    overhead_us: float
    latency_us: float
    wire_us: float

    def step_us(self, chunks: int) -> float:
        """From the start of the matmul to the last sum.

        Each chunk's message travels beside the next chunk's matmul; the slower of the
        two sets the pace. A test holds this to the resolver.
        """
        compute = self.compute_us / chunks + self.overhead_us
        message = self.latency_us + self.wire_us / chunks
        return compute + (chunks - 1) * max(compute, message) + message

    @property
    def best(self) -> int:
        return min(CHUNKS, key=self.step_us)

    def regret(self, chunks: int) -> float:
        steps = [self.step_us(n) for n in CHUNKS]
        scaled = [round(1000 * us) for us in (self.step_us(chunks), *steps)]
        return regret(scaled[0], min(scaled[1:]), max(scaled[1:]))

    def program(self, chunks: int) -> Program:
        """The same as a program; bytes are ns on the wire of `hardware()`."""
        builder = ProgramBuilder(num_ranks=1, represents=2)
        works = []
        for _ in range(chunks):
            compute_ns = 1000 * (self.compute_us / chunks + self.overhead_us)
            builder.compute(0, "matmul", ns=round(compute_ns))
            num_bytes = round(1000 * self.wire_us / chunks)
            works.append(builder.collective(0, "all_reduce", bytes=num_bytes))
        for work in works:
            builder.wait(0, work)
        builder.compute(0, "next layer", ns=0)
        return builder.build()

    def hardware(self) -> Hardware:
        """`chalk` with one byte a ns and this latency."""
        chalk = find_hardware("chalk")
        link = replace(
            chalk.link, latency_ns=round(1000 * self.latency_us), bytes_per_s=10**9
        )
        return replace(chalk, link=link)


CASES = (
    Case("a wide layer, NVLink", 700, 5, 44, 130),
    Case("one token, NVLink", 20, 5, 44, 2),
    Case("a wide layer, Ethernet", 2000, 5, 100, 4000),
    Case("long sequences, InfiniBand", 20_000, 5, 100, 18_000),
    Case("compute equals wire, dear launches", 300, 20, 20, 300),
    Case("far away", 500, 5, 300, 200),
    Case("very dear launches", 400, 100, 10, 50),
    Case("cheap everything", 1000, 2, 5, 1000),
    Case("almost only wire", 100, 5, 50, 3000),
    Case("almost only compute", 3000, 5, 50, 100),
)


@exercise(
    "4.9",
    title="async or sync?",
    solution="choose_chunks",
    verifies=(USABLE, REGRET),
    points=2,
    optional=True,
    timeout_s=20.0,
)
def grade_chunks(sheet: Sheet, choose_chunks: Callable[..., Any]) -> None:
    """Ask on each case and compare with the best of five answers."""
    sheet.ran(f"choose_chunks on {len(CASES)} layers")
    lost = {}
    for case in CASES:
        answer = choose_chunks(
            case.compute_us, case.overhead_us, case.latency_us, case.wire_us
        )
        sheet.expect(
            USABLE,
            answer in CHUNKS and not isinstance(answer, bool),
            seen=f"{case.name}: {answer!r}",
            expected=f"one of {CHUNKS}",
        )
        sheet.stop_if_wrong()
        told = (
            f"{case.name}: {answer} takes {case.step_us(answer):.0f} us, {case.best} "
            f"takes {case.step_us(case.best):.0f}"
        )
        lost[told] = case.regret(answer)
    sheet.verify(REGRET, regret_law(lost, at_most=AT_MOST))
