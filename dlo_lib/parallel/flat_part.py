"""Describes a contiguous range of the elements of a tensor to ``torch.distributed.checkpoint``, as a list of
boxes.

The checkpoint format consists of boxes: an offset and a size in every dimension. A range that begins and ends
within rows consists of the end of a row, several whole rows and the beginning of a row; in n dimensions, of
at most 2 n - 1 boxes. The checkpoint then contains tensors with the shapes of the parameters, which a reader
may shard differently: by rows as in FSDP, or into ranges for another number of ranks.

    3 x 4, elements 2 to 11      . . x x        (0, 2) 1 x 2
                                 x x x x        (1, 0) 1 x 4
                                 x x x .        (2, 0) 1 x 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dlo_lib.parallel.protocol import ShardBox

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the sizes, by dimension."""


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of the elements ``start`` to ``stop`` of a contiguous tensor, in the order of
    memory."""
    if start == stop:
        return
    row, rest = math.prod(shape[1:]), tuple(shape[1:])
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in boxes(rest, begin, end))
        return
    if begin:
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in boxes(rest, begin, row))
        first += 1
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    if end:
        yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in boxes(rest, 0, end))


@dataclass(frozen=True)
class _Chunk:
    where: ChunkStorageMetadata
    values: Tensor


class FlatPart(Tensor):
    """A tensor of which this rank holds the elements ``start`` to ``start + n``. It supports checkpoints
    only.

    Args:
        part: the elements in the order of memory, (n,); or the whole tensor, with its shape.
        shape, strides: those of the whole tensor, which is dense and has at least one dimension.
        start: the first element.

    Raises:
        NotImplementedError: an operator is called on the tensor.
    """

    _chunks: list[_Chunk]
    _properties: TensorProperties

    @staticmethod
    def __new__(cls, part: Tensor, shape: Sequence[int], strides: Sequence[int], start: int) -> FlatPart:
        shape, strides = tuple(shape), tuple(strides)
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        self = make(cls, shape, dtype=part.dtype, device=part.device)
        self._properties = TensorProperties.create_from_tensor(part)
        if part.numel() == math.prod(shape):
            self._chunks = [_Chunk(_at((0,) * len(shape), shape), part)]
            return self
        outer_first = sorted(range(len(shape)), key=lambda dim: -strides[dim])
        back = [outer_first.index(dim) for dim in range(len(shape))]
        self._chunks, taken = [], 0
        for offsets, sizes in boxes([shape[dim] for dim in outer_first], start, start + part.numel()):
            count = math.prod(sizes)
            where = _at([offsets[dim] for dim in back], [sizes[dim] for dim in back])
            self._chunks.append(_Chunk(where, part[taken : taken + count].view(sizes).permute(back)))
            taken += count
        return self

    @classmethod
    def of_boxes(cls, part: Tensor, shape: Sequence[int], held: Sequence[ShardBox]) -> FlatPart:
        """Return a tensor of ``shape`` of which this rank holds the boxes of ``part``, such as the rows of
        FSDP of the columns of tensor parallelism."""
        self = cls(part[:0].view(-1), shape, torch.empty(tuple(shape), device="meta").stride(), 0)
        self._properties = TensorProperties.create_from_tensor(part)
        self._chunks = []
        for box in held:
            values = part
            for dim, (start, size) in enumerate(zip(box.part, box.sizes)):
                values = values.narrow(dim, start, size)
            if values.numel():
                self._chunks.append(_Chunk(_at(box.whole, box.sizes), values))
        return self

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        def item(chunk: _Chunk) -> WriteItem:
            data = TensorWriteData(chunk.where, self._properties, self.shape)
            return WriteItem(MetadataIndex(name, chunk.where.offsets), WriteItemType.SHARD, tensor_data=data)

        return [item(chunk) for chunk in self._chunks]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk.where for chunk in self._chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(chunk.values for chunk in self._chunks if chunk.where.offsets == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a part of a tensor")


def _at(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
