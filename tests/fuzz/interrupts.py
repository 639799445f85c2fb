"""Interrupts at random moments of runs on the virtual cluster, by hand:

    python -m tests.fuzz.interrupts [NUMBER] [SEED]

After each the next run must be right, and no thread, setting or lock be left.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time

import torch

import overlaplab as ol


def step() -> float:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    reducer = ol.BucketedReducer(model)
    for number in range(3):
        with ol.annotate(f"step {number}"):
            model(torch.ones(4, 8)).square().mean().backward()
            reducer.wait()
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return float(gradient.sum())


def state() -> dict[str, object]:
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
        "signal": signal.getsignal(signal.SIGINT),
        "random": hash(torch.random.get_rng_state().numpy().tobytes()),
    }


def interrupted_after(delay_s: float) -> bool:
    """Whether an interrupt `delay_s` after its start ended the run."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        try:
            ol.run(step, world_size=2)
        finally:
            timer.join()  # an interrupt after the run is none of it
        time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    return False


def main(number: int, seed: int) -> int:
    draw = random.Random(seed)
    right = ol.run(step, world_size=2).values
    begin = time.perf_counter()
    ol.run(step, world_size=2)
    length_s = time.perf_counter() - begin
    before, faults, ended = state(), 0, 0
    for count in range(number):
        delay_s = draw.uniform(0, 1.2 * length_s)
        try:
            ended += interrupted_after(delay_s)
        except BaseException as error:
            faults += 1
            print(f"{count}: after {delay_s:.4f} s: {type(error).__name__}: {error}")
        for _ in range(100):  # a thread that was told to end needs a moment
            after = state()
            if after == before:
                break
            time.sleep(0.02)
        for key, value in before.items():
            if after[key] != value:
                faults += 1
                print(f"{count}: after {delay_s:.4f} s: {key}: {after[key]}")
        before = after
        try:
            assert ol.run(step, world_size=2).values == right
        except Exception as error:
            faults += 1
            print(f"{count}: the next run: {type(error).__name__}: {error}")
    print(f"{number} interrupts, {ended} ended a run, {faults} faults, seed {seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    arguments = [int(a) for a in sys.argv[1:]]
    sys.exit(main(*(arguments + [200, 0][len(arguments) :])))
