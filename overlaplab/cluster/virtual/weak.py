"""A tensor that is not kept alive.

A collective whose peers have not come yet will fill its rank's outputs, but it is not
what keeps them: on a GPU the memory is the allocator's again as soon as the user and
the work let go, and the record says so.
"""

from __future__ import annotations

import weakref

import torch


class WeakTensor:
    """Shape, dtype and strides of a dense tensor, and its bytes while they live."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()
        self._storage = weakref.ref(tensor.untyped_storage())

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def tensor(self) -> torch.Tensor:
        """The tensor, without its autograd history; another one where it is gone."""
        storage = self._storage()
        if storage is None:  # nobody can see what is written there
            return torch.empty_strided(self.shape, self._stride, dtype=self.dtype)
        new = torch.empty(0, dtype=self.dtype)
        return new.set_(storage, self._offset, self.shape, self._stride)
