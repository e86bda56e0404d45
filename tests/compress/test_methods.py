"""GPTQ, AWQ and SmoothQuant against plain forms."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress.awq import search_awq_factors
from dlo_lib.compress.calibration import channel_absmax
from dlo_lib.compress.gptq import gptq_quantize, hessian, inverse_factor
from dlo_lib.compress.grid import choose_grid, dequantize, fake_quantize, quantize
from dlo_lib.compress.int8_linear import Int8Linear
from dlo_lib.compress.smoothquant import fold_factors, smoothing_factors


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def correlated(tokens: int, n: int, seed: int = 0) -> Tensor:
    return drawn(tokens, n, seed=seed) @ drawn(n, n, seed=seed + 100)


def error_of(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    return float((x @ (rounded - weight).t()).square().sum())


def plain_gptq(
    weight: Tensor, h: Tensor, bits: int, damping: float, order: list[int], group_size: int | None = None
) -> Tensor:
    """Optimal brain surgeon with one explicit inverse for each column. The grid of each row, or of each group
    of it, comes from the weights as they are when its first column is reached."""
    h = h + damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    grid, rest, out = choose_grid(weight, bits, dim=0), weight.clone(), weight.clone()
    for step, column in enumerate(order):
        if group_size and column % group_size == 0:
            grid = choose_grid(rest[:, column : column + group_size], bits, dim=0)
        inverse = torch.linalg.inv(h[order[step:]][:, order[step:]])
        out[:, column] = fake_quantize(rest[:, [column]], grid)[:, 0]
        error = (rest[:, column] - out[:, column]) / inverse[0, 0]
        rest[:, order[step:]] -= error[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_equals_optimal_brain_surgeon(bits: int, act_order: bool) -> None:
    weight, h = drawn(6, 11), hessian(correlated(40, 11))
    order = h.diagonal().argsort(descending=True).tolist() if act_order else list(range(11))
    q, grid = gptq_quantize(weight, h, bits, act_order=act_order)
    expected = plain_gptq(weight, h, bits, 0.01, order)
    torch.testing.assert_close(dequantize(q, grid), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_the_grid_of_a_group_fits_its_corrected_weights(group_size: int) -> None:
    weight, h = drawn(6, 12), hessian(correlated(40, 12))
    q, grid = gptq_quantize(weight, h, 3, group_size)
    expected = plain_gptq(weight, h, 3, 0.01, list(range(12)), group_size)
    torch.testing.assert_close(dequantize(q, grid), expected, rtol=1e-9, atol=1e-9)


def test_the_correction_of_one_column_is_the_least_squares_solution() -> None:
    """The rest of the row is what minimises the error once the first column is rounded."""
    x, weight = correlated(30, 5), drawn(1, 5)
    factor = inverse_factor(hessian(x), damping=0)
    rounded = fake_quantize(weight[:, :1], choose_grid(weight, 3))
    error = (weight[0, 0] - rounded[0, 0]) / factor[0, 0]
    corrected = weight[0, 1:] - error * factor[0, 1:]
    missing = x @ weight[0] - x[:, 0] * rounded[0, 0]
    torch.testing.assert_close(corrected, torch.linalg.lstsq(x[:, 1:], missing).solution)


def test_one_column_is_rounded_to_nearest_and_two_reach_the_best_pair_of_the_second() -> None:
    x, weight = correlated(20, 2), drawn(8, 2)
    h = hessian(x)
    single, grid = gptq_quantize(weight[:, :1], h[:1, :1], 3)
    assert torch.equal(single, quantize(weight[:, :1], choose_grid(weight[:, :1], 3, dim=0)))
    q, grid = gptq_quantize(weight, h, 3, damping=0)
    for row in range(8):
        scale = float(grid.scale[row, 0])
        first = float(q[row, 0])
        tried = [
            error_of(x, weight[row : row + 1], scale * torch.tensor([[first, second]], dtype=x.dtype))
            for second in range(-3, 4)
        ]
        assert int(q[row, 1]) == tried.index(min(tried)) - 3


def test_gptq_is_between_the_best_integers_and_rounding() -> None:
    """All 7^4 rows of a small grid."""
    x, weight = correlated(20, 4), drawn(10, 4)
    grid = choose_grid(weight, 3, dim=0)
    choices = torch.tensor(list(itertools.product(range(-3, 4), repeat=4)), dtype=x.dtype)
    q, _ = gptq_quantize(weight, hessian(x), 3)
    best = gptq = nearest = 0.0
    for row in range(10):
        scale, target = grid.scale[row], x @ weight[row]
        errors = (choices * scale @ x.t() - target).square().sum(-1)
        best += float(errors.min())
        gptq += error_of(x, weight[[row]], q[[row]] * scale)
        nearest += error_of(x, weight[[row]], fake_quantize(weight, grid)[[row]])
    assert best <= gptq < nearest


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group_size", [None, 8, 3])
def test_gptq_beats_rounding_on_correlated_inputs(
    group_size: int | None, act_order: bool, symmetric: bool
) -> None:
    gptq = plain = 0.0
    for seed in range(5):
        weight, x = drawn(12, 24, seed=50 + seed), correlated(200, 24, seed)
        q, grid = gptq_quantize(weight, hessian(x), 3, group_size, symmetric, act_order=act_order)
        nearest = fake_quantize(weight, choose_grid(weight, 3, symmetric, group_size=group_size or 24))
        gptq += error_of(x, weight, dequantize(q, grid))
        plain += error_of(x, weight, nearest)
    assert gptq < 0.8 * plain


def test_gptq_with_independent_inputs_is_rounding_and_unread_columns_are_zero() -> None:
    weight = drawn(5, 6)
    q, _ = gptq_quantize(weight, torch.eye(6, dtype=weight.dtype), 4)
    assert torch.equal(q, quantize(weight, choose_grid(weight, 4, dim=0)))
    x = correlated(30, 6)
    x[:, 2] = 0
    q, grid = gptq_quantize(weight, hessian(x), 4)
    assert not q[:, 2].any()
    assert dequantize(q, grid).isfinite().all()


def test_gptq_refuses_bad_input() -> None:
    weight, h = drawn(3, 4), hessian(correlated(9, 4))
    with pytest.raises(UserError, match="divisor"):
        gptq_quantize(weight, h, 4, 3)
    with pytest.raises(UserError, match="hessian"):
        gptq_quantize(weight, h[:3], 4)
    with pytest.raises(UserError, match="positive definite"):
        gptq_quantize(weight, -h, 4)
    with pytest.raises(UserError, match="NaN"):
        gptq_quantize(weight, h * math.nan, 4)


def outlier_inputs(tokens: int, n: int) -> Tensor:
    x = drawn(tokens, n)
    x[:, [1, n - 2]] *= 60
    return x


class Pair(nn.Module):
    """A norm and two matrices that read it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, dtype=torch.float64)
        self.norm.weight.data = drawn(16, seed=1)
        self.norm.weight.data[[1, 14]] *= 60
        self.norm.bias.data = drawn(16, seed=2)
        self.first, self.second = (nn.Linear(16, out, dtype=torch.float64) for out in (8, 5))
        self.first.weight.data, self.second.weight.data = drawn(8, 16, seed=3), drawn(5, 16, seed=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat((self.first(x), self.second(x)), -1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_smoothing_keeps_the_function_and_balances_the_ranges(alpha: float) -> None:
    pair, x = Pair(), drawn(50, 16)
    before, inputs = pair(x).detach(), pair.norm(x).detach()
    weights = [pair.first.weight, pair.second.weight]
    factors = smoothing_factors(channel_absmax(inputs), weights, alpha)
    largest_weight = torch.cat(weights).abs().amax(0).detach()
    torch.testing.assert_close(factors, inputs.abs().amax(0) ** alpha / largest_weight ** (1 - alpha))
    fold_factors(pair.norm, [pair.first, pair.second], factors)
    torch.testing.assert_close(pair(x).detach(), before, rtol=1e-12, atol=1e-11)
    if alpha == 0.5:
        after = pair.norm(x).detach().abs().amax(0)
        torch.testing.assert_close(after, torch.cat(weights).abs().amax(0).detach())


def test_smoothing_reduces_the_error_of_int8_with_outliers() -> None:
    pair, x = Pair(), drawn(50, 16)
    exact = pair(x).detach()

    def error(model: Pair) -> float:
        inputs = model.norm(x).detach()
        found = torch.cat([Int8Linear(linear)(inputs) for linear in (model.first, model.second)], -1)
        return float((found - exact).square().mean())

    smoothed = copy.deepcopy(pair)
    weights = [smoothed.first.weight, smoothed.second.weight]
    factors = smoothing_factors(channel_absmax(pair.norm(x)), weights)
    fold_factors(smoothed.norm, [smoothed.first, smoothed.second], factors)
    assert error(smoothed) < error(pair) / 4


def test_factors_of_unused_channels_are_finite_and_bad_ones_refused() -> None:
    factors = smoothing_factors(torch.tensor([0.0, 1.0]), [torch.tensor([[1.0, 0.0]])])
    assert factors.isfinite().all()
    assert (factors > 0).all()
    with pytest.raises(UserError, match="alpha"):
        smoothing_factors(factors, [factors[None]], 1.5)
    with pytest.raises(UserError, match="channels"):
        smoothing_factors(factors, [torch.ones(2, 3)])
    with pytest.raises(UserError, match="positive"):
        fold_factors(nn.LayerNorm(2), [], torch.tensor([1.0, 0.0]))


def test_awq_is_the_best_exponent_and_beats_rounding_with_outliers() -> None:
    x, weights = outlier_inputs(100, 16), [drawn(9, 16, seed=1), drawn(4, 16, seed=2)]
    factors, exponent = search_awq_factors(x, weights, 3, 8, steps=10)

    def error(s: Tensor) -> float:
        rounded = [fake_quantize(w * s, choose_grid(w * s, 3, group_size=8)) / s for w in weights]
        return sum(error_of(x, w, r) for w, r in zip(weights, rounded, strict=True))

    mean = x.abs().mean(0)
    tried = [error(mean ** (step / 10)) for step in range(11)]
    assert exponent == tried.index(min(tried)) / 10
    assert error(factors) == pytest.approx(min(tried), rel=1e-9)
    assert min(tried) < tried[0] / 4


def test_awq_refuses_bad_input() -> None:
    with pytest.raises(UserError, match="at least one token"):
        search_awq_factors(torch.zeros(0, 4), [torch.zeros(2, 4)])
    with pytest.raises(UserError, match="weights"):
        search_awq_factors(torch.zeros(1, 4), [torch.zeros(2, 3)])
