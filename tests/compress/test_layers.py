"""Stored and integer layers against plain products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress import int8_linear
from dlo_lib.compress.grid import choose_grid, dequantize, fake_quantize, quantize
from dlo_lib.compress.int8_linear import (
    LARGEST_K,
    Int8Linear,
    StaticInt8Linear,
    fixed_point,
    int8_matmul,
)
from dlo_lib.compress.packing import stored_bytes
from dlo_lib.compress.qat import BitLinear, FakeQuantizedLinear, TernaryLinear, absmean, fake_quantize_ste
from dlo_lib.compress.weight_only import QuantizedEmbedding, QuantizedLinear


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn_linear(
    inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float64
) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias, dtype=dtype)
    linear.weight.data = drawn(outputs, inputs, seed=1, dtype=dtype)
    if bias:
        linear.bias.data = drawn(outputs, seed=2, dtype=dtype)
    return linear


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, None), (4, 3), (8, None), (8, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_stored_layer_equals_the_rounded_weight(
    bits: int, group_size: int | None, symmetric: bool, bias: bool
) -> None:
    linear, x = drawn_linear(15, 7, bias), drawn(2, 3, 15)
    layer = QuantizedLinear.from_linear(linear, bits, group_size, symmetric)
    grid = choose_grid(linear.weight.detach(), bits, symmetric, group_size=group_size or 15)
    expected = x @ fake_quantize(linear.weight.detach(), grid).t()
    expected = expected + linear.bias if bias else expected
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_file_has_the_stored_bytes_and_gives_the_same_layer(
    bits: int, symmetric: bool, tmp_path: Path
) -> None:
    layer = QuantizedLinear.from_linear(drawn_linear(64, 33, dtype=torch.float32), bits, 16, symmetric)
    expected = 33 * 64 * bits // 8 + 33 * 4 * 4 + (0 if symmetric else 33 * 4) + 33 * 4
    assert stored_bytes(layer) == expected
    file = tmp_path / "layer.safetensors"
    save_file(layer.state_dict(), file)
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == header + expected
    other = QuantizedLinear(64, 33, True, bits, 16, symmetric)
    other.load_state_dict(load_file(file))
    x = drawn(5, 64, dtype=torch.float32)
    assert torch.equal(other(x), layer(x))


def test_a_tied_embedding_reads_the_head_and_is_saved_once() -> None:
    head = QuantizedLinear.from_linear(drawn_linear(9, 11, bias=False), 4, 3, symmetric=False)
    embedding = QuantizedEmbedding(head, torch.float64)
    index = torch.tensor([[0, 10], [3, 3]])
    assert torch.equal(embedding(index), head.rows()[index])
    assert not embedding.state_dict()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="4 or 8"):
        QuantizedLinear(8, 8, bits=3)
    with pytest.raises(UserError, match="divisor of 10"):
        QuantizedLinear.from_linear(drawn_linear(10, 2), 4, 4)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (17, 130, 33), (2, 4099, 3), (0, 4, 2), (3, 0, 2)])
def test_the_integer_product_is_exact(
    shape: tuple[int, int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(int8_linear, "_native_is_exact", lambda: False)
    m, k, n = shape
    source = torch.Generator().manual_seed(m * k + n)
    a = torch.randint(-128, 128, (m, k), generator=source, dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), generator=source, dtype=torch.int8)
    for left, right in (
        (a, b),
        (torch.full_like(a, -128), torch.full_like(b, -128)),
        (torch.full_like(a, 127), torch.full_like(b, 127)),
    ):
        found = int8_matmul(left, right)
        assert found.dtype == torch.int32
        assert torch.equal(found.long(), left.long() @ right.long().t())


def test_the_longest_sum_fits_and_a_longer_one_is_refused() -> None:
    longest = torch.full((1, LARGEST_K), -128, dtype=torch.int8)
    assert int(int8_matmul(longest, longest)) == LARGEST_K * 128**2
    longer = torch.zeros(1, LARGEST_K + 1, dtype=torch.int8)
    with pytest.raises(UserError, match="split"):
        int8_matmul(longer, longer)
    with pytest.raises(UserError, match="int8"):
        int8_matmul(longest.int(), longest)
    with pytest.raises(UserError, match=r"\(m, k\)"):
        int8_matmul(longest, longest[:, :3])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("threshold", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_the_int8_layer_equals_its_twin(symmetric: bool, threshold: float | None, bias: bool) -> None:
    linear, x = drawn_linear(13, 6, bias), drawn(2, 5, 13)
    x[0, 1, 4] = 9.0
    x[..., 7] = x[..., 7] * 20 + 30
    weight = fake_quantize(linear.weight.detach(), choose_grid(linear.weight.detach(), 8, dim=0))
    rows = x.reshape(-1, 13)
    outliers = rows.abs().amax(0) >= (threshold or 1e9)
    assert threshold is None or 2 <= int(outliers.sum()) < 13
    regular = torch.where(outliers, 0.0, rows)
    rounded = fake_quantize(regular, choose_grid(regular, 8, symmetric, dim=0))
    expected = rounded @ weight.t() + torch.where(outliers, rows, 0.0) @ weight.t()
    expected = expected + linear.bias if bias else expected
    found = Int8Linear(linear, symmetric, threshold)(x)
    torch.testing.assert_close(found, expected.view(2, 5, 6), rtol=1e-12, atol=1e-11)


def test_outliers_spoil_int8_and_the_decomposition_helps() -> None:
    linear, x = drawn_linear(64, 32), drawn(50, 64)
    x[:, 5] *= 100
    exact = linear(x)
    plain, decomposed = (Int8Linear(linear, threshold=threshold) for threshold in (None, 6.0))
    # The weight of the outlier column has 8 bits too: with that error removed, the rest is 20 times better.
    with torch.no_grad():
        weight = fake_quantize(linear.weight, choose_grid(linear.weight, 8, dim=0))
        same_weights = x @ weight.t() + linear.bias
    errors = [float((layer(x) - same_weights).square().mean().sqrt()) for layer in (plain, decomposed)]
    assert errors[1] < errors[0] / 20
    assert (decomposed(x) - exact).square().mean() < (plain(x) - exact).square().mean()


def test_an_empty_batch_has_an_empty_result() -> None:
    for layer in (Int8Linear(drawn_linear(4, 3)), QuantizedLinear.from_linear(drawn_linear(4, 3))):
        assert layer(torch.zeros(0, 2, 4, dtype=torch.float64)).shape == (0, 2, 3)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_static_form_equals_exact_rational_arithmetic(symmetric: bool) -> None:
    linear, x = drawn_linear(21, 9), drawn(4, 10, 21) + 0.5
    grid_in, grid_out = choose_grid(x, 8, symmetric), choose_grid(linear(x).detach(), 8, symmetric)
    layer = StaticInt8Linear(linear, grid_in, grid_out)
    q = quantize(x, grid_in)
    found = layer(q)
    assert found.dtype == torch.int8
    assert found.shape == (4, 10, 9)
    weight_grid = choose_grid(linear.weight.detach(), 8, dim=0)
    weight_q = quantize(linear.weight.detach(), weight_grid).long()
    scale = weight_grid.scale.flatten() * grid_in.scale
    total = (q.long() - grid_in.zero_point) @ weight_q.t() + (linear.bias / scale).round()
    expected = total * (scale / grid_out.scale) + grid_out.zero_point
    assert (found - expected.clamp(-127 if symmetric else -128, 127)).abs().max() <= 0.5 + 1e-6
    error = (dequantize(found, grid_out) - linear(x)).abs().max()
    assert error < 3 * float(grid_out.scale)


def test_the_static_form_refuses_several_scales() -> None:
    grid = choose_grid(drawn(3, 4), 8)
    with pytest.raises(UserError, match="one scale"):
        StaticInt8Linear(drawn_linear(4, 2), choose_grid(drawn(3, 4), 8, dim=0), grid)


def test_fixed_point_has_31_bits() -> None:
    factor = torch.cat([2.0 ** torch.arange(-31.0, 30, dtype=torch.float64), drawn(500).exp()])
    multiplier, shift = fixed_point(factor)
    assert (multiplier < 2**31).all()
    assert (shift >= 1).all()
    assert (shift <= 62).all()
    torch.testing.assert_close(multiplier * 2.0 ** -shift.double(), factor, rtol=2.0**-31, atol=0)
    assert fixed_point(torch.tensor([1e-30]))[0].item() == 0
    with pytest.raises(UserError, match="factor"):
        fixed_point(torch.tensor([0.0]))


@pytest.mark.parametrize("zero_point", [0, 3])
def test_the_straight_through_gradient_is_clipped(zero_point: int) -> None:
    x = (drawn(200) * 3).requires_grad_()
    scale = torch.tensor(0.5, dtype=torch.float64)
    y = fake_quantize_ste(x, scale, zero_point, -7, 7)
    weights = drawn(200, seed=3)
    (y * weights).sum().backward()
    q = (x.detach() / 0.5).round() + zero_point
    assert torch.equal(y.detach(), (q.clamp(-7, 7) - zero_point) * 0.5)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(q.abs() <= 7, weights, 0.0))
    assert 0 < int((x.grad == 0).sum()) < 200


@pytest.mark.parametrize("group_size", [None, 4])
def test_converted_layers_compute_the_same(group_size: int | None) -> None:
    linear, x = drawn_linear(12, 5), drawn(3, 12)
    trained = FakeQuantizedLinear.from_linear(linear, weight_bits=4, group_size=group_size)
    assert trained.weight is linear.weight
    torch.testing.assert_close(trained.convert()(x), trained(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(UserError, match="4 or 8"):
        FakeQuantizedLinear.from_linear(linear, weight_bits=3).convert()


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_bitnet_is_ternary_and_packs(count: int, bias: bool) -> None:
    layer, x = BitLinear(13, 6, bias, dtype=torch.float64), drawn(2, 4, 13)
    layer.weight.data = drawn(6, 13, seed=5)
    packed = layer.convert(count)
    assert isinstance(packed, TernaryLinear)
    torch.testing.assert_close(packed(x), layer(x), rtol=1e-12, atol=1e-12)
    assert stored_bytes(packed) == 6 * -(-13 // count) + 8 + (48 if bias else 0)
    scale = layer.weight.abs().mean()
    ternary = (layer.weight / scale).round().clamp(-1, 1) * scale
    rows = fake_quantize(x.reshape(-1, 13), choose_grid(x.reshape(-1, 13), 8, dim=0)).view(x.shape)
    expected = rows @ ternary.t() + (layer.bias if bias else 0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, rows.reshape(-1, 13).sum(0).expand(6, 13))


def test_a_layer_of_zeros_trains() -> None:
    assert float(absmean(torch.zeros(2, 2))) == 1
    layer = BitLinear(3, 2, bias=False)
    layer.weight.data.zero_()
    layer(torch.ones(1, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_training_with_rounding_beats_rounding_after_training() -> None:
    """At 2 bits, where a weight is -1, 0 or 1 times a scale."""
    # Correlated inputs: for independent ones, rounding to nearest is the best choice of each weight.
    x = drawn(256, 16) @ drawn(16, 16, seed=6)
    target = x @ drawn(8, 16, seed=4).t()
    linear = nn.Linear(16, 8, bias=False, dtype=torch.float64)
    linear.weight.data = torch.linalg.lstsq(x, target).solution.t().contiguous()
    layer = FakeQuantizedLinear.from_linear(linear, weight_bits=2)
    before = float((layer(x) - target).square().mean().detach())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    best = before
    for _ in range(200):
        loss = (layer(x) - target).square().mean()
        best = min(best, float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert best < 0.8 * before
