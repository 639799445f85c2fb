"""Profiles and their validation."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from overlaplab.hardware import (
    PROFILES,
    Hardware,
    Link,
    collective_ns,
    find_hardware,
    read_profile,
    with_link,
    write_profile,
)

LINK = Link(latency_ns=10, bytes_per_s=10**9)


def hardware(**changes: object) -> Hardware:
    fields: dict[str, object] = {
        "name": "mine",
        "flops_per_s": {"default": 10**12},
        "memory_bytes_per_s": 10**12,
        "kernel_floor_ns": 0,
        "launch_ns": 0,
        "collective_launch_ns": 0,
        "link": LINK,
    }
    return Hardware(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_profiles_are_known_by_their_names():
    assert list(PROFILES) == [
        "chalk",
        "h100-nvlink",
        "h200-nvlink",
        "h100-ib400",
        "a100-nvlink",
        "ethernet-100g",
        "ethernet-25g",
        "laptop",
    ]
    assert all(find_hardware(name).name == name for name in PROFILES)


def test_every_number_of_a_profile_has_a_source():
    for hw in PROFILES.values():
        assert hw.source and hw.link.source
        assert hw.network is None or hw.network.source
        if hw.name != "chalk":
            assert set(hw.notes) >= {
                "flops_per_s",
                "memory_bytes_per_s",
                "kernel_floor_ns",
                "launch_ns",
                "collective_launch_ns",
                "compute_rate_permille",
                "wire_rate_permille",
                "host_bytes_per_s",
                "pageable_bytes_per_s",
            }


def test_every_gpu_allocates_as_torch_does_on_cuda_and_says_from_where_it_is_known():
    gpus = [hw for hw in PROFILES.values() if hw.name not in ("chalk", "laptop")]
    for hw in gpus:
        assert hw.allocation_bytes == 512
        assert {"allocation_bytes", "workspace_bytes"} <= set(hw.notes)
    # 32 MiB on Hopper; ":4096:2:16:8", in KiB, on GPUs before it.
    older = (4096 * 2 + 16 * 8) * 1024
    sizes = {hw.name: hw.workspace_bytes for hw in gpus}
    assert sizes.pop("a100-nvlink") == older
    assert set(sizes.values()) == {32 * 2**20}


def test_a_network_of_infiniband_is_as_fast_as_reported_where_rings_are_used():
    # 512 MiB over 248 nodes of 8 H200s: "around 350" GB/s of bus bandwidth
    # (NVIDIA/nccl-tests issue 283; the speed of its cards is not told).
    num_ranks, bytes = 248 * 8, 512 * 2**20
    ns = sum(collective_ns(find_hardware("h100-ib400"), "all_reduce", num_ranks, bytes))
    bus = 2 * (num_ranks - 1) * bytes / num_ranks / ns
    assert bus == pytest.approx(350, rel=0.1)


def test_eight_cards_of_200_gigabit_are_as_fast_as_reported():
    # DGX A100: 192 GB/s of bus bandwidth (NVIDIA/nccl issue 812).
    network = Link(latency_ns=0, bytes_per_s=24 * 10**9)
    dgx = replace(find_hardware("a100-nvlink"), gpus_per_node=8, network=network)
    _, wire = collective_ns(dgx, "all_reduce", 64, 10**10)
    assert 2 * 63 / 64 * 10**10 / wire == pytest.approx(192, rel=0.01)


def test_a_profile_of_ones_own_is_returned_as_it_is():
    mine = hardware()
    assert find_hardware(mine) is mine


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'h100'.*chalk, h100-nvlink, h200-nvlink"):
        find_hardware("h100")


def test_an_unknown_name_is_answered_with_the_nearest_one():
    with pytest.raises(ValueError, match=r"Did you mean 'ethernet-25g'\?"):
        find_hardware("ethernet-25")
    with pytest.raises(ValueError) as error:
        find_hardware("zzz")
    assert "Did you mean" not in str(error.value)


def test_something_that_is_no_name_is_a_type_error():
    with pytest.raises(TypeError, match="hardware is int"):
        find_hardware(100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_bytes_per_s", 0),
        ("memory_bytes_per_s", -1),
        ("memory_bytes_per_s", None),
        ("memory_bytes_per_s", 1.5),
        ("host_bytes_per_s", 0),
        ("kernel_floor_ns", -1),
        ("launch_ns", -1),
        ("collective_launch_ns", None),
        ("compute_rate_permille", 0),
        ("wire_rate_permille", 1001),
        ("contention", {"mm": (500, 500)}),
        ("contention", {"matmul": 500}),
        ("contention", {"matmul": (500,)}),
        ("contention", {"matmul": (500, 0)}),
        ("contention", {"norm, high priority": (1001, 500)}),
        ("contention", ((500, 500),)),
        ("flops_per_s", {"float32": 10**12}),
        ("flops_per_s", {"default": 0}),
        ("flops_per_s", 10**12),
        ("flops_per_s", {1: 10**12}),
        ("pageable_bytes_per_s", 0),
        ("cpu_bytes_per_s", -1),
        ("backward_launch_ns", -1),
        ("backward_launch_ns", 1.5),
        ("collective_part_launch_ns", -1),
        ("gpus_per_node", -8),
        ("gpus_per_node", True),
        ("gpus_per_node", 8),
        ("network", LINK),
        ("network_staged", True),
        ("network_staged", 1),
        ("waits_for_room", 1),
        ("name", 7),
        ("source", None),
        ("notes", {"launch_ns": 15}),
        ("points", {"flop:float32": ((1, 1),)}),
        ("points", {"flops": ((1, 1),)}),
        ("points", {"bytes:mm:float32": ((1, 1),)}),
        ("points", {"flops:": ((1, 1),)}),
        ("points", {"bytes": ()}),
        ("points", ()),
    ],
)
def test_a_bad_number_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(ValueError, match=key):
        hardware(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("latency_ns", -1),
        ("bytes_per_s", 0),
        ("algorithm", "tree"),
        ("hop_ns", -1),
        ("hop_ns", None),
        ("times", ((1, 2), (1, 3))),
        ("times", 5),
        ("source", None),
    ],
)
def test_a_bad_link_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(ValueError, match=rf"link\.{key}"):
        replace(LINK, **{key: value})


def test_a_link_that_is_no_link_is_a_type_error():
    with pytest.raises(TypeError, match="link is dict"):
        hardware(link={"latency_ns": 1})
    with pytest.raises(TypeError, match="link is NoneType"):
        hardware(link=None)
    with pytest.raises(TypeError, match="network is int"):
        hardware(gpus_per_node=8, network=400)


def test_a_profile_cannot_be_changed_behind_our_back():
    rates = {"default": 10**12}
    mine = hardware(flops_per_s=rates)
    rates["default"] = 1
    assert mine.flops_per_s["default"] == 10**12
    with pytest.raises(TypeError):
        mine.flops_per_s["default"] = 1  # type: ignore[index]


def test_a_profile_survives_pickling_and_copying():
    measured = replace(
        find_hardware("h100-ib400"), points={"bytes": [[1, 2]]}, network_staged=True
    )
    for hw in (*PROFILES.values(), measured):
        assert pickle.loads(pickle.dumps(hw)) == hw
        assert copy.deepcopy(hw) == hw


def test_with_link_changes_what_is_asked_for_and_says_so():
    slow = with_link("chalk", bytes_per_s=5)
    assert (slow.link.latency_ns, slow.link.bytes_per_s) == (1_000, 5)
    assert slow.name == "chalk+link"
    assert "bytes_per_s" in slow.link.source
    assert with_link(slow, latency_ns=7).name == "chalk+link"
    assert with_link("chalk") is find_hardware("chalk")


def test_a_bandwidth_of_ones_own_stands_instead_of_measured_points():
    measured = replace(LINK, times=((1_000, 500),))
    hw = hardware(link=measured)
    assert with_link(hw, latency_ns=7).link.times == ((1_000, 500),)
    assert with_link(hw, bytes_per_s=10**9).link.times == ()


def test_hardware_and_program_load_neither_torch_nor_numpy():
    code = (
        "import sys, overlaplab.hardware, overlaplab.program\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_number_of_too_many_digits_is_refused_with_its_key():
    with pytest.raises(ValueError, match=r"launch_ns has about 39. digits"):
        replace(find_hardware("chalk"), launch_ns=10**400)


@pytest.mark.parametrize("key", ["flops_per_s", "points"])
def test_a_dtype_that_nobody_has_is_refused_with_the_nearest(key):
    value = {
        "flops_per_s": {"default": 1, "bf16": 9},
        "points": {"flops:mm:bf16": ((1, 1),)},
    }
    with pytest.raises(ValueError, match="unknown dtype; did you mean 'bfloat16'"):
        hardware(**{key: value[key]})


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    write_profile(PROFILES["chalk"], tmp_path / "a.json")
    marked = b"\xef\xbb\xbf" + (tmp_path / "a.json").read_bytes()
    (tmp_path / "b.json").write_bytes(marked)
    assert read_profile(tmp_path / "b.json") == PROFILES["chalk"]


def test_a_file_that_is_not_utf8_says_what_to_do(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes("{}".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.json: not text in UTF-8, .*save it as"):
        read_profile(path)
