"""Images in tar and Parquet shards: every sample once, equal parts for ranks and workers."""

from __future__ import annotations

import copy
import io
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dlo_lib.base.errors import UserError
from dlo_lib.data import ShardedImages, write_shards

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


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_the_epoch_that_is_set(tmp_path, persistent):
    """A persistent worker has a copy of the data set, made when it starts."""
    write_shards(*images(3), tmp_path, samples=2)
    dataset = copy.deepcopy(ShardedImages(tmp_path, buffer=3))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=persistent)
    for epoch in (0, 2, 1):
        dataset.epoch = epoch
        read = iter(loader)
        first = next(read)
        dataset.epoch = 7  # of the next iteration, not of this one
        assert torch.cat([first[1], *(batch[1] for batch in read)]).tolist() == in_epoch(tmp_path, epoch)


def in_epoch(folder: Path, epoch: int) -> list[int]:
    dataset = ShardedImages(folder, buffer=3)
    dataset.epoch = epoch
    return labels(dataset)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def tar_of(file: Path, entries: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as archive:
        for name, data in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file


GREY = Image.fromarray(np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6))
COLOURS = Image.fromarray(np.kron(np.arange(8).reshape(2, 4, 1) * 30, np.ones((4, 4, 3))).astype(np.uint8))


def of_mode(mode: str) -> tuple[bytes, Image.Image]:
    """A file of each mode, and the image in grey or RGB that it shows."""
    shown = GREY if mode in ("1", "L", "LA", "I;16") else COLOURS
    if mode == "I;16":
        return encoded(Image.fromarray(np.asarray(shown).astype(np.uint16) * 256 + 17)), shown
    if mode == "1":
        shown = shown.point(lambda grey: 255 * (grey > 100))
        return encoded(shown.convert("1")), shown
    if mode == "CMYK":
        data = encoded(shown.convert("CMYK"), "JPEG", quality=100)
        return data, Image.open(io.BytesIO(data)).convert("RGB")
    if mode == "EXIF":
        exif = Image.Exif()
        exif[0x0112] = 6  # turned to the right
        return encoded(shown, exif=exif), shown.transpose(Image.Transpose.ROTATE_270)
    image = shown.quantize(8) if mode == "P" else shown.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(40)
    return encoded(image), shown


@pytest.mark.parametrize("mode", ["1", "L", "LA", "I;16", "P", "RGB", "RGBA", "CMYK", "EXIF"])
def test_an_image_of_any_mode_is_grey_or_rgb_as_a_viewer_shows_it(tmp_path, mode):
    data, shown = of_mode(mode)
    tar_of(tmp_path / "0.tar", {"0.png": data, "0.cls": b"3"})
    ((image, label),) = ShardedImages(tmp_path)
    assert (image.dtype, label) == (torch.uint8, 3)
    pixels = np.atleast_3d(np.asarray(shown)).transpose(2, 0, 1)
    assert torch.equal(image, torch.from_numpy(pixels.copy()))


def test_names_are_those_of_webdataset(tmp_path):
    """ImageNet's images end in .JPEG; an ending begins after the first point; folders belong to the key."""
    photo, mask = encoded(COLOURS, "JPEG"), encoded(GREY)
    entries = {
        "a/n1.JPEG": photo,
        "a/n1.seg.png": mask,
        "a/n1.CLS": b"1",
        "b/n1.cls": b" 2\n",
        "b/n1.webp": mask,
    }
    tar_of(tmp_path / "0.tar", entries)
    assert [(len(image), label) for image, label in ShardedImages(tmp_path, buffer=0)] == [(3, 1), (1, 2)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"0.png": b"nothing", "0.cls": b"1"},
            r"0 in .*0.tar is no image that can be read \(cannot identify",
        ),
        ({"0.png": encoded(GREY)[:60], "0.cls": b"1"}, r"0 in .*0.tar is no image that can be read"),
        ({"0.png": encoded(GREY), "0.cls": b"dog"}, "has the label b'dog': write whole numbers"),
        (
            {"0.bmp": encoded(GREY.convert("F"), "TIFF"), "0.cls": b"1"},
            r"32 bits a pixel \(mode F\): write images of 8 bits",
        ),
        (
            {"0.jp2": b"", "0.cls": b"1"},
            r"write it again, with the endings cls and png, .* \(it has cls, jp2\)",
        ),
    ],
)
def test_a_sample_that_cannot_be_read_is_named(tmp_path, entries, message):
    tar_of(tmp_path / "0.tar", entries)
    with pytest.raises(UserError, match=message):
        labels(ShardedImages(tmp_path))


def test_a_row_without_bytes_is_named(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"image": [{"bytes": None, "path": "a.png"}], "label": [1]})
    pyarrow.parquet.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(UserError, match="row 0 of .*0.parquet has no bytes of an image"):
        labels(ShardedImages(tmp_path))


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
