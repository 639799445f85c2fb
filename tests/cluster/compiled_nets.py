"""Models and backends whose code every rank shares, as an imported module's is."""

from __future__ import annotations

import time
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

functional = torch.ops._c10d_functional


class Net(nn.Module):
    """Two layers; with `sums`, an all-reduce inside the graph."""

    def __init__(self, sums: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.relu(x)
        x = self.second(x)
        if self.sums:
            x = functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
            x = functional.wait_tensor(x)
        return x


class Numbered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + dist.get_rank()


class Counting:
    """A backend that notes what it compiles, and on which ranks that runs.

    Args:
        name: equal backends have equal names.
        trains: by AOTAutograd.
        spins_s: seconds of CPU time for each graph.
    """

    compiled: ClassVar[list[str]] = []
    ran: ClassVar[list[int]] = []

    def __init__(self, name: str, trains: bool = False, spins_s: float = 0) -> None:
        self.name, self.trains, self.spins_s = name, trains, spins_s

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counting) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, graph, inputs):
        if self.trains:
            return aot_autograd(fw_compiler=self._compile)(graph, inputs)
        return self._compile(graph, inputs)

    def _compile(self, graph, inputs):
        self.compiled.append(self.name)
        end = time.process_time() + self.spins_s
        while time.process_time() < end:
            time.perf_counter()

        def run(*args):
            self.ran.append(torch.distributed.get_rank())
            return graph(*args)

        return make_boxed_func(run) if self.trains else run
