"""Affine operations on a batch of images, each with its own strength.

An operation gives each image a 2 x 3 matrix that maps a position of the output to the position of the input
from which its pixel comes, in pixels around the centre of the image. One ``grid_sample`` then moves the
pixels of all images.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def shear_x(amount: Tensor) -> Tensor:
    """Return matrices (n, 2, 3) that shift a row by ``amount`` (n,) times its distance from the centre."""
    return _matrix(amount, {(0, 1): amount})


def shear_y(amount: Tensor) -> Tensor:
    """Return matrices (n, 2, 3) that shift a column by ``amount`` times its distance from the centre."""
    return _matrix(amount, {(1, 0): amount})


def translate_x(pixels: Tensor) -> Tensor:
    """Return matrices (n, 2, 3) that shift an image to the left by ``pixels`` (n,)."""
    return _matrix(pixels, {(0, 2): pixels})


def translate_y(pixels: Tensor) -> Tensor:
    """Return matrices (n, 2, 3) that shift an image up by ``pixels`` (n,)."""
    return _matrix(pixels, {(1, 2): pixels})


def rotate(degrees: Tensor) -> Tensor:
    """Return matrices (n, 2, 3) that turn an image counter-clockwise by ``degrees`` (n,)."""
    angle = degrees * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    return _matrix(degrees, {(0, 0): cos, (0, 1): -sin, (1, 0): sin, (1, 1): cos})


GEOMETRY: dict[str, Callable[[Tensor], Tensor]] = {
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
}
"""The affine operations by name."""


def warp(images: Tensor, matrices: Tensor, fill: float) -> Tensor:
    """Return the images, moved by their matrices, with the nearest pixel; ``fill`` where the input ends.

    Args:
        images: (n, channels, height, width), floating point.
        matrices: (n, 2, 3), in pixels around the centre.
    """
    height, width = images.shape[-2:]
    size = matrices.new_tensor([width, height])
    # grid_sample measures positions from -1 to 1 over the image.
    linear = matrices[:, :, :2] * size[None, None, :] / size[None, :, None]
    shift = matrices[:, :, 2:] * 2 / size[None, :, None]
    grid = F.affine_grid(torch.cat([linear, shift], 2), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid.to(images.dtype), mode="nearest", align_corners=False)
    inside = (grid.abs() < 1).all(3)[:, None]
    return torch.where(inside, moved, torch.full_like(moved, fill))


def _matrix(like: Tensor, entries: dict[tuple[int, int], Tensor]) -> Tensor:
    matrix = torch.eye(2, 3, device=like.device).repeat(len(like), 1, 1)
    for (row, column), value in entries.items():
        matrix[:, row, column] = value
    return matrix
