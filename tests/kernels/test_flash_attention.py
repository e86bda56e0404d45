"""FlashAttention, forward and backward."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import FlashAttention, KernelBackend, flash_attention, using
from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import BACKENDS, NO_TRITON, check, close, dtypes_of, random

MODULE = importlib.import_module("dlo_lib.kernels.flash_attention")  # the package has a function of this name
SHAPES = [  # batch, query heads, key heads, queries, keys, head_dim
    (2, 2, 2, 17, 17, 16),
    (1, 4, 2, 33, 33, 24),
    (1, 3, 1, 5, 35, 16),
    (1, 2, 1, 35, 5, 8),
]


def make(shape, dtype=torch.float32):
    batch, heads, kv_heads, queries, keys, dim = shape
    # the strides of heads that are cut from a projection
    q = random(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
    return [q, *(random(batch, keys, kv_heads, dim, dtype=dtype, seed=s).transpose(1, 2) for s in (1, 2))]


def reference(q, k, v, is_causal):
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flash_attention(backend, is_causal, monkeypatch):
    monkeypatch.setattr(MODULE, "TILE", 16)
    for number, shape in enumerate(SHAPES):
        for dtype in dtypes_of(backend) if number == 1 else [torch.float32]:
            for function in (FlashAttention.apply, flash_attention)[: 2 if number == 1 else 1]:
                check(
                    lambda q, k, v: function(q, k, v, is_causal),  # noqa: B023
                    lambda q, k, v: reference(q, k, v, is_causal)[0],
                    make(shape, dtype), backend, factor=4,
                )  # fmt: skip


KERNELS = ("forward", "dq", "dkv")


@contextlib.contextmanager
def trying(**values: int) -> Iterator[None]:
    """Use these constants in the three kernels."""
    from dlo_lib.kernels.triton_code.tuning import trying

    with contextlib.ExitStack() as stack:
        for kernel in KERNELS:
            stack.enter_context(trying(f"flash_attention.{kernel}", values))
        yield


@pytest.mark.parametrize("ahead", [0, 1], ids=["", "ahead"])
@pytest.mark.parametrize("bulk", [0, 1], ids=["pointers", "bulk copies"])
@pytest.mark.parametrize("tiles", [(32, 16), (16, 32)], ids=["32x16", "16x32"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_tiles(backend, tiles, bulk, ahead):
    """Tiles with more queries than keys and fewer; sequences that they divide and do not divide."""
    dtype = torch.bfloat16 if ahead else torch.float32  # no fp32 kernel computes a softmax ahead
    for shape in ((1, 2, 1, 37, 37, 16), (1, 1, 1, 35, 5, 16), (1, 3, 1, 7, 70, 24), (1, 4, 2, 64, 64, 16)):
        for is_causal in (False, True):
            with trying(ROWS=tiles[0], COLS=tiles[1], BULK=bulk, AHEAD=ahead):
                check(
                    lambda q, k, v: flash_attention(q, k, v, is_causal),  # noqa: B023
                    lambda q, k, v: reference(q, k, v, is_causal)[0],  # noqa: B023
                    make(shape, dtype), backend, factor=4,
                )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_head_dims(backend):
    """Head dims that are no power of two, in both forms of loads and in each dtype."""
    for dim in (80, 96, 128):
        for bulk in (0, 1):
            for dtype in (torch.float32, torch.bfloat16):
                with trying(ROWS=32, COLS=32, BULK=bulk):
                    check(
                        lambda q, k, v: flash_attention(q, k, v, True),
                        lambda q, k, v: reference(q, k, v, True)[0],
                        make((1, 2, 1, 33, 33, dim), dtype), backend, factor=4,
                    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_heads_in_several_sections(backend, monkeypatch):
    from dlo_lib.kernels.triton_code import flash_attention as code

    monkeypatch.setattr(code, "L2_BYTES", 2 * 2 * 40 * 16 * 4)  # of 2 of the 3 key heads
    check(
        lambda q, k, v: flash_attention(q, k, v, True),
        lambda q, k, v: reference(q, k, v, True)[0],
        make((1, 6, 3, 40, 40, 16)), backend, factor=4,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_very_small_scores(backend):
    """A lse far below 0, whose exponential overflows, reaches no gradient by the keys after the last."""

    q, k, v = make((1, 1, 1, 19, 19, 16))
    q[..., 0], k[..., 0] = 30, -30  # adds -225 to each score
    for is_causal in (False, True):
        with trying(ROWS=16, COLS=32, BULK=1):
            check(
                lambda q, k, v: flash_attention(q, k, v, is_causal),  # noqa: B023
                lambda q, k, v: reference(q, k, v, is_causal)[0],  # noqa: B023
                (q, k, v), backend, factor=100,
            )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_what_a_bulk_copy_cannot_read(backend):
    """Rows that are not contiguous, not aligned, or expanded are read by pointers, with equal results."""
    q, k, _ = make((1, 2, 1, 20, 20, 16))
    odd = torch.zeros(1, 1, 20, 17)[..., 1:].copy_(k)  # 68 bytes a row, and 4 before the first
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    with using(backend), trying(ROWS=16, COLS=16, BULK=1):
        expected = flash_attention(q, k, k, True)
        for keys in (odd, transposed, k[:, :, :1].expand_as(k)):
            same = expected if keys.stride(2) else flash_attention(q, keys.contiguous(), keys, True)
            torch.testing.assert_close(flash_attention(q, keys, keys, True), same)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_a_tile_is_read_in_bulk_where_the_table_and_the_strides_allow_it():
    from dlo_lib.kernels.triton_code.launch import recorded

    def bulk(q, k, v):
        with using(KernelBackend.TRITON), recorded() as launches:
            out = FlashAttention.apply(q, k, v, True)
            out.backward(torch.empty_like(out))
        return [launch.arguments["BULK"] for launch in launches]

    inputs = [torch.empty(1, 2, 64, 64, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    assert bulk(*inputs) == [False] * 3
    with trying(BULK=1):
        assert bulk(*inputs) == [True] * 3
        strided = torch.empty(1, 2, 64, 65, device="meta", dtype=torch.bfloat16)[..., :64].requires_grad_()
        assert bulk(inputs[0], strided, inputs[2]) == [False, False, True]
        assert bulk(strided, *inputs[1:]) == [True, True, False]


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_a_prepared_launch_passes_what_triton_passes(tmp_path):
    """And no compiled kernel lets the copy engine write to an address that is not aligned."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.attention_without_a_card"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_saved_tensors_are_the_inputs_the_output_and_lse(backend, monkeypatch):
    monkeypatch.setattr(MODULE, "TILE", 4)
    q, k, v = (random(2, 9, 16, seed=seed).requires_grad_() for seed in range(3))  # one head, as in CS336
    with using(backend):
        out = FlashAttention.apply(q, k, v, True)
    saved = out.grad_fn.saved_tensors
    assert [tuple(tensor.shape) for tensor in saved] == [(2, 9, 16)] * 4 + [(2, 9)]
    _, lse = reference(*(tensor.detach().double().unsqueeze(1) for tensor in (q, k, v)), True)
    close(saved[4], lse.squeeze(1), torch.float32, "lse")
    out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_sequences(backend):
    for queries, keys in ((0, 3), (3, 0)):
        q, k, v = (tensor.requires_grad_() for tensor in make((1, 2, 1, queries, keys, 16)))
        with using(backend):
            out = FlashAttention.apply(q, k, v, False)
        out.sum().backward()
        assert out.shape == q.shape
        assert not out.any()
        assert not any(tensor.grad.any() for tensor in (q, k, v))


def test_the_scores_are_never_stored():
    """The memory of the twin, forward and backward, grows with the length and not with its square."""
    from dlo_lib.profiling.tracker import MemoryTracker

    def peak(length: int) -> int:
        q, k, v = (tensor.requires_grad_() for tensor in make((1, 1, 1, length, length, 8)))
        tracker = MemoryTracker()
        with tracker:
            FlashAttention.apply(q, k, v, True).sum().backward()
        sizes = [event.bytes for event in tracker.events()]
        return max(sum(sizes[: end + 1]) for end in range(len(sizes)))

    assert peak(1024) < 2.1 * peak(512)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 5)), "they should be"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "q has 3 heads: use a multiple of the 2 heads"),
        (((2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "they should be"),
    ],
)
def test_wrong_input_is_refused(shapes, message):
    with pytest.raises(UserError, match=message):
        flash_attention(*map(torch.ones, shapes))
    with pytest.raises(UserError, match="different dtypes"):
        flash_attention(*(torch.ones(1, 1, 2, 4, dtype=d) for d in (torch.half, torch.float, torch.float)))


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_more_heads_than_a_grid_has_in_its_second_dimension():
    from dlo_lib.kernels.triton_code.launch import recorded

    q, k, v = (
        torch.empty(2048, heads, 256, 64, device="meta", dtype=torch.bfloat16).requires_grad_()
        for heads in (64, 32, 32)
    )
    with using(KernelBackend.TRITON), recorded() as launches:
        FlashAttention.apply(q, k, v, True).backward(torch.empty_like(q))
    assert len(launches) == 3
    for launch in launches:
        assert math.prod(launch.grid) >= 2048 * 32
        assert all(programs <= 65_535 for programs in launch.grid[1:])
