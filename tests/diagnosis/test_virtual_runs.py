"""Programs on the virtual cluster, each with one thing wrong, and what is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab.diagnosis import Diagnosis


def training(
    make: Callable[[nn.Module], object], *, width: int = 256, slow_rank: int = -1
) -> Callable[[], None]:
    """One step of six linear layers; the slow rank has eight times the batch."""

    def step() -> None:
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)])
        model.to(ol.device())
        reducer = make(model)
        rows = 256 * (8 if dist.get_rank() == slow_rank else 1)
        model(torch.ones(rows, width, device=ol.device())).sum().backward()
        reducer.wait()  # type: ignore[attr-defined]

    return step


def diagnosis(step: Callable[[], None], hardware: str = "chalk") -> Diagnosis:
    """Of the step alone: a reducer's set-up is cut off."""
    timeline = ol.run(step, world_size=2, hardware=hardware).timeline
    set_up = [
        s.end_ns
        for s in timeline.spans
        if s.attributes.get("label") == "broadcast parameters"
    ]
    first_ns = max(set_up, default=0)
    return ol.diagnose(timeline.between(first_ns, timeline.end_ns))


def bucketed(bucket_mib: float) -> Callable[[nn.Module], object]:
    return lambda model: ol.BucketedReducer(model, bucket_mib=bucket_mib)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (ol.SerialReducer, "launched-late"),
        (bucketed(1000), "one-bucket"),
        (bucketed(0.3), "last-bucket"),
    ],
)
def test_when_a_reducer_launches_is_seen_in_the_timeline(make, kind: str):
    found = diagnosis(training(make))
    assert [one.kind for one in found.findings] == [kind]


def test_the_last_bucket_is_the_first_layers_and_nothing_is_left_to_compute():
    (one,) = diagnosis(training(bucketed(0.3))).findings
    assert one.evidence["remaining_computation_ns"] <= 1  # times are rounded up
    assert one.evidence["last_bytes"] == 4 * (256 * 256 + 256)  # one layer, float32
    assert (
        one.evidence["hidden_ns"] + one.evidence["exposed_ns"]
        == (one.evidence["communication_ns"])
    )


def test_per_parameter_hooks_on_a_slow_network_send_small_messages():
    found = diagnosis(training(ol.HookReducer, width=64), "ethernet-100g")
    assert found.findings[0].kind == "small-messages"
    assert found.findings[0].evidence["num_small"] == 12  # a weight and a bias a layer


def test_a_small_model_on_a_fast_gpu_is_launch_bound():
    found = diagnosis(training(bucketed(25), width=16), "h100-nvlink")
    assert found.findings[0].kind == "launch-bound"
    step = found.case.steps[0]
    assert step.cpu_bound_ns == step.idle_ns > 0


def test_a_rank_with_more_work_is_the_straggler_and_not_the_one_that_waits():
    found = diagnosis(training(bucketed(0.5), slow_rank=1))
    first = found.findings[0]
    assert (first.kind, first.rank, first.evidence["waiting_rank"]) == (
        "straggler",
        1,
        0,
    )
    fast, slow = found.case.steps
    assert first.evidence["computes_more_ns"] == slow.compute_ns - fast.compute_ns


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "waited for at once"])
def test_a_collective_that_is_waited_for_at_once_holds_the_computation_up(is_async):
    def step() -> None:
        x = w = torch.ones(512, 512, device=ol.device())
        for _ in range(6):
            x = x @ w
            work = dist.all_reduce(x, async_op=is_async)
            if is_async:
                work.wait()

    found = diagnosis(step)
    (one,) = found.findings
    assert one.kind == "same-stream"
    assert one.evidence["shared_lanes"] == ([] if is_async else ["default"])
    # Five of six are followed by computation.
    assert one.evidence["num_collectives"] == 5
    assert one.cost_ns * 6 == found.case.steps[0].communication_ns * 5


def test_waiting_after_the_next_product_hides_it():
    def step() -> None:
        x = w = torch.ones(512, 512, device=ol.device())
        sent = torch.ones(512, 512, device=ol.device())
        for _ in range(6):
            work = dist.all_reduce(sent, async_op=True)
            x = x @ w
            work.wait()

    found = diagnosis(step)
    assert "same-stream" not in [one.kind for one in found.findings]
    step_ns = found.case.steps[0]
    assert step_ns.hidden_ns == step_ns.communication_ns


def test_item_in_the_middle_of_a_step_is_a_host_sync():
    def step() -> None:
        x = w = torch.ones(64, 64, device=ol.device())
        for _ in range(8):
            x = x @ w
            x.sum().item()

    found = diagnosis(step, "h100-nvlink")
    assert "host-sync" in [one.kind for one in found.findings]


def test_set_up_in_the_timeline_is_remarked_with_the_cut_to_make():
    timeline = ol.run(training(bucketed(0.3)), world_size=2, hardware="chalk").timeline
    (remark,) = (r for r in ol.diagnose(timeline).remarks if "set-up" in r)
    cut = remark.split("timeline.between(")[1].split(",")[0]
    alone = ol.diagnose(timeline.between(int(cut), timeline.end_ns))
    assert not any("set-up" in r for r in alone.remarks)
    assert alone.has_communication


def test_a_virtual_runs_saved_is_exact():
    found = diagnosis(training(bucketed(0.3)))
    saved = found.saved[0, None]
    assert saved.basis == "by the hardware model"
    step = found.case.steps[0]
    # Chalk's kernels do not slow one another down: what is hidden is saved.
    assert saved.saved_ns == step.hidden_ns == step.saved_ns
