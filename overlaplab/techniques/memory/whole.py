"""The whole model compiled at once: the one choice that is no sum of blocks.

A compiler that sees all blocks fuses across them, and what it keeps then nobody can add
up. So this runs the model itself, a few steps for each budget, where it is asked for.
The fastest plan of blocks runs in the same minute, and all times of the chain are
multiplied by what it takes to what was added up: both kinds compare, and steps have in
them what no block alone shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.chain import Chain, Whole
from overlaplab.techniques.memory.cutting import cut
from overlaplab.techniques.memory.knapsack import find_curve
from overlaplab.techniques.memory.plan import CheckpointPlan
from overlaplab.techniques.memory.policies import Policy
from overlaplab.techniques.memory.setting import Setting, drop_gradients, run_step


def measure_wholes(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    chain: Chain,
    wholes: Sequence[Policy],
    setting: Setting,
) -> tuple[Chain, tuple[Whole, ...]]:
    """What steps of the whole model take.

    Args:
        model: not changed; a copy is run.
        args, kwargs: of its forward.
        chain: of its blocks.
        wholes: policies of the whole.
        setting: how; its meter must compute.

    Returns:
        The chain with its times corrected, and what of `wholes` could be run: the
        others are among the chain's notes.
    """
    meter = setting.meter
    on_gpu = any(p.is_cuda for p in model.parameters())
    devices = [torch.cuda.current_device()] if on_gpu else []
    menu = {policy.name: policy for policy in (*setting.policies, *wholes)}
    curve = find_curve(chain)
    fastest = curve.choice(len(curve.peak_bytes) - 1)
    found, notes, factor = [], list(chain.notes), 1.0
    with torch.random.fork_rng(devices), torch.enable_grad(), meter.open():
        copied, _ = cut(model, {}, meter)
        inputs = pytree.tree_map_only(Tensor, meter.adopt, (tuple(args), dict(kwargs)))

        def run(choice: tuple[int, ...], whole: Whole | None) -> tuple[int, int]:
            plan = CheckpointPlan(
                chain,
                choice,
                menu,
                None,
                setting.compiled_parts,
                setting.backend,
                whole=whole,
            )
            with plan.apply(copied):
                return _bytes_and_ns(copied, inputs, setting)

        try:
            _, ns = run(fastest, None)
            factor = ns / chain.step_ns(fastest)
        except torch.OutOfMemoryError:
            notes.append("no plan was run whole: not even the fastest fits here")
        for policy in wholes:
            try:
                peak, ns = run((), Whole(policy.name, 0, 0))
            except RuntimeError as error:
                first = str(error).strip().splitlines()[0]
                notes.append(f"without {policy.name!r}: {first}")
            else:
                peak += chain.resident_bytes
                found.append(Whole(policy.name, peak, ns, meter.launch_ns))
    return replace(chain.slower(factor), notes=tuple(notes)), tuple(found)


def _bytes_and_ns(
    model: nn.Module, inputs: tuple[Any, Any], setting: Setting
) -> tuple[int, int]:
    """The most that a step of `model` needs beside what is resident, and its time."""
    meter = setting.meter
    args, kwargs = inputs

    def step() -> None:
        run_step(lambda: model(*args, **kwargs), setting)
        drop_gradients(model)

    for _ in range(2):  # what is compiled or allocated in a first one is no step's
        step()
    start = meter.live_bytes()
    meter.mark()
    step()
    return meter.peak_bytes() - start, meter.step_ns(step)
