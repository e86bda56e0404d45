"""Images of the shape of CIFAR-10, generated from a seed, with a known best accuracy.

An image shows stripes with noise. Its class is the direction of the stripes: class c of 10 has the direction
    theta = 18 c + spread * z  degrees,   z ~ N(0, 1),   modulo 180.
Neighbouring classes overlap. The best prediction is the nearest of the ten directions, and no model exceeds
    best accuracy = P(|spread z| < 9) = erf(9 / (spread * sqrt(2))).
The position, width and colours of the stripes and the pixel noise are independent of the class. All classes
have the same grey mean image, so a linear model is only slightly better than chance, while a convolution
detects stripes.

The numbers come from integer hashes (with Box-Muller for the normal distribution) and do not depend on the
version of PyTorch or NumPy. The first n images do not depend on the number of images. Cost: about 1 s for
3,000 images of 32 x 32."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.data.images import ImageData, standardised
from dlo_lib.data.reproducible import hashes

CLASSES = 10
CHANNELS = 3
_HALF_SPACING = 180 / CLASSES / 2
_NUISANCES = 2 + 2 * CHANNELS  # phase, wavelength, and for each channel a contrast and a brightness


@dataclass(frozen=True)
class Level:
    """The difficulty of the generated images.

    Attributes:
        spread: the standard deviation of the direction within a class, in degrees; it sets the best accuracy.
        noise: the standard deviation of the pixel noise; the stripes range from -1 to 1. It sets how many
            images are needed to learn the stripes.
    """

    spread: float
    noise: float

    @property
    def best_accuracy(self) -> float:
        """The highest expected accuracy of any model, in [0, 1]."""
        return math.erf(_HALF_SPACING / (self.spread * math.sqrt(2)))


class Difficulty(enum.Enum):
    """Three predefined levels; any other :class:`Level` is valid too.

    The table shows the test accuracy in per cent of one run with 2,000 training and 1,000 test images and ten
    epochs of SGD (batch 64, OneCycle to 0.2, momentum 0.9). With 1,000 images, the standard error is 0.2 to
    1.5, so a result can exceed the best expected accuracy:

    ====== ===== ============= ========
    level  best  linear model  ResNet-8
    ====== ===== ============= ========
    EASY   99.7  23.7          99.8
    MEDIUM 92.8  15.6          94.6
    HARD   68.3  14.2          70.4
    ====== ===== ============= ========
    """

    EASY = Level(spread=3.0, noise=0.3)
    MEDIUM = Level(spread=5.0, noise=0.8)
    HARD = Level(spread=9.0, noise=1.2)


def generated(
    difficulty: Difficulty | Level = Difficulty.MEDIUM,
    *,
    train: int = 2_000,
    test: int = 1_000,
    size: int = 32,
    seed: int = 0,
) -> ImageData:
    """Generate ``train`` and ``test`` images (3, ``size``, ``size``) in 10 equally likely classes.

    Raises:
        UserError: a part is empty, or the images are too small for stripes.
    """
    if train < 1 or test < 1:
        raise UserError(f"{train} training images and {test} test images: use at least 1 of each")
    if size < 8:
        raise UserError(f"size is {size}: stripes need at least 8 pixels")
    level = difficulty.value if isinstance(difficulty, Difficulty) else difficulty
    classes = tuple(f"{round(2 * _HALF_SPACING * c)} degrees" for c in range(CLASSES))
    return standardised(
        "generated", _draw(level, train, size, seed, 0), _draw(level, test, size, seed, 1), classes
    )


def _draw(level: Level, count: int, size: int, *stream: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate images (count, 3, size, size) fp32 and labels (count,) int64."""
    labels = (hashes(count, *stream, 0) % np.uint64(CLASSES)).astype(np.int64)
    theta = np.deg2rad(2 * _HALF_SPACING * labels + level.spread * _normal(count, *stream, 1))
    uniform = _uniform(count * _NUISANCES, *stream, 2).reshape(count, _NUISANCES)
    phase = 2 * np.pi * uniform[:, 0]
    frequency = 2 * np.pi / size * (4 + 2 * uniform[:, 1])  # 4 to 6 stripes per image
    contrast, brightness = 0.5 + uniform[:, 2 : 2 + CHANNELS] / 2, uniform[:, 2 + CHANNELS :] - 0.5

    place = np.arange(size) - (size - 1) / 2
    across = (
        np.cos(theta)[:, None, None] * place[None, None, :]
        + np.sin(theta)[:, None, None] * place[None, :, None]
    )
    stripes = np.sin(frequency[:, None, None] * across + phase[:, None, None])  # (count, size, size)
    images = contrast[:, :, None, None] * stripes[:, None] + brightness[:, :, None, None]
    images += level.noise * _normal(images.size, *stream, 3).reshape(images.shape)
    return images.astype(np.float32), labels


def _uniform(count: int, *seeds: int) -> np.ndarray:
    """Generate uniform numbers in [0, 1), (count,) float64."""
    return (hashes(count, *seeds) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _normal(count: int, *seeds: int) -> np.ndarray:
    """Generate normal numbers, (count,) float64: two from the two halves of each hash
    (Box and Muller, 1958)."""
    pairs = hashes((count + 1) // 2, *seeds)
    high = ((pairs >> np.uint64(32)).astype(np.float64) + 1) * 2.0**-32  # in (0, 1]: its logarithm exists
    angle = 2 * np.pi * 2.0**-32 * (pairs & np.uint64(0xFFFFFFFF)).astype(np.float64)
    radius = np.sqrt(-2 * np.log(high))
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]
