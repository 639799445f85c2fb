"""The benchmark's arithmetic, and a rehearsal of the whole of it on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab.bench import command, data_parallel, variants
from overlaplab.bench.kernels import kernel_sums
from overlaplab.bench.timing import Samples
from overlaplab.errors import CaptureError, RankError
from tests.guards import GUARD_S
from tests.ranks import values_of

MS = 1_000_000


def kernel(name: str, start_ns: int, end_ns: int) -> ol.Span:
    attributes = {"kernel": name}
    return ol.Span(
        0, "default", "compute", "op", start_ns, end_ns, attributes=attributes
    )


def test_hidden_plus_exposed_is_communication() -> None:
    found = kernel_sums(
        ol.Timeline.of(
            [
                ol.Span(0, "cpu", "launch", "launch mm", 0, 1),
                kernel("spin_kernel", 0, MS),
                kernel("sm90_gemm", MS, 5 * MS),
                ol.Span(0, "comm", "communication", "all_reduce", 4 * MS, 8 * MS),
                kernel("elementwise", 7 * MS, 9 * MS),
                kernel("flash_fwd", 10 * MS, 11 * MS),
            ]
        )
    )
    assert found["hidden_ms"] == 2 and found["exposed_ms"] == 2
    assert found["nccl_ms"] == 4 and found["gemm_ms"] == 4
    assert found["attention_ms"] == 1 and found["other_ms"] == 2
    assert found["span_ms"] == 10 and found["idle_ms"] == 1
    assert found["communication_ms"] == [(3, 7)]


def test_no_kernels_is_said_and_not_divided_by() -> None:
    assert kernel_sums(ol.Timeline.of([])) == {"kernels": 0}


def test_samples_report_median_and_spread() -> None:
    found = Samples(tuple(n * MS for n in (5, 1, 4, 2, 3))).to_json()
    assert found["median_ms"] == 3 and found["p10_ms"] == 1 and found["p90_ms"] == 5
    assert found["samples_ms"] == [5, 1, 4, 2, 3]


def test_twins_share_memory_and_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: 1 / 0)
    twin = variants.share_parameters(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours is not theirs and ours.data_ptr() == theirs.data_ptr()
    twin(torch.randn(2, 3)).sum().backward()
    assert model[0].weight.grad is None and twin[0].weight.grad is not None


def test_twins_keep_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    twin = variants.share_parameters(model)
    assert twin[1].weight is twin[0].weight


def rehearse() -> dict[str, Any]:
    plan = data_parallel.Plan(
        caps_mib=(25,),
        our_caps_mib=(1,),
        captured_caps_mib=(1,),
        warmup=1,
        sweep_rounds=1,
        final_rounds=1,
        steps_a_round=1,
        tokens=8,
    )
    alone = data_parallel.measure_accumulation("tiny", 1, plan)
    assert {len(v["samples_ms"]) for v in alone["variants"].values()} == {1}
    assert min(v for k, v in alone["ratio_to_ddp_best"].items() if "ddp" in k) == 1
    return data_parallel.measure_case("tiny", 1, plan)


def test_a_rehearsal_on_cpus_checks_every_variant_against_a_plain_all_reduce() -> None:
    first, second = values_of(rehearse, cluster="gloo")
    assert set(first["variants"]) == {
        "compute",
        "serial",
        "per parameter",
        "ddp default",
        "ddp best",
        "ours default",
        "ours best",
        "all-reduce alone",
    }
    assert first["ratio_to_ddp_best"]["ddp best"] == 1
    assert "needs CUDA" in next(iter(first["not_measured"].values()))
    assert first["gradient_norm"] == second["gradient_norm"] > 0


def wrong_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    case = data_parallel._Case(model, (torch.ones(1, 4),), data_parallel.QUICK)
    twin = variants.share_parameters(model)

    def step() -> None:
        twin.zero_grad()
        twin(torch.ones(1, 4)).sum().backward()
        for parameter in twin.parameters():
            parameter.grad *= 2

    case._build(lambda: variants.Variant("doubled", {}, step, twin))


def test_a_variant_with_wrong_gradients_is_not_timed() -> None:
    with pytest.raises(RankError, match="doubled"):
        values_of(wrong_gradients, cluster="gloo")


def test_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(
        "sys.argv", ["overlaplab.bench", "data-parallel", "--world-size", "8"]
    )
    assert command.main() == 2
    assert "8 GPUs asked for, 1 found" in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_a_step_is_not_captured_without_cuda(cluster: str) -> None:
    def attempt() -> str:
        try:
            ol.capture_step(lambda: None)
        except CaptureError as error:
            return str(error)
        return "captured"

    for message in ol.run(attempt, cluster=cluster, timeout_s=GUARD_S).values:
        assert "runs on cpu" in message and 'cluster="nccl"' in message


def test_a_capture_needs_a_warm_up() -> None:
    with pytest.raises(ValueError, match="num_warmup is 0"):
        ol.capture_step(lambda: None, num_warmup=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "No such command"),
        (["data-parallel", "--backend", "gloo", "--world-size", "-1"], "not in the"),
        (["data-parallel", "--backend", "gloo", "--batches", "0"], "not in the"),
        (["data-parallel", "--backend", "gloo", "--tokens", "-3"], "not in the"),
        (["predict", "compare", "NOTES"], "not JSON"),
        (["predict", "compare", "OTHER"], "no such results (KeyError"),
        (["predict", "zero3", "OTHER"], "no such results (KeyError"),
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "NOTES").write_text("hello")
    (tmp_path / "OTHER").write_text('{"benchmark": "other"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert command.main() == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["NOTES", "OTHER"]
