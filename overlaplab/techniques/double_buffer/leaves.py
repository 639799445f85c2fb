"""Leaves of a batch: tensors whose bytes can be copied, and what moves itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from overlaplab.techniques.double_buffer.nesting import has_method
from overlaplab.techniques.double_buffer.sources import PLAIN


def is_plain(leaf: Any) -> bool:
    """Whether it is a tensor of the host whose numbers are its bytes."""
    if type(leaf) not in PLAIN or leaf.layout != torch.strided:
        return False
    return leaf.device.type == "cpu" and not leaf.is_quantized


def check_graph(leaf: Tensor) -> None:
    """Refuse what was computed from tensors that require a gradient.

    Raises:
        ValueError: it was.
    """
    if leaf.grad_fn is not None:
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} in a batch was computed from "
            "tensors that require a gradient: the graph behind it would stay on the "
            "host. Repair: detach() it in the loader"
        )


def core(leaf: Tensor) -> Tensor:
    """`leaf` without the dimensions in which it repeats itself."""
    found = leaf.detach()
    if leaf.is_contiguous():
        return found
    for dim, stride in enumerate(leaf.stride()):
        if stride == 0 and leaf.shape[dim] > 1:
            found = found.narrow(dim, 0, 1)
    return found


def like(leaf: Tensor, moved: Tensor) -> Tensor:
    """`moved`, the core of `leaf` elsewhere, as `leaf` was."""
    if moved.shape != leaf.shape:
        moved = moved.expand(leaf.shape)
    if type(leaf) is not Tensor and isinstance(leaf, nn.Parameter):
        return nn.Parameter(moved, leaf.requires_grad)
    return moved.requires_grad_() if leaf.requires_grad else moved


def pin_itself(leaf: Any) -> Any:
    """What its own `pin_memory` returns, if it has one and is no tensor."""
    if isinstance(leaf, Tensor) or not has_method(leaf, "pin_memory"):
        return leaf
    return leaf.pin_memory()


def can_be_recorded(leaf: Any) -> bool:
    """Whether its `record_stream` works, if it has one."""
    if isinstance(leaf, Tensor):
        return leaf.layout == torch.strided and not leaf.is_quantized
    return has_method(leaf, "record_stream")


def move_itself(leaf: Any, device: torch.device) -> Any:
    """What its own `to` returns, if it has one."""
    if not has_method(leaf, "to"):
        return leaf
    try:
        moved = leaf.to(device, non_blocking=True)
    except TypeError:  # it takes only the device
        moved = leaf.to(device)
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        moved.requires_grad_()
    return moved


def version(leaf: Any) -> int:
    """Counts the writes of torch into a tensor."""
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return 0
    return leaf._version
