"""This rank's piece of a tensor in the form that torch.distributed.checkpoint takes.

It stores boxes under the tensor's own name and full shape. So a checkpoint loads into
any number of ranks, into a model that is not sharded, and as plain tensors; see the
protocol of `torch.distributed._checkpointable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from overlaplab.techniques.model_facts import ParameterInfo
from overlaplab.techniques.zero.boxes import boxes_of_range
from overlaplab.techniques.zero.ring import ShardedUnit


class BoxedTensor(Tensor):
    """A tensor of full shape of which this rank has some boxes; it computes nothing.

    Args:
        flat: the rank's elements, in the tensor's order of memory; stays the owner.
        shape, stride: of the full tensor, dense.
        begin: of `flat` in the full tensor, elements.
    """

    flat: Tensor
    place: tuple[tuple[int, ...], int]
    boxes: list[tuple[tuple[int, ...], Tensor]]

    @staticmethod
    def __new__(
        cls, flat: Tensor, shape: Sequence[int], stride: Sequence[int], begin: int
    ) -> BoxedTensor:
        made: BoxedTensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=flat.dtype, device=flat.device
        )
        order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
        back = [order.index(dim) for dim in range(len(shape))]
        made.flat, made.place = flat, (tuple(stride), begin)
        made.boxes, at = [], 0
        in_memory = [shape[dim] for dim in order]
        for offsets, sizes in boxes_of_range(in_memory, begin, begin + len(flat)):
            box = flat[at : at + torch.Size(sizes).numel()].view(sizes).permute(back)
            made.boxes.append((tuple(offsets[i] for i in back), box))
            at += box.numel()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        if func is torch.ops.aten.new_empty.default:  # a copy that gets its boxes later
            like, device = args[0], (kwargs or {}).get("device") or args[0].device
            flat = torch.empty(0, dtype=like.dtype, device=device)
            return cls(flat, like.shape, [1] * like.dim(), 0)
        raise NotImplementedError(
            f"{func} of a piece of a sharded tensor. It can only be saved, with "
            "torch.distributed.checkpoint; zero.full_state_dict() has full values."
        )

    def with_room(self, dtype: torch.dtype | None = None) -> BoxedTensor:
        """The same part of another tensor, in memory of its own, without values."""
        flat = torch.empty_like(self.flat, dtype=dtype)
        return BoxedTensor(flat, self.shape, *self.place)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        boxes = [f"{tuple(box.shape)} at {offsets}" for offsets, box in self.boxes]
        return f"BoxedTensor({tuple(self.shape)}: {', '.join(boxes) or 'none'} here)"

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(box), self.size()
                ),
            )
            for chunk, (_, box) in zip(
                self.__create_chunk_list__(), self.boxes, strict=True
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), box.size())
            for offsets, box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return dict(self.boxes)[tuple(index.offset)]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What this rank has of a parameter, and of tensors that lie as it does.

    Args:
        info: the parameter.
        held: its piece, which an optimizer updates.
        begin: of the piece in the parameter, elements.
    """

    info: ParameterInfo
    held: nn.Parameter
    begin: int

    @property
    def shape(self) -> torch.Size:
        """Of the full parameter."""
        return self.info.parameter.shape

    def boxed(self, flat: Tensor | None = None) -> BoxedTensor:
        """`flat`, or the piece itself, as a part of a full tensor; a view of it."""
        flat = self.held if flat is None else flat
        return BoxedTensor(flat.detach(), self.shape, self.info.stride, self.begin)


def pieces_of(units: Sequence[ShardedUnit], rank: int) -> Iterator[Piece]:
    """Of every parameter, also of those without an element here."""
    for row in (row for unit in units for row in unit.rows):
        places = row.row.partition.pieces(rank)
        for info, held, place in zip(
            row.row.parameters, row.pieces, places, strict=True
        ):
            yield Piece(info, held, place.in_tensor[0])
