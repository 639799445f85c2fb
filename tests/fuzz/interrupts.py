"""Interrupts at random moments of runs, by hand:

    python -m tests.fuzz.interrupts [--cluster gloo] [--number 200] [--seed 0]

After each the next run must be right, and no thread, process, file, setting or lock be
left. On processes (gloo, nccl) some of the interrupted runs start workers, and some the
template that starts them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import overlaplab as ol
from overlaplab.cluster.pool.pool import the_pool
from overlaplab.cluster.run import CLUSTERS

# What processes of a pool begin with, and how often it is drawn.
BEGINNINGS = {"running": 12, "no workers": 6, "nothing": 2}
PR_SET_CHILD_SUBREAPER = 36


def step(number_of_run: int) -> tuple[int, float]:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    model.to(ol.device())
    reducer = ol.BucketedReducer(model)
    for number in range(3):
        with ol.annotate(f"step {number}"):
            model(torch.ones(4, 8, device=ol.device())).square().mean().backward()
            reducer.wait()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return number_of_run, float(gradient.sum())


def settings() -> dict[str, object]:
    """What a run changes and must give back."""
    return {
        "gc": gc.isenabled(),
        "threads": sorted(t.name for t in threading.enumerate()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "num_threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "Tensor.item": torch.Tensor.item,
        "Thread.start": threading.Thread.start,
        "sleep": time.sleep,
        "stdout": sys.stdout,
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "random": hash(torch.random.get_rng_state().numpy().tobytes()),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
    }


def open_files() -> list[str]:
    """What this process has open, without numbers."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{entry}")))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


def children() -> list[str]:
    """Names of the processes below this one that run; orphans come to it, too."""
    below: dict[int, list[tuple[int, str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(") ")
        except OSError:  # it has just ended
            continue
        status, parent = rest.split()[:2]
        if status not in "ZX":
            below.setdefault(int(parent), []).append((int(path.parts[2]), name))
    found, todo = [], [os.getpid()]
    while todo:
        for pid, name in below.get(todo.pop(), ()):
            found.append(name)
            todo.append(pid)
    return sorted(found)


def differences(before: dict[str, object], now: dict[str, object]) -> list[str]:
    return [f"{key}: {now[key]}" for key in before if now[key] != before[key]]


class Fuzz:
    """Runs on one cluster that are interrupted.

    Args:
        cluster: "virtual", "gloo" or "nccl".
        seed: of the moments.
    """

    def __init__(self, cluster: str, seed: int) -> None:
        self.cluster = cluster
        self._draw = random.Random(seed)
        self._beginnings = BEGINNINGS if cluster != "virtual" else {"running": 1}
        self._num_runs = 0
        self.lengths_s: dict[str, float] = {}
        self._right = self._timed("nothing")  # the pool is closed: none starts twice
        for beginning in self._beginnings:
            if beginning not in self.lengths_s:
                self._timed(beginning)
        self.ended = 0

    def run(self) -> tuple[float, ...]:
        """Each rank's value of a new run; a late answer to another is an error."""
        self._num_runs += 1
        values = ol.run(step, self._num_runs, world_size=2, cluster=self.cluster).values
        assert {number for number, _ in values} == {self._num_runs}, values
        return tuple(value for _, value in values)

    def _timed(self, beginning: str) -> tuple[float, ...]:
        """A run that begins so."""
        self.begin(beginning)
        begin = time.perf_counter()
        values = self.run()
        self.lengths_s[beginning] = time.perf_counter() - begin
        return values

    def begin(self, beginning: str) -> None:
        """Let the next run find the workers as `beginning` says."""
        if beginning == "no workers":
            the_pool()._end_workers()
        elif beginning == "nothing":
            the_pool().close()

    def interrupt(self, delay_s: float) -> bool:
        """Whether an interrupt `delay_s` after its start ended the run."""
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        is_over = False
        try:
            timer.start()
            try:
                self.run()
                is_over = True
            finally:
                timer.join()  # an interrupt after the run is none of it
            time.sleep(0.01)
        except KeyboardInterrupt:
            return not is_over
        return False

    def once(self) -> list[str]:
        """What one interrupt left wrong, in words."""
        names, weights = zip(*self._beginnings.items(), strict=True)
        beginning = self._draw.choices(names, weights)[0]
        delay_s = self._draw.uniform(0, 1.2 * self.lengths_s[beginning])
        faults = []
        before, files, processes = settings(), open_files(), children()
        self.begin(beginning)
        try:
            self.ended += self.interrupt(delay_s)
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error}")
        for _ in range(100):  # a thread that was told to end needs a moment
            wrong = differences(before, settings())
            if len(children()) > len(processes):
                wrong.append(f"processes: {children()}")
            if len(open_files()) > len(files):
                wrong.append(f"files: {open_files()}")
            if not wrong:
                break
            time.sleep(0.02)
        faults += wrong
        try:
            if (values := self.run()) != self._right:
                faults.append(f"the next run: {values}")
        except Exception as error:
            faults.append(f"the next run: {type(error).__name__}: {error}")
        now = {"files": open_files(), "processes": children()}
        faults += differences({"files": files, "processes": processes}, now)
        return [f"{beginning}, after {delay_s:.4f} s: {fault}" for fault in faults]


def main(cluster: str, number: int, seed: int) -> int:
    """How many faults `number` interrupts found."""
    libc = ctypes.CDLL(None)  # so that a process that lost its parent is found
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" ignores it
    num_faults = 0
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        the_pool().close()
        fuzz = Fuzz(cluster, seed)
        for count in range(number):
            faults = fuzz.once()
            num_faults += len(faults)
            for fault in faults:
                print(f"{count}: {fault}", flush=True)
        the_pool().close()
        tempfile.tempdir = None
    if left := children():
        num_faults += 1
        print(f"at the end: {left}")
    print(
        f"{cluster}: {number} interrupts, {fuzz.ended} ended a run, {num_faults} "
        f"faults, seed {seed}"
    )
    return num_faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="virtual", choices=CLUSTERS)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(1 if main(given.cluster, given.number, given.seed) else 0)
