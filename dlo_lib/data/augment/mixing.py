"""mixup and CutMix: each image is combined with another one of the batch, and so is its label.

The partner of an image is the image at the same place of a random permutation of the batch. Each image has
its own share ``lam`` of itself. The labels become probabilities,
    target = lam * onehot(label) + (1 - lam) * onehot(label of the partner),
for ``torch.nn.functional.cross_entropy``, which accepts probabilities.

Papers: H. Zhang et al., mixup (arXiv:1710.09412); S. Yun et al., CutMix (arXiv:1905.04899).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.base.errors import UserError


def mixup(
    images: Tensor, labels: Tensor, classes: int, alpha: float = 0.2, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``lam * images + (1 - lam) * partners`` and the targets, with ``lam`` from Beta(alpha, alpha).

    Args:
        images: (batch, ...), floating point.
        labels: (batch,) int64.
        classes: the number of classes.
        alpha: near 0, most images stay nearly what they are; at 1, every share is equally likely.
        generator: the source of the random numbers, on the CPU.

    Returns:
        The images, and the targets (batch, classes) in the dtype of the images.

    Raises:
        UserError: ``images`` are integers, or the numbers of images and labels differ, or ``alpha`` is not
        positive.
    """
    partner, lam = _draw(images, labels, alpha, generator)
    share = lam.view(-1, *[1] * (images.dim() - 1))
    return torch.lerp(images[partner], images, share), _targets(labels, partner, lam, classes)


def cutmix(
    images: Tensor, labels: Tensor, classes: int, alpha: float = 1.0, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return images in which a rectangle comes from the partner, and the targets.

    The rectangle has the share ``1 - lam`` of the image and a centre anywhere, with ``lam`` from
    Beta(alpha, alpha). The border of the image cuts it off. The label uses the share of the pixels that are
    really replaced.

    Args:
        images: (batch, channels, height, width), any dtype.
        labels: (batch,) int64.
        classes: the number of classes.
        alpha: as for :func:`mixup`; the paper uses 1.
        generator: the source of the random numbers, on the CPU.

    Returns:
        The images, and the targets (batch, classes) fp32.

    Raises:
        UserError: the numbers of images and labels differ, or ``alpha`` is not positive.
    """
    partner, lam = _draw(images, labels, alpha, generator, whole=True)
    height, width = images.shape[-2:]
    side = (1 - lam).sqrt()
    inside = []
    for size in (height, width):
        centre = torch.rand(len(images), generator=generator).to(images.device) * size
        cut = side * size
        first, last = (centre - cut / 2).round(), (centre + cut / 2).round()
        position = torch.arange(size, device=images.device)
        inside.append((position >= first[:, None]) & (position < last[:, None]))  # (batch, size)
    replaced = inside[0][:, :, None] & inside[1][:, None, :]  # (batch, height, width)
    kept = 1 - replaced.float().mean((1, 2))
    mixed = torch.where(replaced[:, None], images[partner], images)
    return mixed, _targets(labels, partner, kept, classes)


def _draw(
    images: Tensor, labels: Tensor, alpha: float, generator: torch.Generator | None, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the partner (batch,) int64 and the share (batch,) of each image."""
    if len(images) != len(labels):
        raise UserError(f"{len(images)} images and {len(labels)} labels: give one label for each image")
    if not alpha > 0:
        raise UserError(f"alpha is {alpha}: use a positive number")
    if not whole and not images.is_floating_point():
        raise UserError(f"images of {images.dtype} cannot be averaged: convert them to floating point")
    # PyTorch's Beta distribution takes no generator.
    seed = torch.randint(2**63 - 1, (), generator=generator).item()
    shares = np.random.default_rng(int(seed)).beta(alpha, alpha, len(images))
    partner = torch.randperm(len(images), generator=generator)
    dtype = images.dtype if images.is_floating_point() else torch.float32
    return partner.to(images.device), torch.from_numpy(shares).to(images.device, dtype)


def _targets(labels: Tensor, partner: Tensor, lam: Tensor, classes: int) -> Tensor:
    own = F.one_hot(labels, classes).to(lam.dtype)
    return torch.lerp(own[partner], own, lam[:, None])
