"""Integer grids, packing and calibration against plain forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.compress.calibration import (
    HistogramObserver,
    MinMaxObserver,
    MSEObserver,
    PercentileObserver,
    channel_absmax,
)
from dlo_lib.compress.grid import (
    choose_grid,
    dequantize,
    fake_quantize,
    grid_from_range,
    integer_range,
    quantize,
)
from dlo_lib.compress.packing import pack_int4, pack_ternary, stored_bytes, unpack_int4, unpack_ternary


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain(values: list[float], bits: int, symmetric: bool) -> list[float]:
    """Round to a grid with Python's numbers, one by one."""
    low, high = min([*values, 0.0]), max([*values, 0.0])
    if low == high == 0:
        return values
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = max(-low, high) / most
        return [max(-most, min(most, round(value / scale))) * scale for value in values]
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = high / (most - least) - low / (most - least)
    zero = max(least, min(most, round(least - low / scale)))
    return [(max(least, min(most, round(value / scale) + zero)) - zero) * scale for value in values]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounding_equals_the_formula(bits: int, symmetric: bool) -> None:
    x = drawn(6, 15) + 0.4
    parts: dict[str, tuple[dict[str, int], Tensor]] = {
        "tensor": ({}, x.reshape(1, -1)),
        "rows": ({"dim": 0}, x),
        "columns": ({"dim": -1}, x.t()),
        "groups": ({"group_size": 5}, x.reshape(-1, 5)),
    }
    for options, lines in parts.values():
        found = fake_quantize(x, choose_grid(x, bits, symmetric, **options))
        expected = torch.tensor([plain(line, bits, symmetric) for line in lines.tolist()], dtype=x.dtype)
        expected = expected.t() if options == {"dim": -1} else expected.reshape(x.shape)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_is_exact_and_errors_are_at_most_half_a_step(symmetric: bool) -> None:
    x = drawn(4, 12).abs() + 0.1
    x[0, 0] = 0
    grid = choose_grid(x, 4, symmetric, group_size=3)
    error = (fake_quantize(x, grid) - x).abs().unflatten(-1, (-1, 3))
    assert error[0, 0, 0] == 0
    # The zero-point of an asymmetric grid is rounded, which moves its ends by up to half a step.
    assert (error <= grid.scale.unsqueeze(-1) * (0.5 if symmetric else 1.0) * (1 + 1e-12)).all()


def test_each_bit_halves_the_error() -> None:
    x = drawn(20_000)
    errors = [
        float((fake_quantize(x, choose_grid(x, bits)) - x).square().mean().sqrt()) for bits in range(4, 9)
    ]
    for wide, narrow in itertools.pairwise(errors):
        assert 1.9 < wide / narrow < 2.3


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.7, -2.5, 1e-42, 3e38])
def test_constant_tensors_are_exact(value: float, symmetric: bool) -> None:
    x = torch.full((2, 4), value)
    found = fake_quantize(x, choose_grid(x, 8, symmetric, dim=0))
    assert found.isfinite().all()
    torch.testing.assert_close(found, x, rtol=1e-6, atol=torch.finfo(torch.float32).tiny * 128)


def test_a_row_of_zeros_stays_zero_and_bf16_is_kept() -> None:
    x = drawn(3, 8, dtype=torch.float32).bfloat16()
    x[1] = 0
    grid = choose_grid(x, 8, dim=0)
    assert grid.scale.dtype == torch.float32
    assert quantize(x, grid).dtype == torch.int8
    found = fake_quantize(x, grid)
    assert found.dtype == torch.bfloat16
    assert not found[1].any()


def test_bad_input_is_refused() -> None:
    x = drawn(2, 6)
    for bad in (math.nan, math.inf):
        broken = x.clone()
        broken[1, 2] = bad
        with pytest.raises(UserError, match="NaN or infinity"):
            choose_grid(broken)
        with pytest.raises(UserError, match="NaN or infinity"):
            quantize(broken, choose_grid(x))
    with pytest.raises(UserError, match="divisor of 6"):
        choose_grid(x, group_size=4)
    with pytest.raises(UserError, match="use one"):
        choose_grid(x, group_size=2, dim=0)
    with pytest.raises(UserError, match="dimensions"):
        choose_grid(x, dim=2)
    with pytest.raises(UserError, match="at least one number"):
        choose_grid(x[:0])
    with pytest.raises(UserError, match="2 to 8"):
        integer_range(9)
    with pytest.raises(UserError, match="at least 2"):
        integer_range(1)
    with pytest.raises(UserError, match="floating-point"):
        choose_grid(x.int())
    with pytest.raises(UserError, match="for this shape"):
        dequantize(torch.zeros(5, 6, dtype=torch.int8), choose_grid(x, dim=0))


@pytest.mark.parametrize("n", [0, 1, 2, 5, 7, 10, 13])
def test_packed_integers_come_back(n: int) -> None:
    q = torch.randint(-8, 8, (3, 2, n), generator=torch.Generator().manual_seed(n), dtype=torch.int8)
    packed = pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, -(-n // 2))
    assert torch.equal(unpack_int4(packed, n), q)
    ternary = q.remainder(3) - 1
    for count in (4, 5):
        packed = pack_ternary(ternary, count)
        assert packed.dtype == torch.uint8
        assert packed.shape == (3, 2, -(-n // count))
        assert torch.equal(unpack_ternary(packed, n, count), ternary)


def test_the_first_integer_is_in_the_low_half() -> None:
    assert pack_int4(torch.tensor([1, -1])).tolist() == [0xF1]
    assert pack_ternary(torch.tensor([1, -1, 0, 0, 1])).tolist() == [2 + 0 + 9 + 27 + 2 * 81]


def test_integers_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="-8 to 7"):
        pack_int4(torch.tensor([8]))
    with pytest.raises(UserError, match="-1 to 1"):
        pack_ternary(torch.tensor([2]))
    with pytest.raises(UserError, match="4 or 5"):
        pack_ternary(torch.tensor([1]), 6)
    with pytest.raises(UserError, match="integers"):
        pack_int4(torch.tensor([1.0]))
    with pytest.raises(UserError, match="3 bytes a row"):
        unpack_int4(torch.zeros(2, dtype=torch.uint8), 5)


def test_shared_storage_counts_once() -> None:
    x = torch.zeros(10)
    assert stored_bytes([x, x.view(2, 5), torch.zeros(3, dtype=torch.int8)]) == 43
    assert stored_bytes(torch.zeros(size, device="meta") for size in (2, 0, 3)) == 20
    linear = torch.nn.Linear(3, 2)
    assert stored_bytes(linear) == 4 * 8


def batches() -> list[Tensor]:
    return [drawn(40, 7, seed=seed) * 2.0**seed for seed in range(4)]


def test_min_max_is_that_of_all_batches() -> None:
    observer = MinMaxObserver()
    with pytest.raises(UserError, match="no activation"):
        observer.range()
    for batch in batches():
        observer.observe(batch)
    everything = torch.cat(batches())
    assert observer.range() == (float(everything.min()), float(everything.max()))
    assert observer.grid(8).scale.item() == pytest.approx(float(everything.abs().max()) / 127)


def test_the_histogram_counts_every_value_once() -> None:
    observer = HistogramObserver(bins=16)
    observer.observe(torch.zeros(3))
    for batch in batches():
        observer.observe(batch)
    values = torch.cat([torch.zeros(3, dtype=torch.float64), torch.cat(batches()).flatten()])
    edges = observer.edges()
    expected = [int(((values >= a) & (values < b)).sum()) for a, b in itertools.pairwise(edges)]
    assert observer.counts.tolist() == expected


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9, 100.0])
def test_a_percentile_is_exact_to_one_bin(percentile: float) -> None:
    observer = PercentileObserver(percentile, bins=512)
    for batch in batches():
        observer.observe(batch)
    values = torch.cat(batches()).flatten().sort().values
    outside = math.floor(len(values) * (1 - percentile / 100) + 1e-9)
    low, high = observer.range()
    width = observer.bound / 512
    assert low <= values[outside]
    assert high >= values[-1 - outside]
    assert values[outside] - low <= width
    assert high - values[-1 - outside] <= width


def test_one_outlier_widens_min_max_and_not_a_percentile() -> None:
    x = drawn(5000)
    spoiled = torch.cat([x, torch.tensor([1000.0], dtype=x.dtype)])
    errors = []
    for observer in (MinMaxObserver(), PercentileObserver(99.9, 65536), MSEObserver(bins=4096)):
        observer.observe(spoiled)
        errors.append(float((fake_quantize(x, observer.grid(8)) - x).square().mean()))
    assert errors[1] < errors[0] / 100


def test_the_mse_range_is_at_least_as_good_as_min_max() -> None:
    x = drawn(20_000)
    for bits in (3, 4, 8):
        errors = []
        for observer in (MSEObserver(), MinMaxObserver()):
            observer.observe(x)
            errors.append(float((fake_quantize(x, observer.grid(bits)) - x).square().mean()))
        assert errors[0] <= errors[1] * 1.001
        assert bits == 8 or errors[0] < errors[1] * 0.8


def test_the_mse_range_is_the_best_fraction_of_values_at_centres_of_bins() -> None:
    observer = MSEObserver(steps=20, bins=16)
    x = (drawn(500) * 2).round() / 2 + 0.25
    x = x[x.abs() < 3.9]
    x = torch.cat([x, torch.tensor([3.75, -3.75], dtype=x.dtype)])
    observer.observe(x)
    assert observer.bound / 16 == 0.25
    centred = ((x / 0.25).floor() + 0.5).mul(0.25).clamp(x.min(), x.max())
    errors = []
    for step in range(1, 21):
        grid = grid_from_range(x.min() * step / 20, x.max() * step / 20, 3)
        errors.append(float((fake_quantize(centred, grid) - centred).square().sum()))
    expected = 1 + errors.index(min(errors))
    assert observer.range(3) == pytest.approx((-3.75 * expected / 20, 3.75 * expected / 20))


def test_observers_refuse_bad_input() -> None:
    with pytest.raises(UserError, match="above 50"):
        PercentileObserver(50)
    with pytest.raises(UserError, match="even"):
        HistogramObserver(7)
    with pytest.raises(UserError, match="NaN"):
        MinMaxObserver().observe(torch.tensor([math.nan]))
    with pytest.raises(UserError, match="one token"):
        channel_absmax(torch.zeros(0, 3))


def test_large_bounds_do_not_overflow() -> None:
    grid = grid_from_range(torch.tensor(-3e38), torch.tensor(3e38), symmetric=False)
    assert grid.scale.isfinite()
