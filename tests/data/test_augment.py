"""Augmentation of batches, against Pillow and against a computation image by image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps

from dlo_lib.base.errors import UserError
from dlo_lib.data.augment import RandAugment, cutmix, mixup
from dlo_lib.data.augment.colours import COLOURS
from dlo_lib.data.augment.geometry import GEOMETRY, warp
from dlo_lib.data.augment.rand_augment import OPERATIONS

CLASSES = 5


def batch(
    count: int = 6, height: int = 12, width: int = 9, channels: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 8-bit values in [0, 1], and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(40, 220, (count, channels, height, width), generator=generator) / 255
    return images, torch.arange(count) % CLASSES


def test_mixup_is_the_mean_of_two_images_and_of_their_labels():
    images, labels = batch(8)
    generator = torch.Generator().manual_seed(3)
    mixed, targets = mixup(images, labels, CLASSES, alpha=1.0, generator=generator)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))
    explained = 0
    for index in range(8):
        for partner in range(8):
            lam = targets[index, labels[index]] if labels[partner] != labels[index] else torch.tensor(0.5)
            expected = lam * images[index] + (1 - lam) * images[partner]
            target = lam * F.one_hot(labels[index], CLASSES) + (1 - lam) * F.one_hot(labels[partner], CLASSES)
            if torch.allclose(mixed[index], expected, atol=1e-6) and torch.allclose(targets[index], target):
                explained += 1
                break
    assert explained >= 7  # a pair with one label does not show its share
    again = mixup(images, labels, CLASSES, 1.0, torch.Generator().manual_seed(3))
    assert torch.equal(mixed, again[0])
    assert len({round(row.max().item(), 4) for row in targets}) > 4  # each image has its own share


def test_a_small_alpha_leaves_most_images_nearly_as_they_are():
    labels = torch.arange(4000) % CLASSES
    generator = torch.Generator().manual_seed(0)
    near = {}
    for alpha in (0.1, 1.0):
        _, targets = mixup(torch.zeros(4000, 1), labels, CLASSES, alpha, generator)
        near[alpha] = ((targets > 0.05) & (targets < 0.95)).any(1).double().mean().item()
    assert near[0.1] < 0.45 * near[1.0]


def test_cutmix_replaces_a_rectangle_and_the_label_by_its_true_share():
    images, labels = batch(CLASSES)  # one image a class: the target names the partner
    for seed in range(20):
        mixed, targets = cutmix(images, labels, CLASSES, generator=torch.Generator().manual_seed(seed))
        for index in range(CLASSES):
            changed = (mixed[index] != images[index]).any(0)
            others = [int(k) for k in targets[index].nonzero().flatten() if k != index]
            assert len(others) <= 1
            rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
            if not others:  # its own partner, or an empty rectangle
                assert not changed.any()
                continue
            (partner,) = others
            box = mixed[index][:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert torch.equal(
                box, images[partner][:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            )
            assert targets[index, partner].item() == pytest.approx(
                box[0].numel() / images[0, 0].numel(), abs=1e-6
            )


def test_the_cut_has_the_share_that_was_drawn():
    """A large alpha draws the share 0.5. Only the border of the image makes a rectangle smaller."""
    images = torch.zeros(3000, 1, 64, 64)
    labels = torch.arange(3000) % CLASSES
    _, targets = cutmix(images, labels, CLASSES, alpha=1e6, generator=torch.Generator().manual_seed(0))
    replaced = 1 - targets.gather(1, labels[:, None])
    assert replaced.max() == pytest.approx(0.5, abs=0.03)
    assert replaced[replaced > 0].median() > 0.25


def test_wrong_batches_are_refused():
    images, labels = batch()
    for mix in (mixup, cutmix):
        with pytest.raises(UserError, match="one label for each image"):
            mix(images, labels[:-1], CLASSES)
        with pytest.raises(UserError, match="use a positive number"):
            mix(images, labels, CLASSES, alpha=0.0)
    with pytest.raises(UserError, match="cannot be averaged"):
        mixup((images * 255).byte(), labels, CLASSES)
    assert cutmix((images * 255).byte(), labels, CLASSES)[0].dtype == torch.uint8
    with pytest.raises(UserError, match="give .batch, channels, height, width."):
        RandAugment()(images[0])
    with pytest.raises(UserError, match="0 to 30"):
        RandAugment(magnitude=31)


def pil(image: torch.Tensor) -> Image.Image:
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())


def values(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


ORACLES = {
    "brightness": (lambda image, x: ImageEnhance.Brightness(image).enhance(x), [0.3, 1.7]),
    "saturation": (lambda image, x: ImageEnhance.Color(image).enhance(x), [0.3, 1.7]),
    "contrast": (lambda image, x: ImageEnhance.Contrast(image).enhance(x), [0.3, 1.7]),
    "sharpness": (lambda image, x: ImageEnhance.Sharpness(image).enhance(x), [0.3, 1.7]),
    "posterize": (lambda image, x: ImageOps.posterize(image, int(x)), [4, 7]),
    "solarize": (lambda image, x: ImageOps.solarize(image, round(x * 255)), [0.2, 0.6]),
    "autocontrast": (lambda image, _: ImageOps.autocontrast(image), [0, 0]),
    "equalize": (lambda image, _: ImageOps.equalize(image), [0, 0]),
}


@pytest.mark.parametrize("name", COLOURS)
def test_a_colour_operation_is_that_of_pillow(name):
    """Pillow rounds to 8 bits in between; brightness and the blends may differ by one or two levels."""
    images, _ = batch(2, 40, 30)
    oracle, strengths = ORACLES[name]
    ours = COLOURS[name](images, torch.tensor(strengths, dtype=torch.float32))
    for image, result, strength in zip(images, ours, strengths, strict=True):
        assert (result - values(oracle(pil(image), strength))).abs().max() <= 2.5 / 255


def test_equalize_keeps_a_constant_channel():
    flat = torch.full((1, 3, 4, 4), 100 / 255)
    assert torch.equal(COLOURS["equalize"](flat, torch.zeros(1)), flat)
    assert torch.equal(COLOURS["autocontrast"](flat, torch.zeros(1)), flat)


@pytest.mark.parametrize("name", GEOMETRY)
def test_a_geometric_operation_is_that_of_pillow(name):
    images, _ = batch(2, 24, 16)
    strengths = torch.tensor(
        {"rotate": [25.0, -12.0]}.get(name, [3.0, -2.0] if "translate" in name else [0.287, -0.193])
    )
    matrices = GEOMETRY[name](strengths)
    moved = warp(images, matrices, fill=0.5)
    for image, result, matrix in zip(images, moved, matrices, strict=True):
        (a, b, c), (d, e, f) = matrix.tolist()
        x, y = 16 / 2, 24 / 2  # Pillow measures from the corner of the image
        data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
        expected = values(
            pil(image).transform((16, 24), Image.Transform.AFFINE, data, fillcolor=(128, 128, 128))
        )
        same = ((result - expected).abs() < 1.5 / 255).all(0).double().mean()
        assert same > 0.97  # a position between two pixels may be rounded to either
    if name == "rotate":
        ninety = warp(images[:, :, :16], rotate_by(90.0), 0.5)
        assert torch.equal(ninety, torch.rot90(images[:, :, :16], 1, (2, 3)))


def rotate_by(degrees: float) -> torch.Tensor:
    return GEOMETRY["rotate"](torch.full((2,), degrees))


def test_each_image_passes_its_own_operation():
    images, _ = batch(2 * len(OPERATIONS), 16, 16)
    augment = RandAugment(magnitude=15)
    drawn, signs = torch.arange(len(images)) % len(OPERATIONS), torch.tensor([1, -1]).repeat(len(OPERATIONS))
    together = augment.augment(images, drawn, signs)
    for index in range(len(images)):
        one = slice(index, index + 1)
        assert torch.equal(augment.augment(images[one], drawn[one], signs[one]), together[one])
    unchanged = [
        OPERATIONS[index % len(OPERATIONS)]
        for index in range(len(images))
        if torch.equal(together[index], images[index])
    ]
    assert unchanged == ["identity", "identity"]
    assert together.min() >= 0
    assert together.max() <= 1


def test_magnitude_0_changes_little_and_rounds_0_nothing():
    images, _ = batch(60, channels=1)
    assert torch.equal(RandAugment(rounds=0)(images), images)
    weak, strong = (
        (RandAugment(1, magnitude, generator=torch.Generator().manual_seed(0))(images) - images).abs().mean()
        for magnitude in (0, 30)
    )
    assert weak < 0.4 * strong
