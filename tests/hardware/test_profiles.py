"""Profiles and their validation."""

import copy
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from overlaplab.hardware import PROFILES, Hardware, Link, profile, with_link

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


def test_the_four_profiles_are_known_by_their_names():
    assert list(PROFILES) == ["chalk", "h100-nvlink", "h200-nvlink", "ethernet-100g"]
    assert all(profile(name).name == name for name in PROFILES)


def test_every_number_of_a_profile_has_a_source():
    for hw in PROFILES.values():
        assert hw.source and hw.link.source
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
            }


def test_a_profile_of_ones_own_is_returned_as_it_is():
    mine = hardware()
    assert profile(mine) is mine


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'h100'.*chalk, h100-nvlink, h200-nvlink"):
        profile("h100")


def test_something_that_is_no_name_is_a_type_error():
    with pytest.raises(TypeError, match="hardware is int"):
        profile(100)  # type: ignore[arg-type]


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
        ("flops_per_s", {"float32": 10**12}),
        ("flops_per_s", {"default": 0}),
    ],
)
def test_a_bad_number_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(ValueError, match=key):
        hardware(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("latency_ns", -1), ("bytes_per_s", 0), ("algorithm", "tree")],
)
def test_a_bad_link_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(ValueError, match=rf"link\.{key}"):
        replace(LINK, **{key: value})


def test_a_link_that_is_no_link_is_a_type_error():
    with pytest.raises(TypeError, match="link is dict"):
        hardware(link={"latency_ns": 1})


def test_a_profile_cannot_be_changed_behind_our_back():
    rates = {"default": 10**12}
    mine = hardware(flops_per_s=rates)
    rates["default"] = 1
    assert mine.flops_per_s["default"] == 10**12
    with pytest.raises(TypeError):
        mine.flops_per_s["default"] = 1  # type: ignore[index]


def test_a_profile_survives_pickling_and_copying():
    for hw in PROFILES.values():
        assert pickle.loads(pickle.dumps(hw)) == hw
        assert copy.deepcopy(hw) == hw


def test_with_link_changes_what_is_asked_for_and_says_so():
    slow = with_link("chalk", bytes_per_s=5)
    assert (slow.link.latency_ns, slow.link.bytes_per_s) == (1_000, 5)
    assert slow.name == "chalk+link"
    assert "bytes_per_s" in slow.link.source
    assert with_link(slow, latency_ns=7).name == "chalk+link"
    assert with_link("chalk") is profile("chalk")


def test_hardware_and_program_load_neither_torch_nor_numpy():
    code = (
        "import sys, overlaplab.hardware, overlaplab.program\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
