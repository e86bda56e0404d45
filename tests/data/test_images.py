"""Training and test images: disjoint parts, statistics of the training part only, a reproducible order."""

import sys

import numpy as np
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.data.images import LabelledImages, digits, standardised
from dlo_lib.data.reproducible import permutation
from tests.lazy import Lazy

datasets = Lazy("sklearn.datasets")


def numbered(count: int) -> LabelledImages:
    return LabelledImages(
        torch.arange(count, dtype=torch.float32).reshape(count, 1, 1, 1), torch.arange(count)
    )


@pytest.mark.parametrize(("count", "batch"), [(10, 3), (9, 3), (2, 5), (1, 1)])
def test_an_epoch_contains_every_image_once_with_its_label(count, batch):
    parts = list(numbered(count).batches(batch, seed=1))
    labels = torch.cat([part.labels for part in parts])
    assert sorted(labels.tolist()) == list(range(count))
    assert torch.equal(torch.cat([part.images for part in parts]).flatten(), labels.float())
    assert all(len(part) == batch for part in parts[:-1])
    assert 1 <= len(parts[-1]) <= batch


def test_the_order_depends_only_on_the_seed_and_the_epoch():
    def order(**which: int) -> list[int]:
        return torch.cat([part.labels for part in numbered(50).batches(7, **which)]).tolist()

    first = order(seed=3, epoch=2)
    torch.manual_seed(99)
    assert order(seed=3, epoch=2) == first
    assert order(seed=3, epoch=3) != first
    assert order(seed=4, epoch=2) != first
    assert first[:5] == [45, 0, 16, 21, 28], "the same on every machine"


def test_a_batch_of_zero_raises_with_the_cure():
    with pytest.raises(UserError, match="batch is 0: use at least 1 image"):
        next(numbered(3).batches(0, seed=0))


def test_digits_are_split_into_two_disjoint_parts():
    data = digits()
    assert data.shape == (1, 8, 8)
    assert (len(data.train), len(data.test)) == (1348, 449)
    for part in (data.train, data.test):
        assert part.images.dtype == torch.float32
        assert part.labels.dtype == torch.int64
        assert set(part.labels.tolist()) == set(range(10)), "every class is present"
    assert data.classes[7] == "7"
    seen = {image.numpy().tobytes() for image in data.train.images}
    assert not seen & {image.numpy().tobytes() for image in data.test.images}


def test_digits_are_those_of_scikit_learn():
    raw, data = datasets.load_digits(), digits()
    order = permutation(len(raw.target), 0)
    kept = np.arange(len(order)) % 4 != 3
    assert torch.equal(data.train.labels, torch.from_numpy(raw.target[order][kept]))
    pixels = raw.images[order][kept]
    assert np.allclose(data.train.images[:, 0], (pixels - pixels.mean()) / pixels.std(), atol=1e-5)


def test_digits_without_scikit_learn_raise_with_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match="pip install scikit-learn"):
        digits()


def test_pixels_are_standardised_with_the_statistics_of_the_training_images_only():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (40, 3, 5, 4), dtype=np.uint8)
    train[:, 2] = 7  # a constant channel
    test = rng.integers(0, 256, (6, 3, 5, 4), dtype=np.uint8)
    data = standardised("noise", (train, np.zeros(40)), (test, np.ones(6)), ("a", "b"))
    assert torch.allclose(data.train.images[:, :2].mean((0, 2, 3)), torch.zeros(2), atol=1e-5)
    assert torch.allclose(data.train.images[:, :2].std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5)
    assert (data.train.images[:, 2] == 0).all()
    expected = (test[:, :2] - train[:, :2].mean((0, 2, 3), keepdims=True)) / train[:, :2].std(
        (0, 2, 3), keepdims=True
    )
    assert np.allclose(data.test.images[:, :2], expected, atol=1e-5)


def test_first_and_to_keep_images_and_labels_together():
    part = numbered(6).first(4)
    assert len(part) == 4
    assert torch.equal(part.images.flatten(), part.labels.float())
    moved = digits().to("meta")
    assert moved.train.images.is_meta
    assert moved.test.labels.is_meta
