"""Images in tar and Parquet shards: every sample once, equal parts for ranks and workers."""

from __future__ import annotations

import tarfile
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dlo_lib.data import ShardedImages, write_shards
from dlo_lib.errors import UserError

COUNT = 23


@pytest.fixture(params=["tar", "parquet"])
def folder(request, tmp_path):
    """23 images whose label is their number, in shards of 5, 5, 5, 5 and 3."""
    files = write_shards(*images(3), tmp_path / request.param, samples=5, kind=request.param)
    assert [file.suffix for file in files] == [f".{request.param}"] * 5
    return tmp_path / request.param


def images(channels: int) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, channels, 4, 6), dtype=np.uint8)
    return pixels, np.arange(COUNT)


def labels(dataset: ShardedImages) -> list[int]:
    return [label for _, label in dataset]


def test_images_come_back_bit_by_bit(folder):
    pixels, _ = images(3)
    for image, label in ShardedImages(folder):
        assert torch.equal(image, torch.from_numpy(pixels[label]))
    grey = write_shards(*images(1), folder / "grey", samples=30, kind=folder.name)
    assert next(iter(ShardedImages(grey)))[0].shape == (1, 4, 6)


@pytest.mark.parametrize("world_size", [1, 3, 23])
def test_ranks_read_equal_parts_and_no_sample_twice(folder, world_size):
    ranks = [ShardedImages(folder, rank, world_size, buffer=4) for rank in range(world_size)]
    read = [labels(rank) for rank in ranks]
    assert {len(part) for part in read} == {COUNT // world_size} == {len(rank) for rank in ranks}
    assert max(Counter(label for part in read for label in part).values()) == 1


def test_epochs_differ_and_are_reproducible(folder):
    def epoch(number: int, **options) -> list[int]:
        dataset = ShardedImages(folder, **options)
        dataset.epoch = number
        return labels(dataset)

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert sorted(epoch(0)) == sorted(epoch(1)) == list(range(COUNT))
    in_order = epoch(0, buffer=0)
    starts = [in_order[place] for place in range(COUNT) if in_order[place] % 5 == 0]
    assert sorted(starts) == [0, 5, 10, 15, 20] != starts  # whole shards, in an order that was drawn
    assert epoch(0, buffer=COUNT) != in_order


def test_workers_share_the_part_of_their_rank(folder):
    dataset = ShardedImages(folder, rank=1, world_size=2, buffer=3)
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    read = torch.cat([batch[1] for batch in loader]).tolist()
    assert sorted(read) == sorted(labels(dataset))


def test_an_index_is_not_needed(tmp_path):
    write_shards(*images(3), tmp_path, samples=9)
    (tmp_path / "shards.json").unlink()
    assert ShardedImages(tmp_path).counts == [9, 9, 5]


def test_what_cannot_be_read_is_one_line(tmp_path):
    files = write_shards(*images(3), tmp_path / "a", samples=9)
    with pytest.raises(UserError, match="no .tar and no .parquet file"):
        ShardedImages(tmp_path)
    parquet = write_shards(*images(3), tmp_path / "b", samples=9, kind="parquet")
    with pytest.raises(UserError, match="kinds .parquet, .tar"):
        ShardedImages([files[0], parquet[0]])
    with pytest.raises(UserError, match="23 samples for 24 ranks"):
        ShardedImages(tmp_path / "a", 0, 24)
    with pytest.raises(UserError, match="rank 2 of 2"):
        ShardedImages(tmp_path / "a", 2, 2)
    parquet[0].write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"00000.parquet cannot be read: .*: write it again"):
        ShardedImages(tmp_path / "b")
    with tarfile.open(files[0], "w") as archive:
        archive.add(files[1], "0001.png")
    with pytest.raises(UserError, match="has 0 samples with an image and a label, 9 were expected"):
        labels(ShardedImages(files[:1]))
    for options in ({"kind": "zip"}, {"samples": 0}):
        with pytest.raises(UserError, match="use 'tar' or 'parquet'"):
            write_shards(*images(3), tmp_path, **({"samples": 2} | options))
    with pytest.raises(UserError, match="of uint8 and one label each"):
        write_shards(images(3)[0].astype(np.float32), images(3)[1], tmp_path, 5)
