"""Profiles as files: what is written comes back, what is wrong is named."""

import json
import os
from dataclasses import replace

import pytest

from overlaplab.hardware import (
    PROFILES,
    Link,
    find_hardware,
    read_profile,
    write_profile,
)

MEASURED = replace(
    find_hardware("h100-ib400"),
    name="mine",
    link=Link(5, 10**9, source="here", hop_ns=3, times=((1, 9), (1_000, 70))),
    points={"flops:mm:bfloat16": ((10, 20), (30, 40)), "bytes": ((1, 1),)},
    backward_launch_ns=9_000,
    network_staged=True,
    contention={"matmul": (900, 350), "norm, high priority": (1000, 600)},
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.json"
    write_profile(MEASURED, path)
    return path


def edit(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.mark.parametrize("hw", [*PROFILES.values(), MEASURED], ids=lambda hw: hw.name)
def test_what_is_written_comes_back_equal(hw, tmp_path):
    write_profile(hw, tmp_path / "hw.json")
    assert read_profile(tmp_path / "hw.json") == hw


def test_the_path_of_a_file_serves_as_a_name(file):
    assert find_hardware(str(file)) == MEASURED


def test_what_has_a_default_may_be_left_out(tmp_path):
    path = tmp_path / "short.json"
    path.write_text(
        """{"name": "short", "flops_per_s": {"default": 1}, "memory_bytes_per_s": 2,
        "kernel_floor_ns": 0, "launch_ns": 0, "collective_launch_ns": 0,
        "link": {"latency_ns": 3, "bytes_per_s": 4}}"""
    )
    hw = read_profile(path)
    assert (hw.link, hw.compute_rate_permille, hw.network) == (Link(3, 4), 1000, None)


def remove(*path):
    def change(record):
        for key in path[:-1]:
            record = record[key]
        del record[path[-1]]

    return change


def put(value, *path):
    def change(record):
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("memory_bytes_per_s"), "memory_bytes_per_s is missing"),
        (remove("link"), "link is missing"),
        (remove("link", "latency_ns"), r"link\.latency_ns is missing"),
        (remove("network", "bytes_per_s"), r"network\.bytes_per_s is missing"),
        (remove("flops_per_s", "default"), "flops_per_s has no 'default'"),
        (put(-5, "launch_ns"), "launch_ns is -5; expected at least 0"),
        (put(0, "host_bytes_per_s"), "host_bytes_per_s is 0; expected at least 1"),
        (put(1.5, "launch_ns"), r"launch_ns is 1\.5; expected an integer"),
        (put("15", "launch_ns"), "launch_ns is '15'; expected an integer"),
        (put(None, "launch_ns"), "launch_ns is None; expected an integer"),
        (put(True, "launch_ns"), "launch_ns is True; expected an integer"),
        (put(float("nan"), "launch_ns"), "launch_ns is nan; expected an integer"),
        (put(-1, "flops_per_s", "float32"), r"flops_per_s\['float32'\] is -1"),
        (put(-1, "link", "hop_ns"), r"link\.hop_ns is -1"),
        (put(0, "network", "bytes_per_s"), r"network\.bytes_per_s is 0"),
        (put([[2, 1], [1, 2]], "link", "times"), r"link\.times: .*point 1"),
        (put([[1]], "points", "bytes"), r"points\['bytes'\]: .*point 0 is \[1\]"),
        (
            put([1, 1], "contention", "gemm"),
            r"contention\['gemm'\]: .*matmul; matmul, h",
        ),
        (put([[1, 1]], "points", "byte"), r"points\['byte'\]: expected a key"),
        (put(7, "points"), "points is 7; expected a mapping"),
        (put(7, "link"), "link is 7; expected an object"),
        (put([], "flops_per_s"), r"flops_per_s is \[\]; expected a mapping"),
        (put(1, "lunch_ns"), "unknown key 'lunch_ns'; did you mean 'launch_ns'"),
        (put(1, "link", "speed"), r"unknown key 'link\.speed'; known: latency_ns, b"),
        (put(None, "network"), "gpus_per_node is 8 and network is None"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_the_file_and_the_key(
    file, change, message
):
    edit(file, change)
    with pytest.raises(ValueError, match=rf"mine\.json: {message}"):
        find_hardware(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: not JSON"),
        ('{\n  "name": mine\n}', "line 2, column 11: not JSON"),
        ('{"name": "a"', r"line 1, column 13: not JSON"),
        ("[1]", r"the profile is \[1\]; expected an object"),
        ('{"name": "a", "name": "b"}', "key 'name' is there twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["empty", "bare word", "cut off", "list", "twice", "deep"],
)
def test_what_is_no_profile_at_all_is_told_by_line_and_column(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"bad\.json.*{message}"):
        read_profile(path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ValueError, match=r"bad\.json: .*UTF-8"):
        read_profile(path)


def test_a_file_that_is_not_there_is_answered_with_the_known_names(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json' cannot be read: No such.*chalk"):
        find_hardware(str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError):
        read_profile(tmp_path / "none.json")


def test_a_write_that_breaks_leaves_the_old_file_and_nothing_else(file, monkeypatch):
    def broken(old, new):
        raise OSError("disk full")

    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_profile(find_hardware("chalk"), file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_something_that_is_no_profile_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="hw is str; expected"):
        write_profile("chalk", tmp_path / "hw.json")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
