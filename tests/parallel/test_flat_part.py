"""Runs of elements as boxes: each element once, in the order of memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_lib.parallel.flat_part import FlatPart, boxes


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_hold_each_element_of_the_run_once_and_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).view(shape)
    found = []
    for offsets, sizes in boxes(shape, start, stop):
        box = tensor
        for dim, (offset, size) in enumerate(zip(offsets, sizes)):
            box = box.narrow(dim, offset, size)
        found += box.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(boxes(shape, start, stop))) <= 2 * len(shape) - 1


def test_a_part_of_a_matrix_that_lies_by_columns():
    whole = torch.arange(12).view(4, 3).t()  # (3, 4), columns one behind the other
    part = torch.arange(2, 11)
    described = FlatPart(part, whole.shape, whole.stride(), 2)
    assert described.shape == (3, 4)
    rebuilt = torch.full((3, 4), -1)
    for chunk in described.__create_chunk_list__():
        item = next(
            item
            for item in described.__create_write_items__("x", described)
            if item.tensor_data.chunk == chunk
        )
        values = described.__get_tensor_shard__(item.index)
        rebuilt[tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes))] = (
            values
        )
        assert values.untyped_storage().data_ptr() == part.untyped_storage().data_ptr(), (
            "what is read must land in the part"
        )
    expected = whole.clone()
    expected[(whole < 2) | (whole > 10)] = -1
    assert torch.equal(rebuilt, expected)


def test_it_is_no_tensor_to_compute_with():
    with pytest.raises(NotImplementedError, match="a part of a tensor"):
        FlatPart(torch.ones(3), (2, 3), (3, 1), 1) + 1
