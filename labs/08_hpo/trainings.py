"""The objectives of this lab: a landscape given by a formula, and real trainings of many small networks on
handwritten digits.

All networks have one shape, and each has its own learning rate and weight decay. Batched products, (models,
batch, 64) with (models, 64, hidden), train them at once: this takes seconds, and would take minutes one after
the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.data.images import digits

BATCH, MOMENTUM = 100, 0.9
LEARNING_RATE, WEIGHT_DECAY = (1e-4, 3.0), (1e-6, 1e-1)  # both searched on a logarithmic scale


def landscape(learning_rate: float, weight_decay: float) -> float:
    """The loss of a simulated training: a narrow valley in the learning rate, a shallow one in the weight
    decay."""
    u = math.log(learning_rate / LEARNING_RATE[0]) / math.log(LEARNING_RATE[1] / LEARNING_RATE[0])
    v = math.log(weight_decay / WEIGHT_DECAY[0]) / math.log(WEIGHT_DECAY[1] / WEIGHT_DECAY[0])
    valley = math.exp(-(((u - 0.63 + 0.12 * (v - 0.5)) / 0.08) ** 2))
    shallow = math.exp(-(((v - 0.4) / 0.3) ** 2))
    diverged = 1.5 / (1 + math.exp(-60 * (u - 0.86)))
    return 2.3 - 1.8 * valley - 0.3 * valley * shallow + diverged


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) and labels (n,), for training and for the choice of hyperparameters. The test images are
    not used."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """Return 1,000 images for training and 348 for validation."""
    part = digits().train
    images = part.images.flatten(1)
    return Digits((images[:1000], part.labels[:1000]), (images[1000:], part.labels[1000:]))


@dataclass(frozen=True)
class Networks:
    """Weights and velocities of many networks of one shape; the first dimension is the network."""

    weights: tuple[Tensor, ...]
    velocities: tuple[Tensor, ...]

    @classmethod
    def begin(cls, count: int, seed: int, hidden: int = 16) -> Networks:
        """Return ``count`` networks with different random weights."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(count, 64, hidden), (count, 1, hidden), (count, hidden, 10), (count, 1, 10)]
        bounds = [64, 64, hidden, hidden]
        weights = tuple(
            (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(fan)
            for shape, fan in zip(shapes, bounds)
        )
        return cls(weights, tuple(torch.zeros_like(weight) for weight in weights))

    def copies(self, parents: list[int]) -> Networks:
        """Return networks of which number i is a copy of network ``parents[i]``, velocities included."""
        return replace(
            self,
            weights=tuple(each[parents] for each in self.weights),
            velocities=tuple(each[parents] for each in self.velocities),
        )


def train_epoch(
    networks: Networks, data: Digits, learning_rates: Tensor, weight_decays: Tensor, seed: int
) -> tuple[Networks, Tensor]:
    """Train all networks for one epoch of SGD with momentum; return them and their validation losses
    (networks,), NaN after divergence."""
    images, labels = data.train
    weights = [each.clone().requires_grad_() for each in networks.weights]
    velocities = [each.clone() for each in networks.velocities]
    rates, decays = learning_rates.float()[:, None, None], weight_decays.float()[:, None, None]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    for chosen in order.split(BATCH):
        loss = _losses(weights, images[chosen], labels[chosen]).sum()
        for weight, velocity, grad in zip(weights, velocities, torch.autograd.grad(loss, weights)):
            with torch.no_grad():
                velocity.mul_(MOMENTUM).add_(grad + decays * weight)
                weight.sub_(rates * velocity)
    with torch.no_grad():
        losses = _losses(weights, *data.valid)
    losses = torch.where(losses < 20, losses, torch.nan)  # above 20 a training has diverged
    return Networks(tuple(weight.detach() for weight in weights), tuple(velocities)), losses


def train_many(data: Digits, learning_rates: Tensor, weight_decays: Tensor, epochs: int, seed: int) -> Tensor:
    """Train one network per learning rate; return the validation losses (epochs, networks)."""
    networks, losses = Networks.begin(len(learning_rates), seed), []
    for epoch in range(epochs):
        networks, now = train_epoch(networks, data, learning_rates, weight_decays, seed + epoch)
        losses.append(now)
    return torch.stack(losses)


def _losses(weights: list[Tensor], images: Tensor, labels: Tensor) -> Tensor:
    w1, b1, w2, b2 = weights
    hidden = torch.relu(images @ w1 + b1)  # (networks, batch, hidden)
    logits = hidden @ w2 + b2
    count, batch = len(w1), len(images)
    return (
        F.cross_entropy(logits.reshape(count * batch, 10), labels.repeat(count), reduction="none")
        .view(count, batch)
        .mean(1)
    )
