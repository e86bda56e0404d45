"""Data sets of small labelled images in memory, and the handwritten digits of scikit-learn.

A data set has a training part and a test part, each with images (n, channels, height, width) fp32 and labels
(n,) int64. Pixels are standardised per channel with the mean and the standard deviation of the training
images: x <- (x - mean) / std.  Cost: 4 bytes per pixel and channel: 0.7 GiB for CIFAR-10, 0.5 MB for the
digits.

Digits: Alpaydin and Kaynak, Optical recognition of handwritten digits (UCI, 1998, doi:10.24432/C50P49);
scikit-learn contains their test part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.data.reproducible import permutation

_TEST_EVERY = 4
"""Every n-th digit of a fixed shuffle belongs to the test part."""


@dataclass(frozen=True)
class LabelledImages:
    """Images (n, channels, height, width) fp32 and labels (n,) int64, on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int) -> LabelledImages:
        """Return the first ``count`` images, or all if there are fewer."""
        return LabelledImages(self.images[:count], self.labels[:count])

    def batches(self, batch: int, *, seed: int, epoch: int = 0) -> Iterator[LabelledImages]:
        """Yield the batches of one epoch; the last batch may be smaller.

        The order depends only on (``seed``, ``epoch``) and is the same on every machine.

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
    """A data set with a training part, a test part and the names of the classes;
    label k is ``classes[k]``."""

    name: str
    train: LabelledImages
    test: LabelledImages
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image: channels, height, width."""
        _, channels, height, width = self.train.images.shape
        return channels, height, width

    def to(self, device: torch.device | str) -> ImageData:
        """Return a copy on ``device``.

        Training on a small data set is fastest when all of it is on the device.
        """

        def move(part: LabelledImages) -> LabelledImages:
            return LabelledImages(part.images.to(device), part.labels.to(device))

        return replace(self, train=move(self.train), test=move(self.test))


def digits() -> ImageData:
    """Load 1,797 handwritten digits of 8 x 8 pixels in 17 grey levels: 1,348 for training, 449 for the test.

    They have 1 channel and 10 classes. They are part of scikit-learn, so there is no download.

    Raises:
        UserError: scikit-learn is not installed.
    """
    # The file is read without scikit-learn, whose import takes two seconds of CPU time.
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError(
            "the digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        )
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise UserError(f"scikit-learn has no {file}: install it again")
    rows = np.loadtxt(file, delimiter=",", dtype=np.float32)  # 64 pixels and the label
    rows = rows[permutation(len(rows), 0)]
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
    test = np.arange(len(labels)) % _TEST_EVERY == _TEST_EVERY - 1
    return standardised(
        "digits", (images[~test], labels[~test]), (images[test], labels[test]), tuple("0123456789")
    )


def standardised(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    classes: tuple[str, ...],
) -> ImageData:
    """Create a data set from ``train`` and ``test``, each images (n, channels, height, width) of any dtype
    and labels (n,).

    Both are standardised with the statistics of ``train``, because the training must not use the test images.
    """
    images = torch.from_numpy(train[0]).float()
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True, correction=0)
    std = std.clamp(min=torch.finfo(torch.float32).tiny)  # a constant channel becomes 0

    def part(pixels: Tensor, labels: np.ndarray) -> LabelledImages:
        return LabelledImages((pixels - mean) / std, torch.from_numpy(labels.astype(np.int64)))

    return ImageData(name, part(images, train[1]), part(torch.from_numpy(test[0]).float(), test[1]), classes)
