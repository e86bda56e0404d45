"""Rotary positions and SwiGLU's product."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import KernelBackend, rope, swiglu, using
from dlo_lib.models.llama import apply_rope
from tests.kernels.parity import BACKENDS, check, dtypes_of, random, strided


def angles(seq: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    half = random(seq, dim // 2, seed=7)
    both = torch.cat((half, half), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope(backend):
    for dtype in dtypes_of(backend):
        for make, shape in ((random, (2, 3, 5, 6)), (strided, (1, 2, 7, 4)), (random, (0, 2, 3, 4))):
            cos, sin = angles(*shape[2:], dtype)
            check(
                lambda x: rope(x, cos, sin),  # noqa: B023
                lambda x: apply_rope(x, cos.double(), sin.double()),  # noqa: B023
                [make(*shape, dtype=dtype)], backend,
            )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_of_each_number_of_heads_and_positions(backend):
    """A program rotates a group of heads, or of positions if there are few heads."""
    for heads, seq, dim in ((1, 5, 4), (1, 8, 8), (2, 3, 4), (3, 2, 6), (4, 3, 4), (9, 1, 2)):
        cos, sin = angles(seq, dim, torch.float32)
        for x in (random(2, heads, seq, dim), random(2, seq, heads, dim).transpose(1, 2)):
            check(
                lambda x: rope(x, cos, sin),  # noqa: B023
                lambda x: apply_rope(x, cos.double(), sin.double()),  # noqa: B023
                [x], backend,
            )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_inside_autocast_rounds_once(backend):
    """Angles in fp32 rotate 16-bit heads: attention receives what it receives from PyTorch's operators."""
    cos, sin = angles(17, 64, torch.float32)
    # Triton's interpreter cuts the digits that bf16 does not have. A GPU rounds.
    cuts = backend is KernelBackend.TRITON and not torch.cuda.is_available()
    for dtype in (torch.float16,) if cuts else (torch.bfloat16, torch.float16):
        x = random(2, 3, 17, 64, dtype=dtype)
        with using(backend):
            ours = rope(x, cos, sin)
        wide = apply_rope(x, cos, sin)
        assert (ours.dtype, wide.dtype) == (dtype, torch.float32)
        differing = (ours != wide.to(dtype)).float().mean()
        assert differing < 1e-3, "the order of the sums may change the last bit of an element"
        exact = apply_rope(x.double(), cos.double(), sin.double())
        narrow = apply_rope(x, cos.to(dtype), sin.to(dtype))
        errors = [(found.double() - exact).norm() for found in (ours, wide.to(dtype), narrow)]
        assert errors[0] == pytest.approx(errors[1].item(), rel=1e-2)
        assert errors[2] > 1.3 * errors[0], "angles of 16 bits add their rounding"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_keeps_the_layout_of_heads_and_saves_no_activation(backend):
    x = random(2, 5, 3, 4).transpose(1, 2).requires_grad_()
    cos, sin = angles(5, 4, torch.float32)
    saved = []
    with using(backend), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        y = rope(x, cos, sin)
    assert y.stride() == x.stride()
    assert [tuple(tensor.shape) for tensor in saved] == [(5, 2), (5, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu(backend):
    for dtype in dtypes_of(backend):
        for make, shape in ((random, (3, 1025)), (strided, (3, 5)), (random, (0, 3))):
            inputs = [make(*shape, dtype=dtype, seed=seed) for seed in (0, 1)]
            check(swiglu, lambda gate, up: F.silu(gate) * up, inputs, backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_swiglu_leaves_what_it_reads(backend):
    """The gradient of the output may belong to other operations, and a kept graph reads the inputs again."""
    gate, up, grad = (random(3, 64, seed=seed) for seed in range(3))
    before = [tensor.clone() for tensor in (gate, up, grad)]
    with using(backend):
        y = swiglu(gate.requires_grad_(), up.requires_grad_())
        for _ in range(2):
            y.backward(grad, retain_graph=True)
    assert all(torch.equal(now, then) for now, then in zip((gate, up, grad), before))


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_saves_its_two_inputs_only(backend):
    saved = []
    gate, up = (random(4, 8, seed=seed).requires_grad_() for seed in (0, 1))
    with using(backend), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda kept: kept):
        swiglu(gate, up)
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(torch.ones(3), torch.ones(4)), r"gate and up have shape \(3,\) and \(4,\)"),
        (lambda: rope(torch.ones(1, 2, 3, 5), torch.ones(3, 5), torch.ones(3, 5)), "with an even head_dim"),
        (lambda: rope(torch.ones(1, 2, 3, 4), torch.ones(2, 4), torch.ones(3, 4)), r"cos has shape \(2, 4\)"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
