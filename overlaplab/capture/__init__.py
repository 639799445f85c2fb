"""A whole training step, reducer included, as one CUDA graph: `ol.capture_step`.

Where a step is launch-bound, the CPU that hands out operators is the bottleneck and
hooks cost as much as they hide. A graph is launched once a step. It repeats exactly
what was captured: same shapes, same memory, no decision of the CPU. This module
checks that, and refuses with the reason where it is not so.

Method: PyTorch's whole-network capture (torch.cuda.graph), with collectives inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from overlaplab import streams
from overlaplab.errors import CaptureError
from overlaplab.step_members import StepMember, members

__all__ = ["CapturedStep", "capture_step"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Gradient:
    """`.grad` of one parameter when the capture began and when it ended."""

    name: str
    parameter: nn.Parameter
    before: Tensor | None
    after: Tensor | None


class CapturedStep(Generic[P, R]):
    """What `capture_step` returns: call it as you would call the step."""

    def __init__(self, step: Callable[P, R], num_warmup: int) -> None:
        self._step = step
        self._warmups_left = num_warmup
        self._stream = streams.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._layout: Any = None
        self._result: Any = None
        self._members: list[StepMember] = []
        self._gradients: list[_Gradient] = []

    @property
    def captured(self) -> bool:
        """Whether the next call replays."""
        return self._graph is not None

    def release(self) -> None:
        """Give the graph and its memory back; the step cannot be called again."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._result, self._inputs, self._gradients = None, None, [], []
        self._warmups_left = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step: eagerly during the warm-up, then by replay.

        Returns:
            What the step returned. Tensors in it are overwritten by the next call.

        Raises:
            CaptureError: the step cannot be captured, or this call differs from the
                captured one. The step that found a host sync has been run.
        """
        inputs, layout = tree_flatten((args, kwargs))
        self._check_inputs(inputs, layout)
        if self._graph is None:
            if self._warmups_left:
                return self._warm_up(args, kwargs)
            self._capture(inputs, layout)
        else:
            self._check_gradients()
            for static, new in zip(self._inputs, inputs, strict=True):
                if isinstance(static, Tensor) and static is not new:
                    static.copy_(new, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()
        for gradient in self._gradients:
            gradient.parameter.grad = gradient.after
        result: R = self._result
        return result

    def _warm_up(self, args: Any, kwargs: Any) -> R:
        """One eager step on a side stream, as the capture will run it.

        Lazy set-up (communicators, cuBLAS workspaces) must be over before a capture.
        The last one listens for operations that make the CPU wait.
        """
        self._warmups_left -= 1
        steps = [(member, member.num_steps) for member in members()]
        current = streams.current_stream()
        self._stream.wait_stream(current)
        with streams.stream(self._stream):
            if self._warmups_left:
                result = self._step(*args, **kwargs)
                syncs: list[str] = []
            else:
                result, syncs = _listen_for_syncs(self._step, args, kwargs)
        current.wait_stream(self._stream)
        self._members = [m for m, before in steps if m.num_steps > before]
        if syncs:
            self._warmups_left = 1  # the next call listens again
            raise CaptureError(
                "the step makes the CPU wait for the GPU, which a graph cannot do: "
                f"{'; '.join(syncs)}. Move .item(), .cpu(), prints of tensors and "
                "copies from pageable memory out of the step. (A reducer waits where "
                "a parameter gets no gradient.)"
            )
        return result

    def _capture(self, inputs: list[Any], layout: Any) -> None:
        static = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        args, kwargs = tree_unflatten(static, layout)
        named = [pair for member in self._members for pair in member.named_parameters()]
        before = [parameter.grad for _, parameter in named]
        steps = [member.num_steps for member in self._members]
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (NCCL's watchdog) may query events meanwhile.
            with torch.cuda.graph(
                graph, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = self._step(*args, **kwargs)
        except Exception as error:
            for member in self._members:
                member.abandon_step()
            raise CaptureError(
                f"the step cannot be captured: {str(error).splitlines()[0]}"
            ) from error
        for member, num_steps in zip(self._members, steps, strict=True):
            if member.num_steps != num_steps + 1:
                raise CaptureError(
                    f"a {type(member).__name__} finished "
                    f"{member.num_steps - num_steps} steps in the captured one; "
                    "expected 1. Call backward() and reducer.wait() in the step."
                )
        self._gradients = [
            _Gradient(name, parameter, old, parameter.grad)
            for (name, parameter), old in zip(named, before, strict=True)
        ]
        self._graph, self._inputs, self._result = graph, static, result

    def _check_inputs(self, inputs: list[Any], layout: Any) -> None:
        """Every call must look like the first."""
        if self._layout is None:
            self._layout = (layout, [_describe(x) for x in inputs])
            return
        known_layout, known = self._layout
        if layout != known_layout:
            raise CaptureError(
                f"the step was called with arguments {layout}, before with "
                f"{known_layout}. Capture one step for each."
            )
        for i, (value, expected) in enumerate(zip(inputs, known, strict=True)):
            if _describe(value) != expected:
                raise CaptureError(
                    f"argument {i} is {_describe(value)}; the captured step has "
                    f"{expected}. Pad the batch (drop_last), or capture another step."
                )

    def _check_gradients(self) -> None:
        """The graph writes to fixed memory: `.grad` must be what it was."""
        for g in self._gradients:
            now = g.parameter.grad
            if g.before is None and now is not None and g.after is not None:
                raise CaptureError(
                    f"{g.name}.grad is not None, but the step was captured with None: "
                    "gradients would be overwritten, not accumulated. Zero them in "
                    "the step, or before every call."
                )
            if g.before is not None and g.before is g.after and now is not g.before:
                raise CaptureError(
                    f"{g.name}.grad is another tensor than at the capture, and the "
                    "graph adds to that one. Use zero_grad(set_to_none=False), or "
                    "zero the gradients in the step."
                )


def capture_step(step: Callable[P, R], *, num_warmup: int = 3) -> CapturedStep[P, R]:
    """Run a training step as one CUDA graph, collectives included.

    The first `num_warmup` calls run the step as it is, on a side stream; the next one
    captures it; that one and all later ones replay. Each call is exactly one step, so
    an optimizer in the step stays right. New inputs are copied into the captured
    ones. The reducers that the step uses (whatever has joined
    `overlaplab.step_members`) are watched: they must finish one step each.

    Args:
        step: forward, backward, `reducer.wait()` and, if you like, the optimizer
            (`capturable=True` for Adam). Of several micro-batches, all backwards but
            the last inside `reducer.no_sync()`. Tensor arguments must keep shape and
            dtype, others their value.
        num_warmup: eager calls, at least 1.

    Returns:
        A callable with the signature of `step`.

    Raises:
        CaptureError: not on CUDA, or with a backend whose works block the CPU; later,
            by calls: a host sync in the step, changed inputs, replaced gradients.
    """
    if num_warmup < 1:
        raise ValueError(f"num_warmup is {num_warmup}; expected 1 or more")
    if streams.device().type != "cuda":
        backend = dist.get_backend() if dist.is_initialized() else "none"
        raise CaptureError(
            f"a CUDA graph needs CUDA; this rank runs on {streams.device()} (process "
            f'group: {backend}). Use cluster="nccl" on a machine with GPUs.'
        )
    return CapturedStep(step, num_warmup)


def _listen_for_syncs(
    step: Callable[..., R], args: Any, kwargs: Any
) -> tuple[R, list[str]]:
    """Run `step`; also where it made the CPU wait, as "file:line"."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = step(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    syncs: list[str] = []
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            syncs.append(f"{warning.filename}:{warning.lineno}")
        elif "debug mode is a prototype" not in str(warning.message):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    return result, list(dict.fromkeys(syncs))


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} on {value.device}"
