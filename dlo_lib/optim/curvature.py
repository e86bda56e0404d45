"""How sharp a minimum is: the largest eigenvalue and the trace of the Hessian of a loss.

The Hessian H of a model with P weights has P² elements and is never stored. Its product with a vector v is
the gradient of the number grad · v (Pearlmutter, 1994), which costs about two backwards. Both measures need
nothing else:

- *power iteration*: v ← H v / ‖H v‖ turns v towards the eigenvector whose eigenvalue λ is the largest in
  size, and v · H v tends to λ, with its sign. A step reduces the error of v by the ratio of the second
  eigenvalue to the first, and the error of λ by its square;
- *Hutchinson's estimate*: for v of independent signs ±1, the mean of v · H v is the trace (Hutchinson, 1990).
  The part of a tensor in v · H v estimates the trace of its block, from which HAWQ-V2 chooses the number
  of bits of each layer (Dong et al., arXiv:1911.03852).

Cost: a product takes the time of about two backwards. The graph of the gradient stays in memory, about twice
what a backward keeps.

The loss is that of a function which is called once. Call ``model.eval()`` before, so that dropout draws
nothing and batch normalisation uses fixed statistics. In a process group each rank measures its own loss, of
a model without a wrapper: DDP and FSDP do not support a backward of a backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr

Vector = tuple[Tensor, ...]
"""A tensor for each parameter, with its shape, dtype and device."""


class HessianProduct:
    """The Hessian of a loss, as a function of a vector.

    Args:
        loss: returns the loss, a tensor with one element. It is called once, here. Attention is computed by
            its mathematical form there, because the fused ones have no second derivative.
        parameters: the tensors to differentiate by; the rest of the model is constant. A parameter that the
            loss does not use has the curvature 0.

    Raises:
        UserError: if there is no parameter, if one is given twice, needs no gradient or is not of float32 or
            float64, or if the loss is not one number or has no second derivative.
    """

    def __init__(self, loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> None:
        self.parameters = _checked(parameters)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            value = loss()
            if value.numel() != 1 or not value.requires_grad:
                raise UserError(tr("the loss must be one number that depends on the parameters"))
            # A factor with a gradient: otherwise the backward of an operation that gives the loss itself gets
            # only constants, and one that is differentiable once leaves no mark in the graph.
            one = torch.ones_like(value, requires_grad=True)
            self.gradients = torch.autograd.grad(
                value, self.parameters, one, create_graph=True, materialize_grads=True
            )
        if _is_cut(self.gradients):
            raise _without_second_derivative("once_differentiable")

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return H v. ``vector``: a tensor for each parameter."""
        curved = [index for index, gradient in enumerate(self.gradients) if gradient.requires_grad]
        if not curved:  # a linear loss
            return tuple(torch.zeros_like(parameter, requires_grad=False) for parameter in self.parameters)
        try:
            found = torch.autograd.grad(
                [self.gradients[index] for index in curved],
                self.parameters,
                [vector[index] for index in curved],
                retain_graph=True,
                materialize_grads=True,
            )
        except RuntimeError as error:
            raise _without_second_derivative(str(error).splitlines()[0]) from error
        return tuple(product.detach() for product in found)


@dataclass(frozen=True)
class Eigenvalue:
    """The eigenvalue of the Hessian that is the largest in size.

    Attributes:
        value: the eigenvalue, with its sign.
        vector: its eigenvector, of length 1.
        iterations: the products that were computed.
        converged: whether the last iteration changed the value by less than the tolerance.
    """

    value: float
    vector: Vector
    iterations: int
    converged: bool


def largest_eigenvalue(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    generator: torch.Generator | None = None,
) -> Eigenvalue:
    """Return the eigenvalue of largest size, by power iteration.

    Args:
        loss, parameters: as for :class:`HessianProduct`, which also says what is raised.
        tolerance: the iteration ends when two values in turn differ by less than this share of the value.
        max_iterations: the most products, at least 1.
        generator: of the first vector.
    """
    product = HessianProduct(loss, parameters)
    vector = _unit(tuple(_normal(parameter, generator) for parameter in product.parameters))
    before = math.inf
    for iteration in range(1, max_iterations + 1):
        following = product(vector)
        value = _dot(vector, following)
        converged = abs(value - before) <= tolerance * abs(value)
        if converged or iteration == max_iterations:
            break
        if _dot(following, following) == 0:  # H is 0, or the vector has no part where it is not
            return Eigenvalue(0.0, vector, iteration, True)
        vector, before = _unit(following), value
    return Eigenvalue(value, vector, iteration, converged)


@dataclass(frozen=True)
class TraceEstimate:
    """An estimate of a trace: the mean over the samples, and its standard error."""

    mean: float
    error: float


def traces(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    *,
    samples: int = 32,
    generator: torch.Generator | None = None,
) -> list[TraceEstimate]:
    """Return for each parameter the trace of its block of the Hessian, by Hutchinson's estimate.

    The trace of the whole Hessian is the sum of the means. The error of one is the standard deviation of its
    samples divided by √samples.

    Args:
        loss, parameters: as for :class:`HessianProduct`, which also says what is raised.
        samples: the number of drawn vectors, at least 2.
        generator: of the signs.
    """
    if samples < 2:
        raise UserError(tr("an error needs at least 2 samples, not {samples}", samples=samples))
    product = HessianProduct(loss, parameters)
    rows = []
    for _ in range(samples):
        signs = tuple(_signs(parameter, generator) for parameter in product.parameters)
        pairs = zip(signs, product(signs), strict=True)
        rows.append([torch.sum(sign * part, dtype=torch.float64).item() for sign, part in pairs])
    drawn = torch.tensor(rows, dtype=torch.float64)
    means, errors = drawn.mean(0), drawn.std(0) / math.sqrt(samples)
    return [TraceEstimate(mean, error) for mean, error in zip(means.tolist(), errors.tolist(), strict=True)]


def _checked(parameters: Sequence[Tensor]) -> Vector:
    """Return ``parameters`` as a tuple; raise UserError for those of which no curvature can be measured."""
    given = tuple(parameters)
    if not given:
        raise UserError(tr("there is no parameter to differentiate by"))
    if len({id(parameter) for parameter in given}) < len(given):
        raise UserError(tr("a parameter is given twice: model.parameters() gives a tied one once"))
    for parameter in given:
        if not parameter.requires_grad:
            raise UserError(tr("a frozen parameter has no gradient: leave it out"))
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UserError(
                tr(
                    "a curvature needs float32 or float64, not {dtype}: convert the model",
                    dtype=parameter.dtype,
                )
            )
    return given


def _is_cut(gradients: Vector) -> bool:
    """Return whether a gradient comes from a backward that is differentiable once.

    Such a backward leaves an error in the graph in place of its inputs. A gradient with respect to these does
    not meet the error, and would silently be 0.
    """
    left = [gradient.grad_fn for gradient in gradients]
    seen = set(left)
    while left:
        node = left.pop()
        if node is None:
            continue
        if node.name() == "torch::autograd::Error":
            return True
        following = {earlier for earlier, _ in node.next_functions} - seen
        seen |= following
        left += following
    return False


def _without_second_derivative(reason: str) -> UserError:
    return UserError(
        tr(
            "an operation of this model has no second derivative ({reason}): use its plain form, "
            "in this library kernels='eager'",
            reason=reason,
        )
    )


def drawn_on(generator: torch.Generator | None) -> torch.device:
    """Return the device on which ``generator`` draws; the same numbers then serve a GPU and a CPU."""
    return torch.device("cpu") if generator is None else generator.device


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    place = drawn_on(generator)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=place).to(like.device)


def _signs(like: Tensor, generator: torch.Generator | None) -> Tensor:
    bits = torch.randint(2, like.shape, generator=generator, device=drawn_on(generator))
    return (2 * bits - 1).to(like)


def _dot(one: Vector, other: Vector) -> float:
    return sum(torch.sum(a * b, dtype=torch.float64).item() for a, b in zip(one, other, strict=True))


def _unit(vector: Vector) -> Vector:
    length = math.sqrt(_dot(vector, vector))
    return tuple(part / length for part in vector)
