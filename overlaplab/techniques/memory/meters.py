"""Meters: live bytes, the most since a mark, and what a function takes.

`PredictedMeter` counts fake tensors and prices operators by a hardware profile: nothing
is computed. `HostMeter` counts real tensors and looks at the clock; `GpuMeter`, of
gpu_meter.py, reads CUDA's counters. All have the same few methods, so that costs are
taken in one way. While one is open, garbage in cycles is freed at no point, or peaks
would differ. Know no model and no policy.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlaplab.hardware import Hardware, compute_ns
from overlaplab.operators import dtype_name, operator, read, tensors_in, written
from overlaplab.operators.fused import launching_as_cuda
from overlaplab.operators.nodes import tensor_bytes
from overlaplab.program.garbage import no_collections

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::convolution"})


class Meter(Protocol):
    """What costs are taken with."""

    computes: bool  # tensors have values, and time is a clock's
    launch_ns: int  # of the last step that was timed, what launching it takes the CPU

    def open(self) -> contextlib.AbstractContextManager[None]:
        """Count while it is open; tensors that are there before are not counted."""
        ...

    def settle(self) -> str:
        """Each kind of block has run once; counting begins. What to note about it."""
        ...

    def adopt(self, tensor: Tensor) -> Tensor:
        """`tensor` as the meter's programs may use it: its memory, or a fake."""
        ...

    def live_bytes(self) -> int:
        """Of what lives, beside a constant."""
        ...

    def peak_bytes(self) -> int:
        """The most since the last `mark`, beside the same constant."""
        ...

    def mark(self) -> None:
        """From here on counts the next peak."""
        ...

    def step_ns(self, step: Callable[[], object]) -> int:
        """What `step` takes, warm."""
        ...

    def rounded(self, num_bytes: int) -> int:
        """As the allocator gives them out."""
        ...

    def workspace_bytes(self) -> int:
        """What libraries keep once matmuls have run."""
        ...


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make, from the first to the last reference."""

    supports_higher_order_operators = True  # what they call comes here as well

    def __init__(self, block_bytes: int, hardware: Hardware | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._block_bytes = block_bytes
        self._hardware = hardware
        self._known: dict[int, int] = {}  # storage -> bytes; 0: not made here
        self.live = self.peak = self.ns = self.launch_ns = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile stays on beneath this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """It is not compiled; to wrap it would import the compiler (3 s)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((*args, *kwargs.values())):
            self._note(tensor, made_here=False)
        if self._hardware is not None:
            _refuse_mixed(func, args)
        out = func(*args, **kwargs)
        outputs = tensors_in((out,))
        for tensor in outputs:
            self._note(tensor, made_here=True)
        if self._hardware is not None:
            self.ns += _price(self._hardware, func, args, kwargs, out, outputs)
            self.launch_ns += _launch_ns(self._hardware, func, args, kwargs)
        return out

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes

    def _note(self, tensor: Tensor, *, made_here: bool) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        num_bytes = self.rounded(storage.nbytes()) if made_here else 0
        self._known[key] = num_bytes
        weakref.finalize(storage, self._free, key).atexit = False
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _refuse_mixed(func: Any, args: Any) -> None:
    """Products of two dtypes, which fail with values and not without."""
    dtypes = {tensor.dtype for tensor in tensors_in(args)}
    if len(dtypes) > 1 and func._schema.name in _PRODUCTS:
        names = " and ".join(sorted(map(str, dtypes)))
        raise TypeError(f"{func._schema.name} of {names}: expected one dtype")


def _price(
    hw: Hardware, func: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]
) -> int:
    """What the kernel takes alone; nothing where there is none."""
    facts = operator(func)
    if not facts.records:
        return 0
    changed = written(facts, args, kwargs)
    needed = read(facts, args, kwargs, changed)
    tensors = [*needed, *changed, *(() if facts.aliases else outputs)]
    flops = 0 if facts.flops is None else int(facts.flops(args, kwargs, out))
    floats = [t for t in tensors if t.is_floating_point()]
    dtype = dtype_name(floats[0].dtype) if floats else ""
    return compute_ns(hw, flops, dtype, sum(map(tensor_bytes, tensors)), facts.name)


def _launch_ns(hw: Hardware, func: Any, args: Any, kwargs: Any) -> int:
    """What the CPU takes to launch it."""
    facts = operator(func)
    if not facts.records:
        return 0
    count = facts.launches
    number = count if isinstance(count, int) else count(args, kwargs)
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and hw.backward_launch_ns is not None:
        return number * hw.backward_launch_ns
    return number * hw.launch_ns


class _CountingMeter:
    """What a counter of storages knows.

    Args:
        counter: is on while the meter is open.
    """

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def settle(self) -> str:
        return ""

    def live_bytes(self) -> int:
        return self._counter.live

    def peak_bytes(self) -> int:
        return self._counter.peak

    def mark(self) -> None:
        self._counter.peak = self._counter.live

    def rounded(self, num_bytes: int) -> int:
        return self._counter.rounded(num_bytes)


class PredictedMeter(_CountingMeter):
    """Fake tensors and a hardware profile. A model on the CPU stands for one on a GPU.

    Args:
        hardware: prices operators; its allocator's blocks and its workspaces count.
    """

    computes = False

    def __init__(self, hardware: Hardware) -> None:
        self.launch_ns = 0
        self._hardware = hardware
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        super().__init__(_Counter(hardware.allocation_bytes, hardware))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        thread = threading.get_ident()
        on_gpu = launching_as_cuda(lambda: threading.get_ident() == thread)
        with no_collections(), on_gpu, self._fakes, self._counter:
            yield

    def adopt(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # where attention is not the kernel that a GPU has
            with _disable_current_modes(), self._fakes:
                like = torch.empty_like(tensor, device="cpu")
                return like.requires_grad_(tensor.requires_grad)
        return self._fakes.from_tensor(tensor, static_shapes=True)

    def step_ns(self, step: Callable[[], object]) -> int:
        before, launched = self._counter.ns, self._counter.launch_ns
        step()
        self.launch_ns = self._counter.launch_ns - launched
        return self._counter.ns - before

    def workspace_bytes(self) -> int:
        return self._hardware.workspace_bytes


class HostMeter(_CountingMeter):
    """Real tensors of a CPU, counted as they are made, and its clock."""

    computes = True
    launch_ns = 0  # its clock has all that the CPU does

    def __init__(self, repeats: int = 3) -> None:
        self._repeats = repeats
        super().__init__(_Counter(1, None))

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with no_collections(), self._counter:
            yield

    def adopt(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    def step_ns(self, step: Callable[[], object]) -> int:
        times = []
        for _ in range(self._repeats + 1):
            start = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - start)
        return int(statistics.median(times[1:]))

    def workspace_bytes(self) -> int:
        return 0
