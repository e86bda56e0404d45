"""Small images with labels, whole in memory: what they are, what they are divided into, and the real digits that come with a package.

A data set is four tensors: images (n, channels, height, width) fp32 and labels (n,) int64, to learn from and to test with. Pixels are
standardised with the mean and standard deviation, per channel, of the training images alone:  x <- (x - mean) / std.  Cost: 4 bytes a
pixel and channel, so 0.7 GiB for all of CIFAR-10 and 0.5 MB for the digits.

Digits: Alpaydin and Kaynak, Optical recognition of handwritten digits (UCI, 1998, doi:10.24432/C50P49); scikit-learn has their test part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dlo_lib.data.reproducible import permutation
from dlo_lib.errors import UserError

_TEST_EVERY = 4
"""One digit in so many, of a fixed shuffle, is kept to test with."""


@dataclass(frozen=True)
class LabelledImages:
    """Images (n, channels, height, width) fp32 and labels (n,) int64, on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> LabelledImages:
        """The first ``count``; all of them when there are fewer."""
        return LabelledImages(self.images[:count], self.labels[:count])

    def batches(self, batch: int, *, seed: int, epoch: int = 0) -> Iterator[LabelledImages]:
        """One epoch, in an order of (``seed``, ``epoch``) that is the same everywhere; the last batch holds what is left over.

        Raises:
            UserError: ``batch`` is below 1.
        """
        if batch < 1:
            raise UserError(f"batch is {batch}: use at least 1 image")
        order = torch.from_numpy(permutation(len(self), seed, epoch)).to(self.labels.device)
        for chosen in order.split(batch):
            yield LabelledImages(self.images[chosen], self.labels[chosen])


@dataclass(frozen=True)
class ImageData:
    """A data set: ``train`` to learn from, ``test`` to measure with, and the classes' names; label k is ``classes[k]``."""

    name: str
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> ImageData:
        """The same on ``device``: small data sets are fastest when they live there."""

        def move(part: LabelledImages) -> LabelledImages:
            return LabelledImages(part.images.to(device), part.labels.to(device))

        return replace(self, train=move(self.train), test=move(self.test))


def digits() -> ImageData:
    """1,797 real handwritten digits of 8 x 8 pixels in 17 grey levels: 1,348 to learn from, 449 to test with; 1 channel, 10 classes.

    No download: they are part of scikit-learn.

    Raises:
        UserError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("the digits come with scikit-learn, which is not installed: pip install scikit-learn") from error
    raw = load_digits()
    order = permutation(len(raw.target), 0)
    images = raw.images[order].astype(np.float32)[:, None]
    labels = raw.target[order].astype(np.int64)
    test = np.arange(len(labels)) % _TEST_EVERY == _TEST_EVERY - 1
    return standardised("digits", (images[~test], labels[~test]), (images[test], labels[test]), tuple("0123456789"))


def standardised(
    name: str, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], classes: tuple[str, ...]
) -> ImageData:
    """A data set of ``train`` and ``test``, each images (n, channels, height, width) of any dtype and labels (n,).

    Both are standardised with the numbers of ``train``: what is known of the test images may not touch what is learned.
    """
    images = torch.from_numpy(train[0]).float()
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True, correction=0)
    std = std.clamp(min=torch.finfo(torch.float32).tiny)  # a channel of one colour stays 0

    def part(pixels: Tensor, labels: np.ndarray) -> LabelledImages:
        return LabelledImages((pixels - mean) / std, torch.from_numpy(labels.astype(np.int64)))

    return ImageData(name, part(images, train[1]), part(torch.from_numpy(test[0]).float(), test[1]), classes)
