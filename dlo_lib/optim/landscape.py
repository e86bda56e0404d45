"""The loss on a plane through the weights of a trained model.

A random direction says little unless each *filter* of it has the norm of the filter of the model: a step of
length 1 is tiny for a large filter and destroys a small one, and with batch normalisation the same function
can have any norm (Li et al., *Visualizing the Loss Landscape of Neural Nets*, arXiv:1712.09913). A filter is
a slice of the first dimension: the weights of one output channel, or of one neuron. Biases and the weights of
norms, which have one dimension, do not move.

Cost: a forward for each point of the plane, and two copies of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.base.text import tr
from dlo_lib.optim.curvature import drawn_on


def filter_normalised(parameters: Sequence[Tensor], generator: torch.Generator | None = None) -> list[Tensor]:
    """Return a random direction: a tensor for each parameter, whose filters have the norms of the model's.

    The direction of a parameter with fewer than two dimensions is 0.
    """
    direction = []
    for parameter in parameters:
        if parameter.ndim < 2:
            direction.append(torch.zeros_like(parameter, requires_grad=False))
            continue
        weight = parameter.detach()
        drawn = torch.randn(weight.shape, generator=generator, device=drawn_on(generator)).to(weight)
        direction.append(drawn * (_norms(weight) / _norms(drawn)))
    return direction


@torch.no_grad()
def loss_on_plane(
    loss: Callable[[], Tensor | float],
    parameters: Sequence[Tensor],
    directions: tuple[Sequence[Tensor], Sequence[Tensor]],
    places: tuple[Sequence[float], Sequence[float]],
) -> Tensor:
    """Return the loss at weights + a · first direction + b · second direction.

    The weights are restored afterwards, also after an error. What else the loss changes is not: call
    ``model.eval()`` before, because batch normalisation in training mode updates its statistics.

    Args:
        loss: returns the loss of the model with its present weights, without gradients.
        parameters: the weights that move, those that the directions were drawn for.
        directions: two directions, such as those of :func:`filter_normalised`.
        places: the values of a, and those of b.

    Returns:
        (number of b, number of a), float64, on the CPU.

    Raises:
        UserError: if a direction has other shapes than the parameters.
    """
    shapes = [parameter.shape for parameter in parameters]
    if any([part.shape for part in direction] != shapes for direction in directions):
        raise UserError(tr("a direction needs a tensor of the shape of each parameter"))
    first, second = places
    surface = torch.empty(len(second), len(first), dtype=torch.float64)
    with _restored(parameters) as centre:
        for row, b in enumerate(second):
            for column, a in enumerate(first):
                for parameter, middle, one, other in zip(parameters, centre, *directions, strict=True):
                    parameter.copy_(middle + a * one + b * other)
                surface[row, column] = float(loss())
    return surface


@contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Give copies of the parameters, and put them back at the end."""
    copies = [parameter.clone() for parameter in parameters]
    try:
        yield copies
    finally:
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.copy_(copy)


def _norms(weight: Tensor) -> Tensor:
    """The norm of each filter, with the dimensions of ``weight``."""
    return weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.ndim - 1))
