"""RandAugment: each image passes a few operations that are drawn at random, all with the same magnitude.

Two numbers replace a search over policies: how many operations, and how strong. The operations and their
ranges are those of the paper. In each round, the images are grouped by the operation that they drew, and an
operation computes its group at once: a loop over 14 operations, not over the images.

Paper: E. D. Cubuk et al., RandAugment (arXiv:1909.13719).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.data.augment.colours import COLOURS
from dlo_lib.data.augment.geometry import GEOMETRY, warp

MAGNITUDES = 30
"""The largest magnitude: the paper divides each range into 30 steps."""
OPERATIONS = ("identity", *GEOMETRY, *COLOURS)


class RandAugment(nn.Module):
    """Augment a batch of images with values in [0, 1].

    Args:
        rounds: the number of operations that each image passes (N of the paper).
        magnitude: the strength, from 0 to 30 (M of the paper).
        fill: the value of pixels that come from outside the image.
        generator: the source of the random numbers, on the CPU.

    Raises:
        UserError: ``rounds`` is negative or the magnitude outside 0 to 30; from a call, if the images are not
            (batch, channels, height, width) floating point.
    """

    def __init__(
        self,
        rounds: int = 2,
        magnitude: float = 9,
        fill: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if rounds < 0 or not 0 <= magnitude <= MAGNITUDES:
            raise UserError(f"rounds={rounds}, magnitude={magnitude}: use at least 0, and 0 to {MAGNITUDES}")
        self.rounds, self.magnitude, self.fill, self._generator = rounds, magnitude, fill, generator

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the augmented images, of the shape and dtype of ``images``."""
        if images.dim() != 4 or not images.is_floating_point():
            raise UserError(
                f"images of shape {tuple(images.shape)} and {images.dtype}: give (batch, channels, height, "
                "width) as floating point in [0, 1]"
            )
        for _ in range(self.rounds):
            drawn = torch.randint(len(OPERATIONS), (len(images),), generator=self._generator)
            signs = torch.randint(2, (len(images),), generator=self._generator) * 2 - 1
            images = self.augment(images, drawn.to(images.device), signs.to(images.device))
        return images

    def augment(self, images: Tensor, drawn: Tensor, signs: Tensor) -> Tensor:
        """Apply to each image the operation ``OPERATIONS[drawn]``, with its sign (both (batch,) int64)."""
        out = images.clone()
        for number, name in enumerate(OPERATIONS):
            chosen = (drawn == number).nonzero().flatten()
            if name == "identity" or not len(chosen):
                continue
            strength = self._strength(name, signs[chosen].to(images.dtype), images.shape)
            group = images[chosen]
            if name in GEOMETRY:
                out[chosen] = warp(group, GEOMETRY[name](strength), self.fill)
            else:
                out[chosen] = COLOURS[name](group, strength)
        return out

    def _strength(self, name: str, signs: Tensor, shape: torch.Size) -> Tensor:
        """Return the argument of the operation for each image of its group, (n,)."""
        share = self.magnitude / MAGNITUDES
        largest = {
            "shear_x": 0.3, "shear_y": 0.3, "rotate": 30.0,
            "translate_x": 150 / 331 * shape[3], "translate_y": 150 / 331 * shape[2],
            "brightness": 0.9, "saturation": 0.9, "contrast": 0.9, "sharpness": 0.9,
        }.get(name)  # fmt: skip
        if name in GEOMETRY:
            assert largest is not None
            return signs * share * largest
        if largest is not None:
            return 1 + signs * share * largest
        value = {"posterize": 8 - round(share * 4), "solarize": 1 - share}.get(name, 0)
        return torch.full_like(signs, value)
