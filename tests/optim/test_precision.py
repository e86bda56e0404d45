"""Low precision: formats and rounding against PyTorch's casts, loss scaling against its GradScaler."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision import (
    FORMATS,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    DynamicLossScaler,
    FP8Linear,
    MasterWeights,
    StaticLossScaler,
    StochasticRounding,
    fp8_matmul,
    plot_range,
    round_to,
    rounding_loss,
    stochastic_round,
)
from dlo_lib.optim.precision.fp8 import quantize
from dlo_lib.optim.precision.scaling import scale_of

STORED = [entry for entry in FORMATS.values() if entry.dtype]
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("entry", STORED, ids=lambda entry: entry.name)
def test_a_format_has_the_limits_that_pytorch_gives(entry):
    info = torch.finfo(entry.dtype)
    assert (entry.max, entry.smallest_normal, entry.eps) == (info.max, info.tiny, info.eps)
    assert entry.smallest_subnormal == info.smallest_normal * info.eps
    assert entry.bytes == entry.dtype.itemsize


def every_magnitude() -> torch.Tensor:
    """All bf16 numbers, and fp32 numbers just beside them: ties, subnormal numbers, infinity and NaN."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    return torch.cat([(bits + low).view(torch.float32) for low in (0, 1, 0x7FFF, 0x8000, 0x8001)])


@pytest.mark.parametrize("entry", STORED, ids=lambda entry: entry.name)
def test_rounding_is_the_cast_of_pytorch(entry):
    x = every_magnitude()
    if not entry.infinite:  # what the cast makes of larger numbers depends on the release: NaN or 448
        x = x[(x.abs() <= 464) | x.isnan()]
    cast = x.to(entry.dtype).float()
    torch.testing.assert_close(round_to(x, entry), cast, rtol=0, atol=0, equal_nan=True)


def test_tf32_has_the_range_of_fp32_and_the_resolution_of_fp16():
    tf32, fp16, fp32 = FORMATS["tf32"], FORMATS["fp16"], FORMATS["fp32"]
    assert (tf32.smallest_exponent, tf32.eps, tf32.bytes) == (fp32.smallest_exponent, fp16.eps, 4)
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1e30])
    assert round_to(x, tf32)[:2].tolist() == [1.0, 1 + 2**-9]
    assert round_to(x, tf32)[2] == pytest.approx(1e30, rel=2**-11)


def test_saturation_keeps_the_sign_and_what_is_infinite():
    x = torch.tensor([1e9, -1e9, torch.inf, torch.nan, 3.0])
    assert str(round_to(x, FORMATS["e4m3"]).tolist()) == "[nan, nan, inf, nan, 3.0]"
    assert str(round_to(x, FORMATS["e4m3"], saturate=True).tolist()) == "[448.0, -448.0, inf, nan, 3.0]"
    with pytest.raises(UserError, match="is rounded already"):
        round_to(x.bfloat16(), FORMATS["e4m3"])


@pytest.mark.parametrize(
    "rounding", [stochastic_round, functools.partial(round_to, to=FORMATS["bf16"], stochastic=True)]
)
def test_stochastic_rounding_is_right_in_the_mean(rounding):
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([1 + 2**-9, -1 - 2**-9, 3e-40, 1.0, 0.0])  # a quarter of the way; subnormal; exact
    rounded = rounding(x.expand(40_000, 5), generator=generator).double()
    assert rounded[:, 0].unique().tolist() == [1.0, 1 + 2**-7]
    assert rounded[:, 1].unique().tolist() == [-1 - 2**-7, -1.0]
    assert rounded[:, 3:].unique(dim=0).tolist() == [[1.0, 0.0]]
    deviation = 2**-7 * math.sqrt(0.25 * 0.75 / 40_000)
    assert abs(rounded[:, :2].mean(0) - x[:2].double()).max() < 5 * deviation
    assert rounded[:, 2].mean() == pytest.approx(float(x[2]), rel=0.05)


def test_stochastic_rounding_keeps_infinity_and_nan():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert str(stochastic_round(x).tolist()) == "[inf, -inf, nan]"
    with pytest.raises(UserError, match="takes fp32"):
        stochastic_round(x.double())


def test_what_a_format_loses():
    x = torch.tensor([0.0, torch.inf, 1e-9, 3e-5, 1 + 2**-11, 1e6])
    lost = rounding_loss(x, FORMATS["fp16"])
    assert (lost.underflow, lost.subnormal, lost.overflow) == (0.25, 0.25, 0.25)
    assert lost.relative_error == pytest.approx(2**-11, rel=1e-3)
    assert rounding_loss(x, FORMATS["fp16"], scale=2**10).underflow == 0
    assert rounding_loss(torch.zeros(3), FORMATS["fp16"]).underflow == 0


def losses_of(scaler, steps: int = 12) -> tuple[list, list]:
    """Train one weight; the loss of some steps overflows. Return scales and weights after each step."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scales, weights = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (weight * weight).sum() * (torch.inf if step in (2, 3, 9) else 1.0)
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(weight.tolist())
    return scales, weights


def test_the_dynamic_scaler_is_that_of_pytorch():
    options = {"init_scale": 2.0**10, "growth_interval": 3, "growth_factor": 4.0, "backoff_factor": 0.25}
    ours = DynamicLossScaler(**options)
    assert losses_of(ours) == losses_of(torch.amp.GradScaler("cpu", **options))
    assert ours.skipped == 3
    resumed = DynamicLossScaler(**options)
    resumed.load_state_dict(ours.state_dict())
    assert losses_of(resumed) == losses_of(ours)


def test_the_static_scaler_skips_and_keeps_its_scale():
    scaler = StaticLossScaler(128.0)
    scales, weights = losses_of(scaler)
    assert set(scales) == {128.0}
    assert weights[1] == weights[2] == weights[3] != weights[4]


def test_wrong_use_of_a_scaler_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scaler = StaticLossScaler()
    with pytest.raises(UserError, match="update without a step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(UserError, match="unscale_ was called twice"):
        scaler.unscale_(optimizer)
    for options in (
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"init_scale": 0.0},
    ):
        with pytest.raises(UserError, match="use "):
            DynamicLossScaler(**options)


def small_steps(optimizer_of, steps: int = 64) -> float:
    """The mean weight after ``steps`` updates of 2^-10 upwards from 1, of bf16 weights."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = optimizer_of([weight])
    for _ in range(steps):
        weight.grad = torch.full_like(weight, -(2.0**-10))
        optimizer.step()
    return weight.float().mean().item()


def test_small_updates_are_lost_in_bf16_and_kept_by_both_cures():
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    assert small_steps(sgd) == 1.0
    assert small_steps(lambda params: MasterWeights(params, sgd)) == 1 + 64 * 2**-10
    generator = torch.Generator().manual_seed(0)
    rounded = small_steps(lambda params: StochasticRounding(params, sgd, generator))
    assert rounded == pytest.approx(1 + 64 * 2**-10, abs=5 * 0.03 / math.sqrt(4096))


def twin_steps(mixed: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    if mixed:
        for layer in (model[0], model[2]):
            layer.to(torch.bfloat16)
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": [*model[1:].parameters()]}]
    optimizer = MasterWeights(groups, ADAMW) if mixed else ADAMW(groups)
    model[2].bias.requires_grad_(False)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for step in range(5):
        for param in (p for p in model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
        optimizer.step()
        schedule.step()
    if mixed:
        for param, value in optimizer.fp32.items():
            assert torch.equal(param, value.to(param.dtype))
        assert [value.dtype for value in optimizer.fp32.values()] == [torch.float32] * 6
        return list(optimizer.fp32.values())
    return list(model.parameters())


def test_master_weights_are_the_weights_of_a_training_in_fp32():
    """With groups, a schedule, fp32 norms between bf16 layers and a frozen bias. The start is bf16."""
    ours, reference = twin_steps(True), twin_steps(False)
    for value, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=2e-3)  # half a unit of bf16 at the start


@pytest.mark.parametrize("kind", [MasterWeights, StochasticRounding])
def test_a_training_in_bf16_resumes(kind):
    def trained(parts: int) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.linspace(0.5, 2, 16, dtype=torch.bfloat16))
        generator = torch.Generator().manual_seed(1)
        extra = {} if kind is MasterWeights else {"generator": generator}
        optimizer = kind([weight], ADAMW, **extra)
        for step in range(6):
            if parts == 2 and step == 3:
                saved, kept = optimizer.state_dict(), weight.detach().clone()
                weight = nn.Parameter(kept)
                optimizer = kind([weight], functools.partial(torch.optim.AdamW, lr=9.0), **extra)
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["lr"] == 1e-3
            weight.grad = (weight.detach() * 0.01 + step * 0.001).clone()
            optimizer.step()
        return [weight.detach()]

    assert torch.equal(trained(1)[0], trained(2)[0])


def test_between_steps_stochastic_rounding_holds_no_fp32_weights():
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = StochasticRounding([weight], ADAMW)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [value.numel() for value in optimizer.fp32.values()] == [0]
    for kind, dtype in itertools.product([MasterWeights, StochasticRounding], [torch.float32, torch.float64]):
        with pytest.raises(UserError, match="use the optimiser alone"):
            kind([nn.Parameter(torch.ones(1, dtype=dtype))], ADAMW)
    with pytest.raises(UserError, match="for bf16"):
        StochasticRounding([nn.Parameter(torch.ones(1, dtype=torch.float16))], ADAMW)
    with pytest.raises(UserError, match="cannot be added later"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_scale_brings_the_largest_value_to_the_end_of_the_range():
    x = torch.tensor([[1e-4, -7.0], [3.0, 0.5]])
    quantized = quantize(x, FORMATS["e4m3"], CurrentScaling())
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.data.float().abs().max() == 448
    torch.testing.assert_close(quantized.dequantize()[:, 1], x[:, 1], rtol=2**-4, atol=0)
    assert scale_of(torch.tensor([0.0, torch.inf, torch.nan, 448.0]), FORMATS["e4m3"]).tolist() == [
        1,
        1,
        1,
        1,
    ]
    with pytest.raises(UserError, match="does not have 8 bits"):
        quantize(x, FORMATS["bf16"], CurrentScaling())


def test_delayed_scaling_uses_the_past_and_saturates_at_a_jump():
    delayed = DelayedScaling(history=2, margin=1)
    e4m3 = FORMATS["e4m3"]
    amax = [1.0, 8.0, 2.0, 1.0, 1.0]
    scales = [448 / 2 / delayed(torch.tensor([value, -value / 2]), e4m3).item() for value in amax]
    assert scales == [1.0, 1.0, 8.0, 8.0, 2.0]
    jump = quantize(torch.tensor([1.0, 100.0]), e4m3, delayed)
    assert jump.data.float().tolist() == [224.0, 448.0]
    copy = DelayedScaling(history=2, margin=1)
    copy.load_state_dict(delayed.state_dict())
    x = torch.tensor([1.0])
    assert copy(x, e4m3) == delayed(x, e4m3)


def test_blocks_confine_an_outlier():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 300)
    x[0, 2, 7] = 1e5
    e4m3 = FORMATS["e4m3"]
    error = {
        name: (quantize(x, e4m3, scaling).dequantize() - x).abs()
        for name, scaling in {"one": CurrentScaling(), "blocks": BlockScaling(2, 128)}.items()
    }
    assert error["one"][1].mean() > 4 * error["blocks"][1].mean()
    scale = BlockScaling(2, 128)(x, e4m3)
    assert scale.shape == x.shape
    assert scale[1, 4, 299] == pytest.approx(e4m3.max / x[1, 4:, 256:].abs().max().item())
    assert scale[0, 3, 0] == pytest.approx(e4m3.max / 1e5)
    with pytest.raises(UserError, match="blocks need two dimensions"):
        BlockScaling()(x[0, 0], e4m3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_the_rounded_operands(dtype):
    torch.manual_seed(0)
    layer = FP8Linear(6, 5, dtype=dtype)
    x = torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 3, 5, dtype=dtype)
    layer(x).backward(grad)
    e4m3, e5m2, scaling = FORMATS["e4m3"], FORMATS["e5m2"], CurrentScaling()
    x8, w8 = (quantize(value, e4m3, scaling).dequantize() for value in (x, layer.weight))
    g8 = quantize(grad, e5m2, scaling).dequantize()
    assert torch.equal(layer(x), (x8 @ w8.T).to(dtype) + layer.bias)
    assert torch.equal(x.grad, (g8 @ w8).to(dtype))
    torch.testing.assert_close(layer.weight.grad, torch.einsum("bso,bsi->oi", g8, x8).to(dtype))
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


def test_backward_keeps_the_input_in_8_bits():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        fp8_matmul(x, weight)
    assert sum(kept) == 64 * 32 + 16 * 32 + 2 * 4


def test_layers_are_replaced_by_name_and_tied_weights_stay_tied():
    model = nn.ModuleDict(
        {"a": nn.Linear(4, 4), "b": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.Linear(4, 2)}
    )
    model["b"][0].weight = model["a"].weight
    replaced = FP8Linear.replace_in(model, lambda name: name != "head", DelayedScaling)
    assert replaced == ["a", "b.0"]
    assert model["b"][0].weight is model["a"].weight
    assert type(model["head"]) is nn.Linear
    assert {name for name, _ in model.named_parameters()} == {
        "a.weight",
        "a.bias",
        "b.0.bias",
        "head.weight",
        "head.bias",
    }
    with pytest.raises(UserError, match="choose among head"):
        FP8Linear.replace_in(model, lambda name: False)


def test_a_model_with_8_bit_products_learns():
    torch.manual_seed(0)
    x = torch.randn(128, 16)
    y = (x @ torch.randn(16, 4)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    FP8Linear.replace_in(model, lambda name: True, DelayedScaling)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_figure_shows_values_and_ranges():
    figure = plot_range({"gradients": torch.randn(1000) * 1e-6, "weights": torch.randn(1000)})
    histogram, ranges = figure.axes
    assert [line.get_label() for line in histogram.lines] == ["gradients", "weights"]
    assert sum(histogram.lines[0].get_ydata()) == pytest.approx(1)
    assert [label.get_text() for label in ranges.get_yticklabels()] == ["fp16", "bf16", "e4m3", "e5m2"]
    with pytest.raises(UserError, match="nothing to draw"):
        plot_range({"zeros": torch.zeros(3)})
