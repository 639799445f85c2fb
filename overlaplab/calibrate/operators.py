"""Every operator of a training step, timed where it stands: in a step, on a busy GPU.

A matmul alone in a loop runs at other clocks and finds other things in the cache than
one in a step; so small transformers take real steps, and a dispatch mode puts a mark
before and after each operator. `profile.py` joins the times with what the virtual
cluster records of the same step (`record_steps`), operator by operator.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from overlaplab import streams
from overlaplab.calibrate.clock import device_ns, on_cuda, sleep
from overlaplab.calibrate.plan import CalibrationPlan, ModelCase
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.operators import operator
from overlaplab.program import Op, Program

Row = dict[str, Any]
_BACKLOG_NS = 60_000_000
_FIRST = "embedding"  # the first operator of a step of our transformer


class TimedOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the begin and the end of every operator that launches a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = on_cuda()
        self.rows: list[tuple[str, bool, Any, Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; wrapping it would import the compiler (3 s)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        facts = operator(func)
        if not facts.records:
            return func(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1
        begin = self._mark()
        out = func(*args, **(kwargs or {}))
        self.rows.append((facts.name, backward, begin, self._mark()))
        return out

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = streams.Event(enable_timing=True)
        event.record()
        return event

    def times_ns(self) -> list[int]:
        """Of each operator, once the device has been synchronised."""
        if not self._cuda:
            return [end - begin for _, _, begin, end in self.rows]
        return [round(b.elapsed_time(e) * 1e6) for _, _, b, e in self.rows]


def build(case: ModelCase, dtype: str) -> tuple[Transformer, Tensor, Tensor]:
    """The model of `case` with random tokens and targets, on this rank's device."""
    torch.manual_seed(0)
    with torch.device(streams.device()):
        model = Transformer(case.config()).to(getattr(torch, dtype))
        text = torch.randint(case.vocab_size, (case.batch, case.tokens + 1))
    return model, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def measure_operators(plan: CalibrationPlan, case: ModelCase) -> Row:
    """One model: its operators in order, and its step with nothing between them.

    Returns:
        "case"; "operators": rows [name, in the backward pass, ns]; "step_ns": a step
        of many in a row, no marks; "mark_ns": what the marks of an operator add.
    """
    step = step_of(case, plan.dtype)
    for _ in range(3):
        step()
    streams.synchronize()
    once = device_ns(step, 2, repeats=2)
    # The CPU launches ahead where it can; where not, the card sleeps meanwhile.
    busy = on_cuda() and once > _BACKLOG_NS // 4
    hot = plan.hot_ns // once if busy else 2  # as many in a row heat the card
    step_ns = device_ns(step, hot, repeats=2)
    repeats = []
    for _ in range(plan.steps):
        gc.collect()
        if busy:
            for _ in range(hot // 2):
                step()  # the card stays as hot as it is in training
        else:
            sleep(_BACKLOG_NS)
        with TimedOperators() as timed:
            step()
        streams.synchronize()
        repeats.append(timed.times_ns())
    medians = [int(statistics.median(times)) for times in zip(*repeats, strict=True)]
    names = [(name, backward) for name, backward, _, _ in timed.rows]
    rows = [[*of, ns] for of, ns in zip(names, medians, strict=True)]
    del step, timed
    gc.collect()
    if on_cuda():
        torch.cuda.empty_cache()
    return {
        "case": asdict(case),
        "dtype": plan.dtype,
        "operators": rows,
        "step_ns": step_ns,
        "mark_ns": _mark_ns(plan),
    }


def step_of(case: ModelCase, dtype: str) -> Callable[[], None]:
    """Forward and backward of the model of `case`."""
    model, tokens, targets = build(case, dtype)

    def step() -> None:
        model.zero_grad()
        model(tokens, targets).backward()

    return step


def _mark_ns(plan: CalibrationPlan) -> int:
    """By how much an operator looks longer between two events."""
    if not on_cuda():
        return 0
    tensor = torch.ones(1, device=streams.device())
    plain = device_ns(lambda: tensor.add_(1), 100, repeats=plan.repeats)
    found = []
    for _ in range(plan.repeats):
        streams.synchronize()
        sleep(_BACKLOG_NS)
        with TimedOperators() as timed:
            for _ in range(100):
                tensor.add_(1)
        streams.synchronize()
        found.append(statistics.median(timed.times_ns()))
    return max(0, int(statistics.median(found)) - plain)


def record_steps(
    config: TransformerConfig,
    batch: int,
    tokens: int,
    dtype: str,
    *,
    num_steps: int,
    num_ranks: int = 2,
    make_reducer: Callable[[torch.nn.Module], Any] | None = None,
) -> Program:
    """Forward, backward and averaging, `num_steps` times, on one rank that stands for
    all, without values. With no `make_reducer`: forward and backward alone."""
    from overlaplab.cluster.virtual import run_virtual

    def steps() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device(streams.device()):
                model = Transformer(config)
                text = torch.zeros(batch, tokens, dtype=torch.int64)
        finally:
            torch.set_default_dtype(before)
        reducer = make_reducer(model) if make_reducer else None
        for _ in range(num_steps):
            model.zero_grad()
            model(text, text).backward()
            if reducer is not None:
                reducer.wait()

    _, program = run_virtual(
        steps,
        (),
        {},
        world_size=num_ranks,
        timeout_s=600,
        fake=True,
    )
    return program


def step_starts(ops: tuple[Op, ...]) -> list[int]:
    """The indices of the operators with which the steps begin."""
    return [op.index for op in ops if op.name == _FIRST and op.phase == "forward"]


def operators_of_step(case: ModelCase, dtype: str) -> tuple[Op, ...]:
    """The operators of one step of `case` without a reducer, in order."""
    program = record_steps(case.config(), case.batch, case.tokens, dtype, num_steps=1)
    (ops,) = program.ranks
    return ops[step_starts(ops)[0] :]
