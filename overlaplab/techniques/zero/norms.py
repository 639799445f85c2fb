"""The norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def clip_by_norm(
    pieces: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for gradients of which each rank has a part.

    Args:
        pieces: this rank's; an element is on one rank only.
        max_norm: what the norm of all is scaled down to.
        norm_type: 2, another positive number, or inf.
        group: the ranks. Collective.

    Returns:
        The norm before, a scalar, equal on all ranks; in float64 if a gradient is.

    Raises:
        ValueError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; expected a positive number or inf")
    grads = [piece.grad for piece in pieces if piece.grad is not None and len(piece)]
    dtype = torch.float32
    if any(p.dtype in (torch.float64, torch.complex128) for p in pieces):
        dtype = torch.float64
    total = torch.zeros((), dtype=dtype, device=pieces[0].device)
    if grads:
        norms = torch._foreach_norm(grads, norm_type)
        together = torch.stack([norm.to(dtype) for norm in norms])
        total = torch.linalg.vector_norm(together, norm_type)
    if math.isinf(norm_type):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    else:
        total = total.pow(norm_type)
        dist.all_reduce(total, group=group)
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if grads:
        torch._foreach_mul_(grads, scale)
    return total
