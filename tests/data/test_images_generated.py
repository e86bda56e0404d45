"""Generated images: the documented best accuracy, the same numbers on every machine, equal mean images."""

import hashlib
import math

import numpy as np
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.data.images_generated import CLASSES, Difficulty, Level, _draw, _normal, _uniform, generated


def directions(images: torch.Tensor) -> torch.Tensor:
    """Estimate the direction of the stripes in degrees, (n,), from the peak of the
    spectrum, without labels."""
    size = images.shape[-1]
    window = torch.hann_window(size, periodic=False)
    centred = (images - images.mean((2, 3), keepdim=True)) * window[:, None] * window
    power = torch.fft.fft2(centred, s=(4 * size, 4 * size)).abs().square().sum(1)
    k = torch.fft.fftfreq(4 * size) * size
    ky, kx = torch.meshgrid(k, k, indexing="ij")
    ring = (ky.hypot(kx) - 5).abs() < 2
    doubled = 2 * torch.atan2(ky, kx)  # a direction and its opposite are the same stripes
    power = torch.where(ring, power, 0) ** 4  # the peak, not the noise around it
    angle = torch.atan2((power * doubled.sin()).sum((1, 2)), (power * doubled.cos()).sum((1, 2))) / 2
    return angle.rad2deg() % 180


@pytest.mark.parametrize("difficulty", Difficulty)
def test_the_nearest_direction_has_the_documented_accuracy(difficulty):
    data = generated(difficulty, train=1, test=900, seed=3)
    guess = (directions(data.test.images) / 18).round().long() % CLASSES
    accuracy = (guess == data.test.labels).double().mean().item()
    best = difficulty.value.best_accuracy
    luck = 4 * math.sqrt(best * (1 - best) / 900) + 0.002
    assert accuracy == pytest.approx(best, abs=luck), "the estimator reaches the bound and does not exceed it"


def test_the_best_accuracy_is_the_normal_probability_within_half_the_spacing():
    assert Level(spread=9.0, noise=0.0).best_accuracy == pytest.approx(0.682689, abs=1e-6), "one sigma"
    assert Level(spread=4.5, noise=5.0).best_accuracy == pytest.approx(0.954500, abs=1e-6), "two"


def test_the_first_images_do_not_depend_on_the_number_of_images():
    images, labels = _draw(Difficulty.MEDIUM.value, 9, 11, 0, 0)
    fewer, fewer_labels = _draw(Difficulty.MEDIUM.value, 4, 11, 0, 0)
    assert np.array_equal(images[:4], fewer)
    assert np.array_equal(labels[:4], fewer_labels)


def test_training_images_test_images_and_seeds_give_different_draws():
    data, other = generated(train=30, test=30, size=9), generated(train=30, test=30, size=9, seed=1)
    assert data.shape == (3, 9, 9)
    assert not torch.equal(data.train.labels, data.test.labels)
    assert not torch.equal(data.train.labels, other.train.labels)


def test_the_labels_are_the_same_on_every_machine():
    labels = generated(train=500, test=1, size=8).train.labels
    assert hashlib.sha256(labels.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "53f9e50e8b39b697"


def test_every_class_has_the_same_mean_image():
    data = generated(Difficulty.EASY, train=4000, test=1, size=8)
    means = torch.stack([data.train.images[data.train.labels == c].mean(0) for c in range(CLASSES)])
    assert means.abs().max() < 6 / math.sqrt(4000 / CLASSES), "a linear model cannot use the mean image"


def test_the_numbers_are_uniform_and_normal():
    uniform, normal = _uniform(200_000, 5), _normal(200_001, 5)
    assert 0 <= uniform.min() < uniform.max() < 1
    assert uniform.mean() == pytest.approx(0.5, abs=0.004)
    assert normal.shape == (200_001,)
    assert normal.mean() == pytest.approx(0, abs=0.01)
    assert normal.std() == pytest.approx(1, abs=0.01)
    assert np.mean(normal**4) == pytest.approx(3, abs=0.1)
    assert np.corrcoef(normal[:-1:2], normal[1::2])[0, 1] == pytest.approx(0, abs=0.015), (
        "the two numbers of a pair are independent"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"train": 0}, "use at least 1 of each"),
        ({"test": 0}, "use at least 1"),
        ({"size": 7}, "at least 8 pixels"),
    ],
)
def test_invalid_sizes_raise_with_the_cure(sizes, message):
    with pytest.raises(UserError, match=message):
        generated(**sizes)
