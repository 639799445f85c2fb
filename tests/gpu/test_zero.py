"""ZeRO-3 on GPUs trains as one process on all the data, in time with prefetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import zero_programs
from tests.gpu.processes import run_on_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_twenty_adamw_steps_end_where_one_process_ends(prefetch: int) -> None:
    for found in run_on_gpus(zero_programs.all_nets_as_alone, prefetch):
        # Sums in another order; AdamW makes small gradients large.
        assert {name: worst for name, worst in found.items() if worst > 1e-4} == {}


def test_twenty_adamw_steps_end_where_fsdp2_ends() -> None:
    for found in run_on_gpus(zero_programs.all_nets_as_fsdp2):
        # As above.
        assert {name: worst for name, worst in found.items() if worst > 1e-4} == {}


@pytest.mark.parametrize("accumulates", [False, True])
def test_eight_captured_steps_end_where_eight_eager_ones_do(accumulates: bool) -> None:
    for found in run_on_gpus(zero_programs.captured_as_eager, accumulates):
        # As above, and the captured optimizer takes its step count from the device.
        assert {name: worst for name, worst in found.items() if worst > 1e-4} == {}


def test_a_step_on_gpus_never_waits_for_the_cpu() -> None:
    assert run_on_gpus(zero_programs.steps_without_sync) == ["no sync"] * 2


def test_what_gpus_save_they_load_and_go_on_bit_by_bit(tmp_path: Path) -> None:
    for same in run_on_gpus(zero_programs.saved_and_loaded, str(tmp_path / "saved")):
        assert same == {"loaded": True, "went on": True}


def test_a_model_from_meta_is_never_whole_on_a_gpu() -> None:
    for peak_bytes, full_bytes in run_on_gpus(zero_programs.built_on_meta):
        # Half of it as shards, half as their gradients, and a few units of a sixteenth:
        # with the full model beside these it were more than twice as much.
        assert peak_bytes < 1.5 * full_bytes
