"""Balanced sampling and feature scaling."""

from __future__ import annotations

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.data import FeatureStatistics, balanced_order

LABELS = torch.tensor([7] * 10 + [2] * 3 + [5])


def test_every_class_occurs_equally_often_and_repeats_in_whole_passes():
    order = balanced_order(LABELS, seed=1)
    assert len(order) == 30
    assert torch.bincount(LABELS[order]).tolist() == [0, 0, 10, 0, 0, 10, 0, 10]
    uses = torch.bincount(order, minlength=14)
    assert uses[:10].tolist() == [1] * 10
    assert sorted(uses[10:13].tolist()) == [3, 3, 4]
    assert uses[13] == 10
    assert LABELS[order].tolist() != sorted(LABELS[order].tolist())


def test_an_epoch_is_reproducible_and_a_small_one_takes_other_images_each_time():
    first, second = (balanced_order(LABELS, seed=1, epoch=epoch, per_class=2) for epoch in (0, 1))
    assert torch.equal(first, balanced_order(LABELS, seed=1, epoch=0, per_class=2))
    seen = {tuple(sorted(balanced_order(LABELS, seed=1, epoch=e, per_class=2).tolist())) for e in range(6)}
    assert len(seen) > 2
    assert len(first) == len(second) == 6
    for labels, options in ((LABELS[:0], {}), (LABELS[None], {}), (LABELS, {"per_class": 0})):
        with pytest.raises(UserError, match=r"give one label|use at least 1"):
            balanced_order(labels, seed=0, **options)


def test_merged_statistics_are_those_of_all_data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(50, 3, 4, 5, generator=generator) * torch.tensor([1.0, 5, 0]).view(3, 1, 1) + 1e4
    parts = images.split([1, 20, 29])
    statistics = FeatureStatistics.of(parts[0])
    for part in parts[1:]:
        statistics = statistics.merged(FeatureStatistics.of(part))
    expected = images.double().movedim(1, 0).flatten(1)
    torch.testing.assert_close(statistics.mean, expected.mean(1))
    torch.testing.assert_close(statistics.std, expected.std(1, correction=0))
    scaled = statistics.scale(images)
    assert scaled.dtype == torch.float32
    assert scaled[:, :2].mean((0, 2, 3)).abs().max() < 1e-3
    assert scaled[:, 2].abs().max() == 0
    rows = FeatureStatistics.of(images[0, 0], dim=-1)
    torch.testing.assert_close(
        rows.scale(images[0, 0], dim=-1).double(),
        (images[0, 0].double() - images[0, 0].double().mean(0)) / images[0, 0].double().std(0, correction=0),
        atol=1e-5,
        rtol=1e-5,
    )
    with pytest.raises(UserError, match="3 and 5 features"):
        statistics.merged(rows)
    with pytest.raises(UserError, match="an empty batch"):
        FeatureStatistics.of(images[:0])


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6 + 0.7])
def test_a_constant_feature_becomes_zero_although_its_mean_is_rounded(value):
    parts = [torch.full((rows, 2), value, dtype=torch.float64) for rows in (3, 7, 11)]
    for part in parts:
        part[:, 1] = torch.arange(len(part))
    statistics = FeatureStatistics.of(parts[0])
    for part in parts[1:]:
        statistics = statistics.merged(FeatureStatistics.of(part))
    scaled = statistics.scale(torch.tensor([[value, 1.0], [value + 2, 5.0]], dtype=torch.float64))
    assert (scaled[:, 0] == 0).all()
    assert (scaled[:, 1] != 0).all()
