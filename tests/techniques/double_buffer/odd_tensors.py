"""Tensors of the host that are not plain rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Marked(Tensor):
    """A subclass."""


def odd_tensors() -> dict[str, Tensor]:
    plain = torch.arange(12.0, device="cpu").reshape(3, 4)
    return {
        "transposed": plain.t(),
        "permuted": plain.reshape(2, 3, 2).permute(2, 0, 1),
        "channels last": torch.rand(2, 3, 4, 5, device="cpu").to(
            memory_format=torch.channels_last
        ),
        "expanded": plain[:1].expand(5, 4),
        "expanded scalar": torch.tensor(3.0, device="cpu").expand(2, 2),
        "sliced": plain[:, ::2],
        "overlapping": plain.flatten().unfold(0, 4, 2),
        "no dimension": torch.tensor(7, device="cpu"),
        "no element": torch.empty(0, 3, device="cpu"),
        "conjugated": torch.tensor([1 + 2j], device="cpu").conj(),
        "negative": torch.tensor([1 + 2j], device="cpu").conj().imag,
        "float8": plain.to(torch.float8_e4m3fn),
        "bool": plain > 3,
        "a parameter": nn.Parameter(plain.clone()),
        "a leaf": plain.clone().requires_grad_(),
    }
