"""`run` refuses what cannot work before anything starts, and shows itself shortly."""

import pickle
import subprocess
import sys
import threading

import pytest
import torch

import overlaplab as ol


def nothing():
    return None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "expected at least 1, got 0"),
        ({"world_size": -2}, ValueError, "expected at least 1, got -2"),
        ({"world_size": 2.0}, TypeError, "expected an int, got 2.0"),
        ({"world_size": True}, TypeError, "expected an int, got True"),
        ({"cluster": "gpu"}, ValueError, "'gpu'; known are 'virtual', 'gloo', 'nccl'"),
        ({"hardware": "tpu"}, ValueError, "'tpu'; known: chalk, h100-nvlink"),
        ({"timeout_s": 0}, ValueError, "expected more than 0, got 0"),
        ({"timeout_s": float("nan")}, ValueError, "expected more than 0, got nan"),
        ({"timeout_s": "9"}, TypeError, "expected an int or a float, got '9'"),
        ({"cluster": "gloo", "fake": True}, ValueError, "use cluster='virtual'"),
        ({"cluster": "gloo", "world_size": 65}, ValueError, "at most 64"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_expected(arguments, error, message):
    with pytest.raises(error, match=".*".join(message.split("; "))):
        ol.run(nothing, **arguments)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"expected a function, got 3 \(int\)"):
        ol.run(3)


def test_absent_gpus_are_counted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ValueError) as caught:
        ol.run(nothing, cluster="nccl", world_size=4)

    assert str(caught.value) == (
        "nccl needs 4 CUDA devices, this machine has 0: use cluster='virtual' or 'gloo'"
    )


def test_a_world_size_that_torchrun_did_not_start_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")

    with pytest.raises(ValueError, match="pass world_size=8"):
        ol.run(nothing, cluster="gloo", world_size=2)


def test_a_run_shows_its_cluster_ranks_step_exposed_time_and_findings():
    run = ol.run(nothing, world_size=3)

    text = repr(run)
    assert text.startswith(
        "Run(virtual (h100-nvlink), 3 ranks, step 0.000 ms, exposed "
    )
    assert text.endswith("no findings)")
    assert "\n" not in text


def test_a_run_of_several_steps_says_that_its_time_is_of_all():
    def two_steps() -> None:
        for _ in range(2):
            with ol.annotate("step"):
                torch.ones(3).add_(1)

    assert ", 2 steps 0." in repr(ol.run(two_steps, world_size=1))


def test_a_timeline_survives_pickling():
    timeline = ol.run(torch.ones, 3).timeline

    assert pickle.loads(pickle.dumps(timeline)) == timeline


def test_importing_the_package_loads_no_torch():
    code = "import sys, overlaplab; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ol.__all__)
def test_every_public_name_is_there(name):
    assert getattr(ol, name) is not None


def test_far_too_many_ranks_are_refused_at_once(monkeypatch):
    started = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    with pytest.raises(ValueError, match=r"100000 .*threads.* at most 1024.*fake=True"):
        ol.run(abs, 1, world_size=10**5)
    assert started == []


def test_a_machine_that_starts_no_more_threads_is_named(monkeypatch):
    start, alive = threading.Thread.start, []

    def start_three(thread):
        if len(alive) == 3:
            raise RuntimeError("can't start new thread")
        start(thread)
        alive.append(thread)

    ol.run(lambda: None)  # what a first run of the process starts is not counted
    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(RuntimeError, match=r"starts 3 of 5.*smaller world_size"):
        ol.run(lambda: None, world_size=5)
    assert not any(thread.is_alive() for thread in alive)
