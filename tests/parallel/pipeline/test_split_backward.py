"""A backward in two parts gives the gradients of one, and the first part gives no weight gradient."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dlo_lib.parallel.pipeline.split_backward import SplitBackward, WeightPart


def model(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 7, bias=False), nn.GELU(), nn.Linear(7, 3)
    ).double()
    if frozen:
        layers[0].weight.requires_grad_(False)
        layers[5].bias.requires_grad_(False)
    return layers


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_two_parts_are_one_backward(frozen, recomputed):
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    whole, split = model(frozen), model(frozen)
    halves = SplitBackward(split)
    for _ in range(2):  # gradients accumulate
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        whole(one).square().sum().backward()
        out = checkpoint(split, two, use_reentrant=False) if recomputed else split(two)
        part = WeightPart()
        before = {name: None if grad is None else grad.clone() for name, grad in gradients(split).items()}
        with halves.defer_to(part):
            out.square().sum().backward()
        for name in ("0.weight", "3.weight", "5.weight", "5.bias"):
            now = gradients(split)[name]
            assert now is before[name] is None or torch.equal(now, before[name])
        torch.testing.assert_close(two.grad, one.grad, atol=1e-12, rtol=0)
        part.run()
    for name, grad in gradients(whole).items():
        assert (grad is None) == (gradients(split)[name] is None)
        if grad is not None:
            torch.testing.assert_close(gradients(split)[name], grad, atol=1e-12, rtol=0)


def test_outside_it_backward_is_whole():
    x = torch.randn(4, 5, dtype=torch.float64)
    whole, split = model(), model()
    SplitBackward(split)
    whole(x).sum().backward()
    split(x).sum().backward()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(split)[name], grad, atol=1e-12, rtol=0)


def test_under_autocast_products_are_in_low_precision_and_gradients_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(32, 16, requires_grad=True)
    plain, split = nn.Linear(16, 8), nn.Linear(16, 8)
    split.load_state_dict(plain.state_dict())
    halves, part = SplitBackward(split), WeightPart()
    with torch.autocast("cpu", torch.bfloat16):
        one, two = plain(x), split(x)
    assert one.dtype == two.dtype == torch.bfloat16
    assert torch.equal(one, two)
    one.sum().backward()
    with halves.defer_to(part):
        two.sum().backward()
    part.run()
    assert split.weight.grad.dtype == torch.float32
    torch.testing.assert_close(split.weight.grad, plain.weight.grad, atol=0.1, rtol=1e-2)


def hooked(layer: nn.Linear) -> nn.Linear:
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return layer


IDIOMS = {
    "weight_norm": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    "old weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "old spectral_norm": lambda layer: nn.utils.spectral_norm(layer),
    "spectral_norm": lambda layer: nn.utils.parametrizations.spectral_norm(layer),
    "hook": hooked,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_computed_or_hooked_weight_gets_the_gradient_of_autograd(idiom, after):
    def build(split: bool) -> tuple[nn.Sequential, SplitBackward | None]:
        layers = model().eval()  # spectral_norm changes its state in training
        torch.manual_seed(2)
        if not after:
            layers[3] = IDIOMS[idiom](layers[3])
        halves = SplitBackward(layers) if split else None
        if after:
            layers[3] = IDIOMS[idiom](layers[3])
        return layers, halves

    x = torch.randn(4, 5, dtype=torch.float64)
    (whole, _), (split, halves) = build(split=False), build(split=True)
    assert halves is not None
    whole(x).square().sum().backward()
    out, part = split(x), WeightPart()
    with halves.defer_to(part):
        out.square().sum().backward()
    part.run()
    compared = gradients(whole)
    assert compared.keys() == gradients(split).keys()
    for name, grad in compared.items():
        assert grad is not None, name
        torch.testing.assert_close(gradients(split)[name], grad, atol=1e-12, rtol=0)


def test_an_input_of_one_dimension_is_one_row():
    x = torch.randn(5, dtype=torch.float64)
    whole, split = model(), model()
    halves, part = SplitBackward(split), WeightPart()
    whole(x).sum().backward()
    out = split(x)
    with halves.defer_to(part):
        out.sum().backward()
    part.run()
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(split)[name], grad, atol=1e-12, rtol=0)
