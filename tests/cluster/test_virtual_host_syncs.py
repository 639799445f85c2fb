"""What makes the CPU wait for the GPU is in the record, and holds up the CPU's lane."""

import contextlib
import io
import sys
import threading

import pytest
import torch

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.hardware import find_hardware
from overlaplab.program import resolve


def quiet_print(*values):
    with contextlib.redirect_stdout(io.StringIO()):
        print(*values)


def wait_for_event(_):
    event = streams.Event()
    event.record()
    event.synchronize()


SYNCS = {
    "item": lambda x: x[0].item(),
    "item of bool": lambda x: bool((x > 0).all()),
    "item of if": lambda x: 1 if x[0] > 0 else 2,
    "item of float": lambda x: float(x[0]),
    "item of int": lambda x: int(x[0]),
    "item of max": lambda x: max(x[0], x[1]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "numpy of asarray": lambda x: sys.modules["numpy"].asarray(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "copy_": lambda x: torch.empty(4, device="cpu").copy_(x),
    "print": lambda x: quiet_print(x),
    "print of str": lambda x: str(x),
    "print of format": lambda x: f"{x}",
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero of a mask": lambda x: x[x > 0],
    "synchronize": lambda x: streams.synchronize(),
    "stream.synchronize": lambda x: streams.current_stream().synchronize(),
    "event.synchronize": wait_for_event,
    "stream.query": lambda x: streams.current_stream().query(),
}


@pytest.mark.parametrize("call", SYNCS)
def test_the_cpu_stands_still_until_the_kernel_has_ended(call):
    def step():
        a = torch.ones(256, 256)
        x = (a @ a)[0, :4]
        SYNCS[call](x)
        torch.zeros(2)

    _, program = run_virtual(step, world_size=1)
    timeline = resolve(program, find_hardware("h100-nvlink"))
    wait = next(s for s in timeline.spans if s.name.startswith("wait "))
    kernel = next(s for s in timeline.spans if s.name == "mm")
    later = [s for s in timeline.spans if s.name == "launch zeros"][-1]
    assert wait.name == f"wait {call.split(' of ')[0]}"
    assert wait.lane == "cpu" and kernel.start_ns < kernel.end_ns <= wait.end_ns
    assert wait.end_ns <= later.start_ns


def test_a_text_of_a_tensor_is_one_wait_and_no_kernels():
    def step():
        x = torch.ones(4, 4) * 2
        str(x)

    _, program = run_virtual(step, world_size=1)
    assert [o.name for o in program.ranks[0]] == ["ones", "mul", "print"]


def look(parameter):
    parameter.grad.tolist()


def test_hooks_of_the_backward_pass_are_seen():
    def step():
        weight = torch.ones(2, requires_grad=True)
        weight.register_post_accumulate_grad_hook(look)
        (weight * 2).sum().backward()

    _, program = run_virtual(step, world_size=1)
    waits = [o for o in program.ranks[0] if o.kind == "host_wait"]
    assert [(o.name, o.phase) for o in waits] == [("tolist", "backward")]


def test_threads_that_are_no_rank_keep_torchs_own_calls():
    go, done, seen = threading.Event(), threading.Event(), []

    def look():
        go.wait(30)
        x = torch.ones(2, device="cpu")
        seen.append((x.device, x.cpu() is x, x.tolist()))
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    run_virtual(_let, (_Events(go, done),), world_size=1)
    thread.join()
    assert seen == [(torch.device("cpu"), True, [1, 1])]


class _Events:
    def __init__(self, go, done):
        self.go, self.done = go, done

    def __deepcopy__(self, memo):
        return self


def _let(events):
    events.go.set()
    assert events.done.wait(30)
