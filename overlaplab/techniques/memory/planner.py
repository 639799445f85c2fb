"""`plan_checkpoints` and `frontier`: a model, its inputs and bytes in, a plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from overlaplab.hardware import Hardware, find_hardware
from overlaplab.techniques.memory import arguments
from overlaplab.techniques.memory.choices import Costs
from overlaplab.techniques.memory.costs import measure_chain
from overlaplab.techniques.memory.finding import find_blocks
from overlaplab.techniques.memory.gpu_meter import GpuMeter
from overlaplab.techniques.memory.messages import Communication
from overlaplab.techniques.memory.meters import HostMeter, Meter, PredictedMeter
from overlaplab.techniques.memory.plan import CheckpointPlan, Frontier
from overlaplab.techniques.memory.policies import (
    BUDGETS,
    EAGER,
    Policy,
    compiled,
    whole,
)
from overlaplab.techniques.memory.setting import Loss, Setting
from overlaplab.techniques.memory.whole import measure_wholes

MEASURED = "measured"
_HARDWARE = "h200-nvlink"  # where nobody says what the step runs on


def measure_costs(
    model: nn.Module,
    sample_inputs: Any,
    *,
    hardware: str | Hardware | None = None,
    granularity: str = "block",
    blocks: Sequence[nn.Module] | None = None,
    policies: Sequence[Policy] | None = None,
    compile: bool = False,
    compile_budgets: Sequence[float] = BUDGETS,
    compiled_parts: Sequence[str] = (),
    whole_budgets: Sequence[float] = (),
    backend: str = "inductor",
    loss: Loss | None = None,
    resident_bytes: int | Mapping[str, int] = 0,
) -> Costs:
    """What a model's blocks cost under each policy.

    Args:
        model: on any device; it stays as it is, and is not run as a whole but for
            `whole_budgets`.
        sample_inputs: of its forward: a tuple of arguments, a dict of keyword
            arguments, or one value.
        hardware: a profile or its name: operators are priced, and nothing is computed;
            "measured": one block of each kind is run on this machine, the whole model
            never; None: measured where the model is on a GPU, else "h200-nvlink".
        granularity: "block", the only one.
        blocks: what is planned; None: the children of the model's outermost lists.
        policies: the menu, the first of which leaves blocks as they are; None: keep,
            recompute, and three that keep attention and some matmuls.
        compile: the menu is of compiled blocks instead, with torch's own activation
            budget for each block.
        compile_budgets: these ones, 1.0 first.
        compiled_parts: names of methods of the model that are compiled as well, such as
            that of its head and loss.
        whole_budgets: choices beside the blocks': the whole model compiled under
            torch's activation budgets, such as (1.0,). Only for them the model is run
            as a whole, and the fastest plan of blocks beside it, see `whole`.
        backend: of `torch.compile`.
        loss: makes a scalar of what the model returns; None: the model returns it, or
            each of its outputs gets a gradient.
        resident_bytes: what else lives all the time, by name or in all: {"states of
            AdamW": 8 * n, "buckets": 2 * n}. Parameters, buffers, inputs and workspaces
            are counted.

    Raises:
        ValueError, TypeError: see `measure_chain`, `find_blocks` and `arguments`; an
            unknown granularity.
    """
    if granularity != "block":
        raise ValueError(f"granularity is {granularity!r}; expected 'block'")
    arguments.checked_model(model)
    arguments.refuse_compiled(model)
    resident = arguments.resident_rows(resident_bytes)
    parts = arguments.checked_parts(model, compiled_parts)
    loss = arguments.checked_loss(loss)
    meter = _meter(model, arguments.checked_hardware(hardware))
    if (compile or whole_budgets) and not meter.computes:
        raise ValueError(
            "compiled blocks and models can only be measured: "
            'hardware="measured", on the machine that compiles them'
        )
    if compile or whole_budgets or parts:
        arguments.checked_backend(backend)
    menu = EAGER if policies is None else policies
    if policies is None and compile:
        menu = compiled(arguments.checked_budgets(compile_budgets), backend)
    menu = arguments.checked_policies(menu)
    budgets = arguments.checked_budgets(whole_budgets, "whole_budgets")
    wholes = arguments.checked_policies(whole(budgets, backend)) if budgets else ()
    args: tuple[Any, ...] = (sample_inputs,)
    kwargs: Mapping[str, Any] = {}
    if isinstance(sample_inputs, Mapping):
        args, kwargs = (), sample_inputs
    elif isinstance(sample_inputs, tuple | list):
        args = tuple(sample_inputs)
    setting = Setting(menu, meter, loss, parts, backend, resident)
    chain = measure_chain(model, args, kwargs, find_blocks(model, blocks), setting)
    if not wholes:
        return Costs(chain, menu, parts, backend)
    chain, found = measure_wholes(model, args, kwargs, chain, wholes, setting)
    return Costs(chain, (*menu, *wholes), parts, backend, found)


def _meter(model: nn.Module, hardware: str | Hardware | None) -> Meter:
    tensors = [*model.parameters(), *model.buffers()]
    on_gpu = bool(tensors) and tensors[0].is_cuda
    if hardware is None:
        hardware = MEASURED if on_gpu else _HARDWARE
    if hardware == MEASURED and any(tensor.is_meta for tensor in tensors):
        raise ValueError(
            'hardware is "measured", and the model is on meta, where nothing runs; '
            "expected a profile, such as 'h200-nvlink'"
        )
    if hardware == MEASURED:
        return GpuMeter() if on_gpu else HostMeter()
    if isinstance(hardware, str):
        hardware = find_hardware(hardware)
    return PredictedMeter(hardware)


def plan_checkpoints(
    model: nn.Module,
    sample_inputs: Any,
    *,
    budget_bytes: int,
    hardware: str | Hardware | None = None,
    granularity: str = "block",
    costs: Costs | None = None,
    communication: Communication | None = None,
    **settings: Any,
) -> CheckpointPlan:
    """The fastest step whose peak of memory is within a budget.

        plan = ol.plan_checkpoints(model, batch, budget_bytes=2**30)
        print(plan)
        plan.apply(model)  # then train as before

    Each block of the model either keeps its activations or computes them again in the
    backward. The model must have its blocks in an `nn.ModuleList` or `nn.Sequential`,
    or name them by `blocks=`. `overlaplab.techniques.memory.measure_costs` says
    more.

    Args:
        model: on any device; it is not run as a whole, and stays as it is.
        sample_inputs: of its forward: one value, a tuple of arguments, or a dict.
        hardware: a profile or its name; "measured": this machine; None: measured where
            the model is on a GPU, else "h200-nvlink".
        granularity: "block", the only one.
        budget_bytes: the most that may live on the device at once in a step, with
            parameters, gradients and inputs. States of an optimizer and buffers of a
            reducer count only where `resident_bytes` names them.
        costs: of `measure_costs`, where they were taken before.
        communication: messages that travel during the backward: the step is then
            computing, recomputing and what of them is exposed. None: there are none.
        settings: others of `measure_costs`, such as blocks and resident_bytes.

    Returns:
        A plan: print it, or `plan.apply(model)`. A larger budget never gives a slower
        one.

    Raises:
        BudgetError: no choice fits; it says what would.
        ValueError: no blocks were found, or an argument is wrong.

    Sources: Chen et al., "Training deep nets with sublinear memory cost", 2016, for
    recomputation; Beaumont et al., 2019, for planning chains of unlike blocks.
    """
    budget_bytes = arguments.whole_bytes("budget_bytes", budget_bytes)
    if costs is not None and not isinstance(costs, Costs):
        raise TypeError(f"costs is {costs!r}; expected what measure_costs returns")
    if costs is None:
        costs = measure_costs(
            model,
            sample_inputs,
            hardware=hardware,
            granularity=granularity,
            **settings,
        )
    return costs.fastest(budget_bytes, communication)


def frontier(model: nn.Module, sample_inputs: Any, **settings: Any) -> Frontier:
    """The whole curve: plans by falling peak and rising step. It prints as a table.

        curve = ol.frontier(model, batch)
        print(curve)
        curve[-1].apply(model)  # the leanest; each is a plan

    Args:
        model, sample_inputs: see `plan_checkpoints`.
        settings: of `overlaplab.techniques.memory.measure_costs`, such as hardware and
            blocks.
    """
    return measure_costs(model, sample_inputs, **settings).frontier()
