"""Operations on the values of pixels, for a batch of images in [0, 1], each with its own strength.

All have 256 levels in mind, as 8-bit images have: posterize and equalize round to them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 256
_LUMA = (0.299, 0.587, 0.114)  # the grey value of red, green and blue (ITU-R BT.601)


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply the values by ``factor`` (n,): 0 is black, 1 changes nothing."""
    return _blend(torch.zeros_like(images), images, factor)


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey image: a factor of 0 is grey, 1 changes nothing."""
    return _blend(_grey(images).expand_as(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey value of the image: a factor of 0 is one grey, 1 changes nothing."""
    return _blend(_grey(images).mean((1, 2, 3), keepdim=True).expand_as(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: a factor of 0 is smooth, 1 changes nothing, 2 is sharp."""
    channels = images.shape[1]
    kernel = images.new_ones(3, 3)
    kernel[1, 1] = 5
    kernel = (kernel / kernel.sum()).expand(channels, 1, 3, 3)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=channels)  # the border stays
    return _blend(smooth, images, factor)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` (n,) of the 8 bits of each value."""
    step = _each(2 ** (8 - bits.round()))
    return (_whole(images) / step).floor() * step / (LEVELS - 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values that are at least ``threshold`` (n,), which lies in [0, 1]."""
    return torch.where(images >= _each(threshold), 1 - images, images)


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to [0, 1]; a constant channel stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-12), images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Map the values of each channel so that all levels are about equally frequent.

    The table is that of Pillow: the highest level that occurs does not count in the step.
    """
    rows = _whole(images).long().flatten(2).flatten(0, 1)  # (n * channels, pixels)
    counts = rows.new_zeros(len(rows), LEVELS).scatter_add_(1, rows, torch.ones_like(rows))
    levels = torch.arange(LEVELS, device=rows.device)
    highest = counts.gather(1, rows.amax(1, keepdim=True))
    step = (counts.sum(1, keepdim=True) - highest) // (LEVELS - 1)
    below = counts.cumsum(1) - counts
    table = torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), levels).clamp(max=LEVELS - 1)
    return (table.gather(1, rows).to(images.dtype) / (LEVELS - 1)).view_as(images)


COLOURS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": brightness,
    "saturation": saturation,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
}
"""The operations by name. Each takes images (n, channels, height, width) and a strength (n,)."""


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return (base + _each(factor) * (images - base)).clamp(0, 1)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _grey(images: Tensor) -> Tensor:
    """(n, 1, height, width); the mean of the channels unless there are three."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    weights = images.new_tensor(_LUMA).view(1, 3, 1, 1)
    return (images * weights).sum(1, keepdim=True)


def _whole(images: Tensor) -> Tensor:
    return (images * (LEVELS - 1)).round().clamp(0, LEVELS - 1)
