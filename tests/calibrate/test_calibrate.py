"""From measurements to a profile: literal numbers, laws, and a whole calibration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import overlaplab as ol
from overlaplab import calibrate
from overlaplab.calibrate import busy, table
from overlaplab.calibrate.operators import operators_of_step
from overlaplab.calibrate.plan import ModelCase
from overlaplab.calibrate.profile import build_profile, curve_through
from overlaplab.cli import main
from overlaplab.errors import OverlaplabError
from overlaplab.hardware import Hardware, compute_ns, read_profile
from overlaplab.hardware.points import check_points, interpolate
from tests.calibrate.small_plan import SMALL, TINY
from tests.guards import GUARD_S


def device() -> dict[str, Any]:
    """As measured on a device that needs a microsecond for each operator."""
    ops = operators_of_step(TINY, "float32")
    rows = [[op.name, op.phase == "backward", 1_200] for op in ops]
    case = {name: getattr(TINY, name) for name in ModelCase.__dataclass_fields__}
    model = {
        "case": case,
        "dtype": "float32",
        "operators": rows,
        "mark_ns": 200,
        "step_ns": 1_000 * len(rows),
    }
    return {
        "matmuls": [{"dtype": "float32", "size": 100, "flops": 2_000_000, "ns": 1_000}],
        "memory": [{"bytes": 2_000_000, "ns": 1_000}, {"bytes": 20_000, "ns": 50}],
        "allocator": {"allocation_bytes": 512, "workspace_bytes": 7_000},
        "small_kernel": {"device_ns": 40, "launch_ns": 5_000},
        "host_copies": [],
        "models": [model],
    }


def variant(forward: int, backward: int, wait: int = 0) -> dict[str, int]:
    return {
        "forward_ns": forward,
        "backward_ns": backward,
        "wait_ns": wait,
        "step_ns": forward + backward + wait,
    }


LAUNCHES: dict[str, Any] = {
    "case": {"num_layers": 1, "d_model": 8},
    "forward_ops": 10,
    "backward_ops": 20,
    "parameters": 4,
    "variants": {
        "compute": variant(1_000, 4_000),
        "per parameter": variant(1_000, 8_000, 400),
        "one bucket": variant(1_000, 6_000, 900),
    },
}
BESIDE = {
    "compute_alone_ns": 80,
    "compute_beside_ns": 100,
    "wire_alone_ns": 50,
    "wire_beside_ns": 999,
    "wire_beside_median_ns": 100,
    "bytes": 2**20,
}
LINK: dict[str, Any] = {
    "num_ranks": 2,
    "collectives": [
        {"operation": "all_reduce", "bytes": 1_000, "tensors": 1, "ns": 300},
        {"operation": "all_reduce", "bytes": 9_000, "tensors": 1, "ns": 700},
        {"operation": "all_gather", "bytes": 9_000, "tensors": 1, "ns": 1},
    ],
    "contention": {"step": BESIDE, "small": [BESIDE], "kinds": []},
}


def beside(kind: str, high: bool, took: int, kernel: int) -> dict[str, Any]:
    """Of ten kernels of 20 ns, that take `kernel` beside an all-reduce of `took`."""
    return {
        **BESIDE,
        "kind": kind,
        "high_priority": high,
        "kernels": 10,
        "compute_alone_ns": 200,
        "compute_beside_ns": 10 * kernel,
        "wire_alone_ns": 50,
        "wire_beside_median_ns": took,
    }


def test_each_number_of_a_profile_is_the_measured_one() -> None:
    hw = build_profile("here", device(), LAUNCHES, LINK, "a card, today")
    assert hw.flops_per_s == {"default": 2 * 10**12, "float32": 2 * 10**12}
    assert hw.memory_bytes_per_s == 2 * 10**12 and hw.kernel_floor_ns == 40
    assert hw.allocation_bytes == 512 and hw.workspace_bytes == 7_000
    assert hw.launch_ns == 100 and hw.backward_launch_ns == 200
    # (9,400 - 5,000) / 4 a collective; then (7,900 - 5,000 - 1,100) / 4 a tensor.
    assert hw.collective_launch_ns == 1_100 and hw.collective_part_launch_ns == 450
    assert hw.link.latency_ns == 300 and hw.link.times == ((1_000, 0), (9_000, 400))
    assert hw.compute_rate_permille == 800 and hw.wire_rate_permille == 500
    assert not hw.waits_for_room and not hw.contention
    assert "a card, today" in hw.source


def by_kind(*rows: dict[str, Any]) -> Hardware:
    link = {**LINK, "contention": {**LINK["contention"], "kinds": list(rows)}}
    return build_profile("here", device(), LAUNCHES, link, "today")


def test_each_kind_of_kernel_has_its_speeds_without_the_wait_for_room() -> None:
    hw = by_kind(
        # A small one waits 70 - 50 = 20, a whole kernel, so a large one for 10 of its
        # 110. In those 110 the kernels do 88, in 10 of them at full speed.
        beside("matmul", False, 70, 20),
        beside("matmul", False, 110, 25),
        # No wait: 100 for 50, and kernels at 4/5.
        beside("norm", True, 50, 20),
        beside("norm", True, 100, 25),
    )
    assert hw.contention == {"matmul": (780, 500), "norm, high priority": (800, 500)}
    assert hw.waits_for_room


@pytest.mark.parametrize(("took", "waits"), [(60, False), (61, True)])
def test_room_is_waited_for_where_a_small_one_takes_half_a_matmul_more(
    took: int, waits: bool
) -> None:
    rows = beside("matmul", False, took, 20), beside("matmul", False, 100, 25)
    assert by_kind(*rows).waits_for_room == waits
    others = [{**row, "kind": "norm"} for row in rows]
    assert not by_kind(*others).waits_for_room


def test_operators_take_what_they_took_less_the_marks() -> None:
    hw = build_profile("here", device(), LAUNCHES, LINK, "today")
    for op in operators_of_step(TINY, "float32"):
        moved = op.read_bytes + op.write_bytes
        assert compute_ns(hw, op.flops, op.dtype, moved, op.name) == 1_000, op.name


def test_large_all_reduces_are_those_of_several_tensors() -> None:
    def timed(num_bytes: int, tensors: int, ns: int) -> dict[str, Any]:
        return {
            "operation": "all_reduce",
            "bytes": num_bytes,
            "tensors": tensors,
            "ns": ns,
        }

    rows = [
        timed(1_000, 1, 300),
        timed(1_000, 2, 999),
        timed(2**24, 1, 9_000),
        timed(2**24, 8, 7_300),
    ]
    hw = build_profile("x", device(), LAUNCHES, {**LINK, "collectives": rows}, "today")
    assert hw.link.times == ((1_000, 0), (2**24, 7_000))


def test_every_number_says_how_it_was_measured() -> None:
    hw = build_profile("here", device(), LAUNCHES, LINK, "today")
    described = set(hw.notes)
    assert described >= {
        "flops_per_s",
        "memory_bytes_per_s",
        "kernel_floor_ns",
        "launch_ns",
        "backward_launch_ns",
        "collective_launch_ns",
        "collective_part_launch_ns",
        "compute_rate_permille",
        "wire_rate_permille",
        "contention",
        "waits_for_room",
        "host_bytes_per_s",
        "pageable_bytes_per_s",
        "points",
        "link",
    }


def test_a_machine_without_a_link_says_that_it_has_none() -> None:
    alone = {**LAUNCHES, "variants": {"compute": variant(1_000, 4_000)}}
    hw = build_profile("here", device(), alone, None, "today")
    assert "not measured" in hw.notes["link"] and "not measured" in hw.link.source
    assert "not measured" in table(hw)


def test_a_device_that_ran_other_operators_is_refused() -> None:
    wrong = device()
    wrong["models"][0]["operators"][3][0] = "conv"
    with pytest.raises(ValueError, match="conv"):
        build_profile("here", wrong, LAUNCHES, LINK, "today")


@given(st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 10**9)), min_size=1))
def test_a_curve_is_one_that_profiles_take(pairs: list[tuple[int, int]]) -> None:
    curve = check_points("points", curve_through(pairs))
    low, high = min(ns for _, ns in pairs), max(ns for _, ns in pairs)
    assert curve[0][1] <= high * 1.15 + 1 and curve[-1][1] >= low / 1.15 - 1


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=9, unique=True),
    st.integers(2, 9),
)
def test_a_curve_through_points_that_ascend_goes_through_them(
    times: list[int], factor: int
) -> None:
    pairs = [(factor**n, ns) for n, ns in enumerate(sorted(times), 1)]
    assert curve_through(pairs) == tuple(pairs)
    assert all(interpolate(curve_through(pairs), work) == ns for work, ns in pairs)


def test_a_calibration_of_this_machine_writes_a_profile_that_times_programs(
    tmp_path: Path,
) -> None:
    out = tmp_path / "mine.json"
    hw = calibrate.calibrate(out, backend="gloo", plan=SMALL)
    assert read_profile(out) == hw and hw.name == "mine"
    assert f"torch {torch.__version__}" in hw.source
    assert hw.launch_ns > 0 and hw.link.latency_ns > 0 and "mm" in str(hw.points)
    done = ol.run(lambda: torch.ones(4) @ torch.ones(4), hardware=str(out))
    assert done.timeline.hardware == "mine"


def test_a_busy_machine_is_said_in_the_profile_and_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(
        shares: object, worker: object, plan: object, answer: Path, **more: object
    ) -> None:
        found = {"device": device(), "launches": LAUNCHES, "link": None}
        answer.write_text(json.dumps({**found, "shares": shares}))

    out = tmp_path / "mine.json"
    for shares, says in (
        ({"core": 0.43}, "a rank got 43 % of its core"),
        ({"core": 0.99, "GPU": 0.61}, "a rank got 61 % of its GPU"),
        ({"core": 0.99, "GPU": 0.98}, ""),
    ):
        monkeypatch.setattr(calibrate, "run_ranks", partial(measured, shares))
        said = CliRunner().invoke(
            main, ["calibrate", "--backend", "gloo", "--out", str(out)]
        )
        assert said.exit_code == 0, said.output
        assert says in said.output
        assert ("this machine was busy" in said.output) == bool(says)
        assert says in read_profile(out).notes.get("busy", "")


def test_a_look_at_the_machine_sees_the_slices_that_others_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU that runs another program's kernels between every fourth of ours."""
    pieces = [1.0, 1.0, 1.01, 3.0] * 5
    monkeypatch.setattr(busy, "on_cuda", lambda: True)
    monkeypatch.setattr(busy, "_gpu_pieces", lambda: pieces)
    monkeypatch.setattr(busy, "cpu_share", lambda: 0.97)
    shares = busy.Shares()
    shares.look()
    pieces = [1.0] * 20
    shares.look()
    assert shares.means() == {
        "core": pytest.approx(0.97),
        "GPU": pytest.approx((20 / 30.05 + 1) / 2),
    }


UNDER_TORCHRUN = """
import sys
from pathlib import Path
from overlaplab.calibrate import calibrate
from tests.calibrate.small_plan import SMALL

hardware = calibrate(Path(sys.argv[1]), backend="gloo", plan=SMALL)
print(hardware.name, hardware.notes["link"])
"""


def test_under_torchrun_its_processes_are_the_ranks_and_one_writes(
    tmp_path: Path,
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "mine.json"
    script.write_text(UNDER_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=GUARD_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mine all_reduce alone on 2 ranks") == 2
    assert read_profile(out).link.latency_ns > 0


@pytest.mark.parametrize(
    ("backend", "here", "says"),
    [
        ("gloo", "2", "calibrate measures one machine.*--nnodes=1"),
        ("nccl", "4", "started 4 processes here, but . GPUs are found"),
    ],
)
def test_a_torchrun_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    here: str,
    says: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with pytest.raises(ValueError, match=says) as caught:
        calibrate.calibrate(tmp_path / "mine.json", backend=backend)
    assert "\n" not in str(caught.value)


STARTED = """
import os, sys, tempfile, time
from pathlib import Path
from overlaplab.processes import run_ranks

def work(place):
    place.with_name("part").write_text(str(os.getpid()))
    place.with_name("part").rename(place)
    time.sleep(60)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        place = Path(folder, "answer")
        run_ranks(work, place, backend="gloo", world_size=1, folder=Path(folder))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_measurement_leaves_no_process_and_no_folder(
    tmp_path: Path, number: int
) -> None:
    script, work = tmp_path / "started.py", tmp_path / "work"
    script.write_text(STARTED)
    work.mkdir()
    process = subprocess.Popen([sys.executable, script, work], start_new_session=True)
    wait_until(lambda: any(work.glob("*/answer")))
    (answer,) = work.glob("*/answer")
    rank = answer.read_text()
    process.send_signal(number)
    assert process.wait() == (143 if number == signal.SIGTERM else -number)
    wait_until(lambda: not any(work.iterdir()))
    wait_until(lambda: not is_running(rank))


def is_running(process: str) -> bool:
    asked = ["ps", "-o", "stat=", "-p", process]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    return said.stdout.strip()[:1] not in ("", "Z")  # nobody may wait for an orphan


def wait_until(done: Callable[[], bool]) -> None:
    """Some seconds; minutes on a busy machine."""
    for _ in range(1200):
        if done():
            return
        time.sleep(0.1)
    pytest.fail("nothing happened for two minutes")


def fail(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_calibration_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mine.json"
    out.write_text("before")
    monkeypatch.setattr(calibrate, "run_ranks", fail)
    answer = CliRunner().invoke(
        main, ["calibrate", "--backend", "gloo", "--out", str(out)]
    )
    assert answer.exit_code == 130 and "interrupted" in answer.output
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--backend", "gloo", "--out", "profile.txt"], ".json"),
        (["--backend", "gloo", "--out", "nowhere/profile.json"], "nowhere"),
        (["--backend", "nccl", "--out", "profile.json"], "0 found"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    arguments: list[str],
    fact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    answer = CliRunner().invoke(main, ["calibrate", *arguments])
    assert answer.exit_code == 2 and fact in answer.output
    assert not isinstance(answer.exception, OverlaplabError)
