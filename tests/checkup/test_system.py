"""What Linux says is read from its files: there, absent, or hidden."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlaplab.checkup.facts import parse_cards
from overlaplab.checkup.system import Port, System, look_at_system


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the person or machine that runs the tests."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def write(root: Path, **files: str) -> None:
    """Files by their path, "__" for a slash and "DOT" for a dot."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_machine_that_hides_everything_leaves_everything_unknown(
    tmp_path: Path,
) -> None:
    assert look_at_system(tmp_path / "nothing") == System(tools=())


def test_ports_are_read_with_their_state(tmp_path: Path) -> None:
    port = "sys__class__infiniband__mlx5_0__ports__1__"
    write(
        tmp_path,
        **{
            f"{port}state": "4: ACTIVE\n",
            f"{port}link_layer": "InfiniBand\n",
            f"{port}rate": "400 Gb/sec (4X NDR)\n",
            "sys__class__infiniband__mlx5_1__ports__1__state": "1: DOWN\n",
        },
    )
    assert look_at_system(tmp_path).ports == (
        Port("mlx5_0", "InfiniBand", True, "400 Gb/sec (4X NDR)"),
        Port("mlx5_1", "", False, ""),
    )


def test_no_card_is_not_the_same_as_a_hidden_one(tmp_path: Path) -> None:
    assert look_at_system(tmp_path).ports is None
    (tmp_path / "sys" / "class").mkdir(parents=True)
    assert look_at_system(tmp_path).ports == ()


@pytest.mark.parametrize(
    ("params", "restricted"),
    [
        ("EnableMSI: 1\nRmProfilingAdminOnly: 1\n", True),
        ("RmProfilingAdminOnly: 0\n", False),
        ("EnableMSI: 1\n", None),
    ],
)
def test_the_driver_says_who_may_read_counters(
    tmp_path: Path, params: str, restricted: bool | None
) -> None:
    write(tmp_path, proc__driver__nvidia__params=params)
    assert look_at_system(tmp_path).counters_restricted is restricted


def test_the_driver_and_its_modules_are_read(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__modules="nvidia_peermem 16384 0 - Live 0x0\nnvidia 99 1 - Live 0x0\n",
        proc__driver__nvidia__version="NVRM version: NVIDIA UNIX Open\nGCC version\n",
        proc__sys__kernel__osrelease="6.8.0-60-generic\n",
        sys__kernel__mm__memory_peers__nv_mem__version="1.0\n",
    )
    found = look_at_system(tmp_path)
    assert found.modules == {"nvidia", "nvidia_peermem"}
    assert found.driver == "NVRM version: NVIDIA UNIX Open"
    assert found.kernel == (6, 8)
    assert found.peer_clients == ("nv_mem",)


@pytest.mark.parametrize(
    ("limit", "locked_bytes"), [("8388608", 8388608), ("unlimited", None)]
)
def test_the_limit_on_locked_memory_is_read(
    tmp_path: Path, limit: str, locked_bytes: int | None
) -> None:
    line = f"Max locked memory         {limit:<20} {limit:<20} bytes\n"
    write(tmp_path, proc__self__limits=f"Max cpu time  unlimited\n{line}")
    assert look_at_system(tmp_path).locked_bytes == locked_bytes


@pytest.mark.parametrize(
    ("limit", "memory_bytes"), [("max", 2**30), (str(2**29), 2**29)]
)
def test_memory_is_what_the_container_may_use(
    tmp_path: Path, limit: str, memory_bytes: int
) -> None:
    write(
        tmp_path,
        proc__meminfo=f"MemTotal:       {2**20} kB\nMemFree: 1 kB\n",
        sys__fs__cgroup__memoryDOTmax=f"{limit}\n",
    )
    assert look_at_system(tmp_path).memory_bytes == memory_bytes


def test_the_way_to_each_network_card_is_read() -> None:
    printed = (
        "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tPIX\tSYS\t0-47,96-143\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tSYS\tPIX\t48-95\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \tSYS\n"
    )
    assert parse_cards(printed) == (
        (0, "NIC0", "PIX"),
        (0, "NIC1", "SYS"),
        (1, "NIC0", "SYS"),
        (1, "NIC1", "PIX"),
    )
