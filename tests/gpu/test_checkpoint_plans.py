"""On a GPU plans need the memory and take the time that they predict."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from overlaplab.bench.checkpoint.models import Made, Sizes, build_case
from overlaplab.bench.timing import Samples, run_block
from overlaplab.techniques.memory import CheckpointPlan, Costs, measure_costs
from overlaplab.techniques.memory.gpu_meter import GpuMeter

pytestmark = pytest.mark.gpu(1)

# Large enough that launches do not bound the step, also on a slow CPU; but for FEW.
SIZES = Sizes(gpt="gpt-738m", batch=8, tokens=2048, images=512)
FEW = "conv, few images"  # 18 ms of kernels, 25 to 53 of launches
NUM_BUDGETS = 5


def _plans(costs: Costs) -> list[CheckpointPlan]:
    """Five that differ, from the fastest to the smallest."""
    curve = costs.frontier()
    places = {i * (len(curve) - 1) // (NUM_BUDGETS - 1) for i in range(NUM_BUDGETS)}
    return [curve[place] for place in sorted(places)]


@pytest.fixture(autouse=True)
def _alone() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()


def _build(name: str) -> Made:
    if name == FEW:
        return build_case("conv", replace(SIZES, images=128))
    return build_case(name, SIZES)


@dataclass(frozen=True)
class Found:
    """One plan, and what a step under it did.

    Args:
        plan_bytes, plan_ns, launch_ns: as predicted.
        peak_bytes: as `torch.cuda.max_memory_allocated` has it.
        asked_bytes: without what the allocator adds.
        step_ns: the median.
    """

    plan_bytes: int
    plan_ns: int
    launch_ns: int
    peak_bytes: int
    asked_bytes: int
    step_ns: int

    def __str__(self) -> str:
        return (
            f"peak {self.peak_bytes} (asked for {self.asked_bytes}), predicted "
            f"{self.plan_bytes} ({self.plan_bytes / self.peak_bytes - 1:+.3%}); step "
            f"{self.step_ns}, predicted {self.plan_ns / self.step_ns - 1:+.2%}, "
            f"launches {self.launch_ns}"
        )


@functools.cache
def _measured(name: str, expandable: bool = False) -> tuple[Found, ...]:
    """Of five plans; with an allocator that cuts memory exactly, or as it is."""
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
    try:
        return tuple(_measure(name))
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def _measure(name: str) -> Iterator[Found]:
    others = torch.cuda.memory_allocated()
    model, batch = _build(name)

    def step() -> None:
        model.zero_grad()
        model(*batch).backward()

    costs = measure_costs(model, batch, hardware="measured")
    print(name, *costs.chain.notes, sep="\n")
    for plan in _plans(costs):
        with plan.apply(model):
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            step()
            stats = torch.cuda.memory_stats()
            times = Samples(tuple(run_block(step, 15)))
        found = Found(
            plan.peak_bytes,
            plan.step_ns,
            plan.launch_ns,
            stats["allocated_bytes.all.peak"] - others,
            stats["requested_bytes.all.peak"] - others,
            times.median_ns,
        )
        print(found)
        yield found


# A conv net has tensors of odd sizes, to each of which up to 1 MiB may be added, see
# [Note: what the allocator adds] in gpu_meter.py: its plans count that in full. Of
# tensors of 49 MiB, as few images make them, it is more than of larger ones.
@pytest.mark.parametrize(
    ("name", "most"),
    [("gpt", 0.03), ("gpt-dropout", 0.03), ("conv", 0.03), (FEW, 0.04)],
)
def test_no_peak_is_over_its_plan_nor_much_below(name: str, most: float) -> None:
    for found in _measured(name):
        # 0.1 %: small things that the allocator of a whole step does otherwise.
        assert -0.001 <= found.plan_bytes / found.peak_bytes - 1 <= most, found


def test_peaks_are_exact_for_odd_sizes_where_memory_is_cut_exactly() -> None:
    for found in _measured(FEW, expandable=True):
        assert abs(found.plan_bytes / found.peak_bytes - 1) <= 0.001, found


@pytest.mark.parametrize("name", ["gpt", "gpt-dropout", "conv"])
def test_steps_are_within_5_percent_of_what_is_predicted(name: str) -> None:
    for found in _measured(name):
        assert abs(found.plan_ns / found.step_ns - 1) <= 0.05, found


def test_a_step_of_many_launches_is_between_its_kernels_and_its_launches() -> None:
    for found in _measured(FEW):
        # A CPU's clock; of blocks alone each has a call of autograd's of its own.
        least, most = 0.85 * found.plan_ns, 1.15 * max(found.plan_ns, found.launch_ns)
        assert least <= found.step_ns <= most, found


@pytest.mark.parametrize("name", ["gpt", "gpt-dropout"])
def test_gradients_are_bit_equal_with_and_without_a_plan(name: str) -> None:
    model, batch = build_case(name, Sizes(gpt="gpt-162m", batch=2, tokens=256))
    costs = measure_costs(model, batch, hardware="measured")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        found = []
        for plan in (costs.none(), costs.every(1), costs.every(1, "keep attention")):
            with plan.apply(model):
                torch.manual_seed(7)
                model.zero_grad()
                model(*batch).backward()
                grads = [p.grad.clone() for p in model.parameters()]
                found.append([*grads, torch.rand(1, device="cuda")])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_compiled_blocks_hold_their_budget() -> None:
    others = torch.cuda.memory_allocated()
    # Tensors of 12 MiB; to those of 3 the allocator may add a third, and plans do.
    model, batch = build_case("gpt", Sizes(gpt="gpt-162m", batch=4, tokens=2048))
    costs = measure_costs(
        model,
        batch,
        hardware="measured",
        compile=True,
        compile_budgets=(1.0, 0.5),
        compiled_parts=("finish",),
    )
    assert not [note for note in costs.chain.notes if "without" in note]
    found = []
    for plan in _plans(costs):
        with plan.apply(model):
            for _ in range(3):
                model.zero_grad()
                model(*batch).backward()
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            model(*batch).backward()
            found.append((plan.peak_bytes, torch.cuda.max_memory_allocated() - others))
    del model, batch, costs, plan
    gc.collect()
    freed = others - torch.cuda.memory_allocated()
    for predicted, peak in found:
        assert predicted * 0.97 <= peak <= predicted * 1.001, (found, freed)


def test_what_the_cpu_needs_meanwhile_is_not_a_blocks_time() -> None:
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def multiply() -> None:
        left @ left

    def multiply_late() -> None:
        time.sleep(0.003)
        left @ left

    # A card that rested clocks lower (16 % were seen); the sleep would be 17 times.
    quick, late = (GpuMeter().step_ns(call) for call in (multiply, multiply_late))
    assert late < 1.5 * quick, (quick, late)
