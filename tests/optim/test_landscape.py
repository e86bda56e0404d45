"""Filter-normalised directions, and the loss on their plane."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.landscape import filter_normalised, loss_on_plane


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4))


def test_each_filter_has_the_norm_of_the_models():
    weights = list(model().parameters())
    with torch.no_grad():
        weights[0][1] = 0  # a filter of zeros
    direction = filter_normalised(weights, torch.Generator().manual_seed(0))
    for weight, part in zip(weights, direction, strict=True):
        assert part.shape == weight.shape
        assert not part.requires_grad
        if weight.ndim < 2:
            assert not part.any()
        else:
            torch.testing.assert_close(part.flatten(1).norm(dim=1), weight.detach().flatten(1).norm(dim=1))
    again = filter_normalised(weights, torch.Generator().manual_seed(0))
    assert all(map(torch.equal, direction, again))
    other = filter_normalised(weights, torch.Generator().manual_seed(1))
    assert not torch.equal(direction[0], other[0])


def test_a_quadratic_loss_is_known_at_each_point():
    weight = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    one, other = [torch.tensor([[1.0, 0.0]])], [torch.tensor([[0.0, 2.0]])]
    surface = loss_on_plane(lambda: (weight**2).sum(), [weight], (one, other), ([-1, 0, 1], [0, 0.5]))
    assert surface.tolist() == [[4 + 16, 9 + 16, 16 + 16], [4 + 25, 9 + 25, 16 + 25]]


def test_the_weights_are_restored_also_after_an_error():
    weights = list(model().parameters())
    before = [weight.detach().clone() for weight in weights]
    direction = filter_normalised(weights)
    losses = iter([1.0])
    with pytest.raises(StopIteration):
        loss_on_plane(lambda: next(losses), weights, (direction, direction), ([1.0], [0.0, 1.0]))
    assert all(map(torch.equal, weights, before))
    assert all(weight.requires_grad for weight in weights)


def test_a_direction_of_other_shapes_is_refused():
    weights = list(model().parameters())
    direction = filter_normalised(weights)
    with pytest.raises(UserError, match="shape of each parameter"):
        loss_on_plane(lambda: 0.0, weights, (direction, direction[1:]), ([0.0], [0.0]))
