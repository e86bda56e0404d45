"""The curvature of a loss against its whole Hessian, which a small model can store."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib.base.errors import UserError
from dlo_lib.models import Llama, LlamaConfig
from dlo_lib.optim.curvature import HessianProduct, largest_eigenvalue, traces


class Tied(nn.Module):
    """A matrix that is used twice, a frozen layer, and a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))


def case():
    torch.manual_seed(3)
    model = Tied().double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return (lambda: F.cross_entropy(model(x), y)), weights


def whole_hessian(loss, weights):
    """Row by row: the gradient of each element of the gradient."""
    grads = torch.autograd.grad(loss(), weights, create_graph=True, materialize_grads=True)
    rows = []
    for grad in grads:
        for element in grad.flatten():
            parts = (
                torch.autograd.grad(element, weights, retain_graph=True, materialize_grads=True)
                if element.requires_grad
                else [torch.zeros_like(weight) for weight in weights]
            )
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def split(vector, weights):
    parts = vector.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def test_a_product_is_that_of_the_whole_hessian():
    loss, weights = case()
    hessian = whole_hessian(loss, weights)
    vector = torch.randn(len(hessian), dtype=torch.float64)
    product = torch.cat([part.flatten() for part in HessianProduct(loss, weights)(split(vector, weights))])
    torch.testing.assert_close(product, hessian @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_eigenvalue_has_its_size_and_its_sign(sign):
    plain, weights = case()

    def loss():
        return sign * plain()

    eigenvalues = torch.linalg.eigvalsh(whole_hessian(loss, weights))
    expected = eigenvalues[eigenvalues.abs().argmax()].item()
    found = largest_eigenvalue(loss, weights, tolerance=1e-9, max_iterations=500)
    assert found.converged
    assert found.value == pytest.approx(expected, rel=1e-5)
    product = HessianProduct(loss, weights)(found.vector)
    for part, vector in zip(product, found.vector, strict=True):
        torch.testing.assert_close(part, found.value * vector, rtol=0, atol=1e-3 * abs(expected))
    assert math.sqrt(sum((part**2).sum().item() for part in found.vector)) == pytest.approx(1)


def test_too_few_iterations_are_said():
    loss, weights = case()
    found = largest_eigenvalue(loss, weights, tolerance=1e-12, max_iterations=3)
    assert (found.iterations, found.converged) == (3, False)


def test_a_linear_loss_has_no_curvature():
    weight = torch.ones(4, requires_grad=True)
    assert largest_eigenvalue(lambda: weight.sum(), [weight]).value == 0
    assert [trace.mean for trace in traces(lambda: weight.sum(), [weight])] == [0]


def test_the_trace_of_each_parameter_is_within_its_error():
    loss, weights = case()
    hessian = whole_hessian(loss, weights)
    samples, first = 400, 0
    found = traces(loss, weights, samples=samples, generator=torch.Generator().manual_seed(0))
    for trace, weight in zip(found, weights, strict=True):
        rows = hessian[first : first + weight.numel()]
        block = rows[:, first : first + weight.numel()]
        first += weight.numel()
        assert abs(trace.mean - block.trace().item()) <= 4 * trace.error + 1e-12
        # a pair of signs inside the block appears twice, one with another block once
        inside = 2 * (block - block.diagonal().diag()).square().sum()
        variance = inside + rows.square().sum() - block.square().sum()
        assert trace.error == pytest.approx(math.sqrt(variance / samples), rel=0.2)


def test_signs_give_the_trace_of_a_diagonal_hessian_exactly():
    weight = torch.zeros(3, requires_grad=True)
    scale = torch.tensor([1.0, 2.0, 5.0])
    (trace,) = traces(lambda: (scale * weight**2).sum(), [weight], samples=2)
    assert (trace.mean, trace.error) == (16, 0)


def test_a_llama_has_a_curvature_although_fused_attention_has_no_second_derivative():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden=16, intermediate=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    model = Llama(config)
    tokens = torch.randint(32, (2, 9))

    def loss():
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    weights = [model.layers[0].self_attn.k_proj.weight]
    assert weights[0].numel() == 128
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.linalg.eigvalsh(whole_hessian(loss, weights))
    found = largest_eigenvalue(loss, weights, tolerance=1e-6, max_iterations=500)
    assert found.value == pytest.approx(exact[exact.abs().argmax()].item(), rel=1e-3)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ([], "no parameter"),
        ([torch.ones(2)], "frozen parameter"),
        ([torch.ones(2, dtype=torch.bfloat16, requires_grad=True)], "not torch.bfloat16"),
        ([torch.ones(2, requires_grad=True)] * 2, "given twice"),
    ],
)
def test_parameters_without_a_curvature_are_refused(parameters, says):
    with pytest.raises(UserError, match=says):
        HessianProduct(lambda: sum((parameter**2).sum() for parameter in parameters), parameters)


def test_a_loss_that_is_not_a_number_is_refused():
    weight = torch.ones(2, requires_grad=True)
    for loss in (lambda: weight * 2, lambda: weight.detach().sum()):
        with pytest.raises(UserError, match="one number"):
            HessianProduct(loss, [weight])


def test_an_operation_without_a_second_derivative_is_named():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x**2

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(context, grad):
            return 2 * context.saved_tensors[0] * grad

    weight = torch.ones(2, requires_grad=True)
    with pytest.raises(UserError, match="no second derivative"):
        largest_eigenvalue(lambda: Once.apply(weight).sum(), [weight])
