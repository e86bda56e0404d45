"""Plain data passes unchanged; other types are refused by name, and bytes not written by ``pack`` are
refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_lib.grading.checks.codec import (
    HEAD,
    MAX_ITEMS,
    NotPlain,
    enclosed,
    frame_length,
    pack,
    round_trip,
    unpack,
)
from dlo_lib.hardware import gpu
from dlo_lib.models import model_config

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(scalars.filter(lambda key: key == key), inner)
    ),
)


@settings(deadline=None)
@given(plain)
def test_plain_values_arrive_unchanged(value: Any) -> None:
    arrived = round_trip(value)
    assert arrived == value
    assert repr(arrived) == repr(value)  # True is not 1


@pytest.mark.parametrize("value", [[[1, (2.5, "é")], {"a": torch.arange(3)}], [[], {}], None], ids=repr)
def test_a_packed_value_is_enclosed_as_if_it_were_packed_there(value: Any) -> None:
    assert enclosed(pack(value), {"asks": 3, "function": 0}, "call") == pack(
        {"asks": 3, "function": 0, "call": value}
    )


@pytest.mark.parametrize("name", ["tiny", "llama-3.2-3b"])
def test_configurations_arrive(name: str) -> None:
    assert round_trip({"config": model_config(name)}) == {"config": model_config(name)}


def test_gpus_arrive() -> None:
    assert round_trip(gpu("a100-80")) == gpu("a100-80")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_keep_dtype_shape_and_strides(dtype: torch.dtype) -> None:
    whole = (torch.arange(12) % 2).to(dtype).view(3, 4)
    for tensor in (whole, whole.t(), whole[:, 1], whole[:0], whole[0, 0]):
        arrived = round_trip([tensor])[0]
        assert torch.equal(arrived, tensor)
        assert (arrived.dtype, arrived.stride()) == (dtype, tensor.stride())


def test_tensors_arrive_as_copies_without_autograd_history() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    first, second = round_trip([weight, weight])
    first.add_(1)
    assert type(first) is torch.Tensor
    assert not first.requires_grad
    assert torch.equal(second, torch.ones(3))
    assert torch.equal(weight, torch.ones(3))


def test_numbers_and_containers_of_libraries_become_plain_data() -> None:
    arrived = round_trip([numpy.float32(0.5), numpy.int64(3), OrderedDict(a=1), torch.Size([2, 3])])
    assert arrived == [0.5, 3, {"a": 1}, (2, 3)]
    assert [type(value) for value in arrived] == [float, int, dict, tuple]


class AlwaysEqual:
    def __eq__(self, other: object) -> bool:
        return True


class Sneaky(int):
    pass


@pytest.mark.parametrize(
    "value",
    [AlwaysEqual(), Sneaky(3), {1, 2}, lambda: 1, b"bytes", {(1, 2): 3}, 1j],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(NotPlain, match="type"):
        pack({"deep": [value]})


def test_tensors_without_plain_storage_are_refused() -> None:
    for tensor in (
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, dtype=torch.complex64),
    ):
        with pytest.raises(NotPlain, match="tensor of layout"):
            pack(tensor)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlain, match="nested too deep"):
        pack(loop)


def frame(tree: object) -> bytes:
    text = json.dumps(tree).encode()
    return HEAD.pack(len(text), 0) + text


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"$unknown": 1},
        {"$tensor": "t0", "stride": [1]},
        {"$data": "Path", "fields": {}},
        {"$data": "LlamaConfig", "fields": {"hidden": 3}},
        {"$dtype": "os"},
        {"$dict": [[{"$tuple": []}, 1]]},
        {"$dict": [[[1], 1]]},
        {"$tuple": 3},
        "\ud800",
        {"$dict": [["\udfff", 1]]},
        [0] * (MAX_ITEMS + 1),
    ],
    ids=lambda tree: str(tree)[:30],
)
def test_bytes_not_written_by_pack_are_refused(tree: object) -> None:
    with pytest.raises(NotPlain):
        unpack(frame(tree))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 15, HEAD.pack(2, 0) + b"{", HEAD.pack(2, 3) + b"[]abc", HEAD.pack(9, 0) + b"[" * 9]
)
def test_damaged_frames_are_refused(data: bytes) -> None:
    with pytest.raises(NotPlain):
        unpack(data)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_only_not_plain(data: bytes) -> None:
    try:
        value = unpack(data)
    except NotPlain:
        return
    assert unpack(pack(value)) == value, "noise may be a frame, such as that of the number 0"


def test_a_frame_with_a_huge_stated_size_is_refused_before_it_is_read() -> None:
    with pytest.raises(NotPlain, match="too large"):
        frame_length(HEAD.pack(1 << 60, 0))
    assert frame_length(HEAD.pack(1 << 60, 0), limited=False) == HEAD.size + (1 << 60)
    assert frame_length(b"\0" * 3) is None


def tensors_in(head: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_tensor_that_is_named_twice_is_refused() -> None:
    blob = tensors_in({"t0": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, bytes(16))
    once = {"$tensor": "t0", "stride": [1, 2]}
    for tree, good in ((once, True), ([once] * 2, False)):
        text = json.dumps(tree).encode()
        data = HEAD.pack(len(text), len(blob)) + text + blob
        if good:
            assert unpack(data).stride() == (1, 2)
        else:
            with pytest.raises(NotPlain):
                unpack(data)


def test_a_million_tensors_are_refused_before_they_are_read() -> None:
    blob = tensors_in(
        {f"t{number}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for number in range(20_000)}
    )
    with pytest.raises(NotPlain, match="too many tensors"):
        unpack(HEAD.pack(4, len(blob)) + b"null" + blob)


def test_a_dict_whose_keys_collide_is_refused() -> None:
    modulus = (1 << 61) - 1  # of Python's hash of numbers
    assert unpack(frame({"$dict": [[number, 0] for number in range(3000)]})) == dict.fromkeys(range(3000), 0)
    with pytest.raises(NotPlain, match="collide"):
        unpack(frame({"$dict": [[number * modulus, 0] for number in range(3000)]}))


def test_special_numbers_pass() -> None:
    assert math.isnan(round_trip(math.nan))
    assert round_trip([math.inf, -0.0, 2**70]) == [math.inf, -0.0, 2**70]
