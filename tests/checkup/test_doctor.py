"""The doctor: facts about a machine become remarks; what hangs does not hold it."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlaplab import cli
from overlaplab.checkup import facts as gathering
from overlaplab.checkup import judge, probe, remarks
from overlaplab.checkup.facts import (
    Facts,
    Section,
    gather,
    output_of,
    parse_topology,
    read_probe,
)
from overlaplab.checkup.remarks import SETTINGS, judge_settings
from tests.checkup.machines import (
    H100,
    LAPTOP,
    SERVER,
    said,
    statuses,
    with_section,
)
from tests.guards import GUARD_S, soon

# Healthy machines


def test_a_laptop_without_a_gpu_is_healthy() -> None:
    checkup = judge(LAPTOP)

    assert checkup.exit_code == 0
    assert statuses(checkup) == {"ok", "note"}
    assert "every lesson runs on the virtual cluster" in said(checkup, "note")
    assert "Nothing is broken." in str(checkup)
    runs = {part.cluster: part.runs for part in checkup.parts}
    assert runs == {"virtual": True, "gloo": True, "nccl": False}


def test_two_gpus_with_nvlink_have_nothing_but_ok() -> None:
    checkup = judge(SERVER)

    assert statuses(checkup) == {"ok"}
    text = str(checkup)
    for fact in ("2 x NVIDIA H100", "79 GiB", "18 NVLinks", "NCCL 2.28.9", "CUDA 13.0"):
        assert fact in text
    assert all(part.runs for part in checkup.parts)


def test_one_gpu_runs_one_rank() -> None:
    one = with_section(
        SERVER,
        gpus=Section({"gpus": [H100], "peers": [], "why": ""}),
        nccl=Section({"skipped": "fewer than two GPUs"}),
    )
    nccl = judge(one).parts[-1]
    assert nccl.runs and "one rank" in nccl.says


# What is broken, or not what it seems


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            replace(LAPTOP, sections={"torch": Section(error="ImportError: no torch")}),
            ["torch does not load", "no torch", "pytorch.org"],
        ),
        (replace(LAPTOP, sections={}), ["torch does not load"]),
        (
            with_section(LAPTOP, torch=Section({"torch": "2.9.1", "cuda": None})),
            ["torch 2.9.1", "needs torch 2.11", "pip install"],
        ),
        (
            with_section(LAPTOP, gloo=Section(error="RuntimeError: no route")),
            ["gloo", "no route", "GLOO_SOCKET_IFNAME"],
        ),
        (
            with_section(LAPTOP, gloo=Section(hung=True)),
            ["gloo", "no answer in time"],
        ),
        (
            with_section(SERVER, nccl=Section(hung=True)),
            ["NCCL", "no answer in time", "NCCL_DEBUG=INFO"],
        ),
        (
            with_section(SERVER, profiler=Section(error="RuntimeError: CUPTI")),
            ["torch.profiler", "CUPTI", "Timelines"],
        ),
        (
            with_section(SERVER, pinned=Section(error="RuntimeError: mlock")),
            ["pinned", "mlock", "ulimit -l"],
        ),
        (
            with_section(
                SERVER, gpus=Section({"gpus": [], "peers": [], "why": "driver too old"})
            ),
            ["nvidia-smi lists 2 x NVIDIA H100", "driver too old", "update it"],
        ),
        (
            with_section(SERVER, gpus=Section(hung=True)),
            ["CUDA does not start", "no answer in time", "nvidia-smi"],
        ),
    ],
)
def test_what_is_broken_is_named_with_its_repair(facts: Facts, words: list) -> None:
    checkup = judge(facts)

    assert checkup.exit_code == 1
    line = said(checkup, "broken")
    for word in words:
        assert word in line
    assert "Broken: " in str(checkup)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            replace(LAPTOP, smi_gpus=("NVIDIA L4",)),
            ["1 x NVIDIA L4", "built without CUDA", "pytorch.org"],
        ),
        (
            replace(
                with_section(SERVER, gpus=LAPTOP.sections["gpus"]),
                environ={"CUDA_VISIBLE_DEVICES": ""},
            ),
            ["CUDA_VISIBLE_DEVICES=''", "hides"],
        ),
        (
            with_section(
                SERVER,
                gpus=Section({"gpus": [H100, H100], "peers": [], "why": ""}),
            ),
            ["not every GPU", "host's memory"],
        ),
        (replace(LAPTOP, python=(3, 14, 0)), ["Python 3.14.0", "3.11 to 3.13"]),
        (
            replace(SERVER, environ={"CUDA_LAUNCH_BLOCKING": "1"}),
            ["Nothing overlaps", "Unset it"],
        ),
    ],
)
def test_what_works_otherwise_than_one_thinks_is_a_warning(
    facts: Facts, words: list
) -> None:
    checkup = judge(facts)

    assert checkup.exit_code == 0
    line = said(checkup, "warning")
    for word in words:
        assert word in line


def test_gpus_over_pcie_are_reported_as_slower() -> None:
    text = str(judge(replace(SERVER, links=((0, 1, "SYS"),))))
    assert "SYS (PCIe and the link between two CPUs)" in text
    assert "Slower than NVLink" in text


def test_nvidia_smi_without_a_gpu_is_a_note_with_a_way_on() -> None:
    checkup = judge(replace(LAPTOP, smi_gpus=()))
    assert checkup.exit_code == 0
    assert "lists none" in said(checkup, "note")


# Settings


@pytest.mark.parametrize(
    ("name", "value", "status", "word"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "warning", "order of their launches"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "note", "queues"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "Nothing overlaps"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "warning", "holds the CPU"),
        ("NCCL_BLOCKING_WAIT", "true", "warning", "holds the CPU"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "before every collective"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning", "host syncs"),
        ("NCCL_P2P_DISABLE", "1", "warning", "host's memory"),
        ("NCCL_MAX_CTAS", "8", "note", "processors"),
        ("NCCL_ALGO", "Ring", "note", "Pins"),
        ("NCCL_BUFFSIZE", "1048576", "note", "not known here"),
        ("TORCH_NCCL_SOMETHING_NEW", "1", "note", "not known here"),
    ],
)
def test_a_setting_is_described_by_what_it_does_to_overlap(
    name: str, value: str, status: str, word: str
) -> None:
    (remark,) = judge_settings({name: value, "HOME": "/"}, has_gpus=True)
    assert remark.status == status
    assert remark.what == f"{name}={value}"
    assert word in remark.means


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("TORCH_NCCL_BLOCKING_WAIT", "0"),
        ("NCCL_P2P_DISABLE", "0"),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF"),
        ("NCCL_VERSION", "2.28.9"),
        ("PATH", "/bin"),
    ],
)
def test_a_setting_at_its_default_is_not_reported(name: str, value: str) -> None:
    assert list(judge_settings({name: value}, has_gpus=True)) == []


def test_settings_of_gpus_do_not_alarm_a_laptop() -> None:
    environ = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "1"}
    (remark,) = judge_settings(environ, has_gpus=False)
    assert remark.status == "note"
    assert "CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE" in remark.what


def test_every_warning_says_what_to_do() -> None:
    assert all(s.do and s.means for s in SETTINGS if s.status == "warning")


def test_every_entry_of_the_table_is_of_a_check_and_says_something() -> None:
    folder = Path(remarks.__file__).parent
    entries = tomllib.loads((folder / "remarks.toml").read_text())
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    assert [name for name in entries if f'"{name}"' not in code] == []
    for entry in entries.values():
        assert entry["status"] != "ok" and (entry.get("means") or entry.get("do"))


# Changed too late


def test_a_change_after_cuda_started_is_reported_to_have_no_effect() -> None:
    late = replace(
        SERVER,
        environ={"CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        seen_by_cuda={},
        seen_exactly=True,
    )
    line = said(judge(late), "warning")
    assert "CUDA_DEVICE_MAX_CONNECTIONS was unset, now '32'" in line
    assert "no effect" in line


def test_a_change_that_may_be_too_late_is_reported_as_one() -> None:
    late = replace(
        SERVER,
        environ={},
        seen_by_cuda={"CUDA_VISIBLE_DEVICES": "0"},
        seen_exactly=False,
    )
    line = said(judge(late), "warning")
    assert "CUDA_VISIBLE_DEVICES was '0', now unset" in line
    assert "only if it was changed before" in line


def test_a_change_before_cuda_starts_is_no_matter() -> None:
    early = replace(SERVER, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert statuses(judge(early)) == {"ok"}


def test_the_environment_is_kept_when_cuda_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    queued: list = []
    monkeypatch.setattr(gathering, "_at_cuda_start", None)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: queued.append(call))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gathering.remember_cuda_start()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for call in queued:
        call()  # CUDA starts
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")

    facts = gather(command=["false"])

    assert facts.seen_exactly and facts.seen_by_cuda is not None
    assert facts.seen_by_cuda["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert facts.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


# Gathering


def test_a_child_that_hangs_is_left_with_what_it_said() -> None:
    command = [
        sys.executable,
        "-c",
        'import time; print("begun", flush=True); time.sleep(3600)',
    ]
    begin = time.monotonic()
    assert output_of(command, soon(3.0)) == "begun\n"
    assert time.monotonic() - begin < GUARD_S  # the child sleeps for longer


def test_a_command_that_does_not_exist_is_none() -> None:
    assert output_of(["no-such-program-anywhere"], 1.0) is None


def test_a_section_that_did_not_end_hung() -> None:
    printed = '{"begin": "torch"}\n{"end": "torch", "facts": {}}\n{"begin": "gpus"}\n'
    sections = read_probe("a greeting\n" + printed + '"text"\n')
    assert [name for name, s in sections.items() if s.hung] == ["gpus"]


def test_a_topology_is_read_with_its_colours_and_network_cards() -> None:
    printed = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-47\n"
        "GPU1\tNV18\t X \tSYS\tSYS\t0-47\n"
        "GPU2\tSYS\tSYS\t X \tNODE\t48-95\n"
        "NIC0\tPIX\tSYS\tNODE\t X\n\nLegend:\n  X    = Self\n"
    )
    assert parse_topology(printed) == ((0, 1, "NV18"), (0, 2, "SYS"), (1, 2, "SYS"))


def test_this_machine_is_looked_at_without_a_child_where_torch_has_no_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch has CUDA")
    monkeypatch.setattr(gathering, "output_of", lambda *_: None)
    checkup = judge(gather())
    assert checkup.exit_code == 0, str(checkup)


def test_the_probe_of_a_process_of_its_own_says_the_same() -> None:
    command = [sys.executable, "-P", probe.__file__]
    checkup = judge(gather(command=command))
    assert checkup.exit_code == 0, str(checkup)


# The command


@pytest.mark.parametrize(("facts", "code"), [(LAPTOP, 0), (SERVER, 0)])
def test_the_command_prints_text_or_json(
    facts: Facts, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlaplab.checkup.gather", lambda: facts)
    text = CliRunner().invoke(cli.main, ["doctor"])
    as_json = CliRunner().invoke(cli.main, ["doctor", "--json"])

    assert text.exit_code == as_json.exit_code == code
    assert text.output.startswith("overlaplab doctor: ")
    found = json.loads(as_json.output)
    assert found["exit_code"] == code
    assert {"status", "what", "means", "do"} == set(found["remarks"][0])


def test_the_command_fails_only_where_something_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = with_section(LAPTOP, gloo=Section(hung=True))
    monkeypatch.setattr("overlaplab.checkup.gather", lambda: broken)
    assert CliRunner().invoke(cli.main, ["doctor"]).exit_code == 1


def test_no_line_is_wider_than_a_terminal() -> None:
    environ = {name: "1" for setting in SETTINGS for name in setting.names}
    for facts in (LAPTOP, SERVER):
        for line in str(judge(replace(facts, environ=environ))).splitlines():
            assert len(line) <= 80
