"""RMSNorm and LayerNorm."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import layer_norm, rms_norm, using
from dlo_lib.models.llama import RMSNorm
from tests.kernels.parity import BACKENDS, check, close, dtypes_of, random, strided

SHAPES = ((random, (5, 13)), (strided, (2, 3, 8)), (random, (0, 4)))


def reference_rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm(backend):
    for dtype in dtypes_of(backend):
        for make, shape in SHAPES:
            inputs = [make(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=3)]
            check(rms_norm, reference_rms, inputs, backend, factor=3)
    check(rms_norm, reference_rms, [random(3, 8, dtype=torch.bfloat16), random(8)], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rms_norm_is_that_of_llama(backend):
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        module = RMSNorm(6, 1e-5, dtype=weight_dtype)
        x = random(4, 6, dtype=dtype)
        with using(backend):
            ours = rms_norm(x, module.weight, 1e-5)
        assert ours.dtype == module(x).dtype
        close(ours, module(x).double(), dtype, "output")


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_norm(backend):
    for dtype in dtypes_of(backend):
        for make, shape in SHAPES:
            weights = [random(shape[-1], dtype=dtype, seed=seed) for seed in (3, 4)]
            check(
                layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b),
                [make(*shape, dtype=dtype), *weights], backend, factor=3,
            )  # fmt: skip
    x, w, b = random(3, 8, dtype=torch.bfloat16), random(8), random(8)
    with using(backend):
        assert layer_norm(x, w, b).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_offset_does_not_change_the_deviation_of_layer_norm(backend):
    x, ones, zeros = random(2, 64) + 1000, torch.ones(64), torch.zeros(64)
    with using(backend):
        close(layer_norm(x, ones, zeros), F.layer_norm(x.double(), (64,)), torch.float32, "output", 50)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_in_groups_of_several_for_each_program(backend):
    """A program of the backward computes several groups of rows; the last group has a row less."""
    for columns in (8, 7):
        for rows in (24, 23, 1):
            inputs = [random(rows, columns), random(columns, seed=1), random(columns, seed=2)]
            check(rms_norm, reference_rms, inputs[:2], backend, factor=4)
            check(layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), inputs, backend, factor=4)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_long_rows_are_loaded_or_converted_again_after_their_sums(backend):
    from dlo_lib.kernels.triton_code.tuning import trying

    for dtype, columns in ((torch.float32, 13), (torch.bfloat16, 16)):
        inputs = [random(9, columns, dtype=dtype), *(random(columns, dtype=dtype, seed=s) for s in (1, 2))]
        for reload, bias in ((1, 0), (2, 1), (3, 0), (3, 1)):
            with trying("norms.backward", {"RELOAD": reload, "BIAS": bias, "STAGES": 1 + bias}):
                check(rms_norm, reference_rms, inputs[:2], backend, factor=4)
                check(layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), inputs, backend, factor=4)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_program_of_the_forward_loads_the_next_rows_while_it_computes(backend):
    from dlo_lib.kernels.triton_code.launch import recorded
    from dlo_lib.kernels.triton_code.tuning import trying

    with trying("norms.forward", {"STAGES": 2, "programs": 1}):
        for dtype, rows, columns in (
            (torch.float32, 23, 13),
            (torch.bfloat16, 24, 16),
            (torch.float32, 1, 8),
        ):
            inputs = [random(rows, columns, dtype=dtype)]
            inputs += [random(columns, dtype=dtype, seed=seed) for seed in (1, 2)]
            check(rms_norm, reference_rms, inputs[:2], backend, factor=4)
            check(layer_norm, lambda x, w, b: F.layer_norm(x, w.shape, w, b), inputs, backend, factor=4)
        with using(backend), recorded() as launches:
            rms_norm(torch.empty(4096, 8192, device="meta"), torch.empty(8192, device="meta"))
    assert launches[0].grid == (132,)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_parts_of_the_weight_gradient_are_few_and_one_kernel_sums_them(backend):
    from dlo_lib.kernels.triton_code.launch import recorded

    x = torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    w, b = (torch.empty(4096, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    with using(backend), recorded() as launches:
        layer_norm(x, w, b, 1e-5).backward(torch.empty_like(x))
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["_forward_kernel", "_backward_kernel", "_sum_parts_kernel"]
    parts = launches[-1].arguments["parts_ptr"]
    assert parts.numel() * parts.element_size() < 0.1 * x.numel() * x.element_size()


def test_rows_that_are_too_long_for_a_program_are_computed_by_the_twin(monkeypatch):
    x, w = random(2, 8), random(8)
    monkeypatch.setattr("dlo_lib.kernels.dispatch.LONGEST_ROW", 7)
    monkeypatch.setattr("dlo_lib.kernels.dispatch.backend_for", lambda x: pytest.fail("a kernel is used"))
    close(rms_norm(x, w), reference_rms(x.double(), w.double()), torch.float32, "output")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm(torch.ones(2, 3), torch.ones(4)), r"weight has shape \(4,\): it should be \(3,\)"),
        (lambda: rms_norm(torch.ones(3), torch.ones(3).int()), "weight is int32"),
        (lambda: layer_norm(torch.ones(3), torch.ones(3), torch.ones(2)), "weight and bias have shape"),
        (lambda: layer_norm(torch.ones(3).int(), torch.ones(3), torch.ones(3)), "x is int32"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
