"""The two formats of CIFAR-10, written here byte by byte, give the same images; the usual folders are
searched.
"""

import io

import numpy as np
import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.data import images_cifar
from dlo_lib.data.images_cifar import CLASSES, cifar10

RNG = np.random.default_rng(0)
TRAIN = (RNG.integers(0, 256, (23, 3, 32, 32), dtype=np.uint8), RNG.integers(0, 10, 23, dtype=np.uint8))
TEST = (RNG.integers(0, 256, (4, 3, 32, 32), dtype=np.uint8), np.array([3, 9, 0, 9], np.uint8))


def records(part, start, stop) -> bytes:
    return b"".join(
        bytes([label]) + image.tobytes() for image, label in zip(part[0][start:stop], part[1][start:stop])
    )


def write_binary(folder):
    folder.mkdir(parents=True)
    for number, (start, stop) in enumerate([(0, 5), (5, 10), (10, 15), (15, 20), (20, 23)], 1):
        (folder / f"data_batch_{number}.bin").write_bytes(records(TRAIN, start, stop))
    (folder / "test_batch.bin").write_bytes(records(TEST, 0, 4))


def write_parquet(folder, column="img"):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)

    def png(pixels) -> bytes:
        file = io.BytesIO()
        image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
        return file.getvalue()

    def write(name, part, start, stop):
        rows = [{"bytes": png(pixels), "path": "x.png"} for pixels in part[0][start:stop]]
        pq.write_table(pa.table({column: rows, "label": part[1][start:stop].astype(np.int64)}), folder / name)

    write("train-00000-of-00002.parquet", TRAIN, 0, 12)
    write("train-00001-of-00002.parquet", TRAIN, 12, 23)
    write("test-00000-of-00001.parquet", TEST, 0, 4)


@pytest.mark.parametrize("write", [write_binary, write_parquet])
def test_each_format_gives_the_written_images(tmp_path, write):
    write(tmp_path / "files")
    data = cifar10(tmp_path / "files")
    assert data.shape == (3, 32, 32)
    assert data.classes == CLASSES
    mean, std = TRAIN[0].mean((0, 2, 3), keepdims=True), TRAIN[0].std((0, 2, 3), keepdims=True)
    for part, (images, labels) in ((data.train, TRAIN), (data.test, TEST)):
        assert part.images.dtype == torch.float32
        assert part.labels.tolist() == labels.tolist()
        assert np.allclose(part.images, (images - mean) / std, atol=1e-5)


@pytest.mark.parametrize("write", [write_binary, write_parquet])
def test_the_first_images_can_come_from_several_files(tmp_path, write):
    write(tmp_path / "files")
    data = cifar10(tmp_path / "files", first=14)
    assert data.train.labels.tolist() == TRAIN[1][:14].tolist()
    assert len(data.test) == 4, "all images of the test part"


def test_the_data_folder_of_a_cluster_is_searched_by_name(tmp_path, monkeypatch):
    (tmp_path / "cifar-100").mkdir()
    write_parquet(tmp_path / "HuggingFace" / "cifar10" / "plain_text", column="image")
    monkeypatch.setenv("DSDIR", str(tmp_path))
    assert len(cifar10().train) == 23


def test_the_course_folder_is_searched_after_that_of_the_cluster(tmp_path, monkeypatch):
    write_binary(tmp_path / "datasets" / "CIFAR_10" / "cifar-10-batches-bin")
    monkeypatch.setattr(images_cifar, "_COURSE_FOLDER", tmp_path / "datasets")
    monkeypatch.setenv("DSDIR", str(tmp_path / "nothing"))
    assert len(cifar10().train) == 23


def test_missing_files_raise_with_the_folders_and_the_alternatives(tmp_path, monkeypatch):
    (tmp_path / "cifar-100").mkdir()
    write_binary(tmp_path / "cifar-100" / "x")
    with pytest.raises(UserError, match=r"no CIFAR-10 below .*digits\(\) or generated\(\)"):
        cifar10(tmp_path)


def test_a_damaged_file_raises_with_its_name(tmp_path):
    write_binary(tmp_path / "files")
    with open(tmp_path / "files" / "data_batch_2.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(UserError, match=r"data_batch_2\.bin has 15,366 bytes, not a multiple of 3,073"):
        cifar10(tmp_path / "files")


def test_labels_of_another_data_set_raise(tmp_path):
    write_binary(tmp_path / "files")
    (tmp_path / "files" / "test_batch.bin").write_bytes(bytes([77]) + bytes(3072))
    with pytest.raises(UserError, match="labels up to 77"):
        cifar10(tmp_path / "files")


def test_missing_training_files_raise(tmp_path):
    write_binary(tmp_path / "files")
    for file in (tmp_path / "files").glob("data_*"):
        file.unlink()
    with pytest.raises(UserError, match="has missing or empty image files"):
        cifar10(tmp_path / "files")


def test_parquet_with_other_columns_raises_with_their_names(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for part in ("train", "test"):
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / f"{part}-0.parquet")
    with pytest.raises(UserError, match="has the columns text: CIFAR-10 has img and label"):
        cifar10(tmp_path)
