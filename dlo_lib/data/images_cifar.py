"""Read CIFAR-10 from its binary version or from the Parquet files of Hugging Face. Nothing is downloaded.

CIFAR-10 has 60,000 images of 32 x 32 pixels in 10 classes; 50,000 of them are for training. The binary
version has five files ``data_batch_N.bin`` and a file ``test_batch.bin``. A record has 1 + 3072 bytes: the
label, then the red, green and blue planes, each row by row. In Parquet, a row has an encoded image (``img``
or ``image``, the bytes of a PNG) and a ``label``. Cost: 0.7 GiB as fp32, or less with ``first``.

Krizhevsky, Learning multiple layers of features from tiny images (2009);
https://www.cs.toronto.edu/~kriz/cifar.html"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.data.images import ImageData, standardised

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_FOLDER_NAME = re.compile(r"cifar[-_]?10(?!0)", re.IGNORECASE)
_COURSE_FOLDER = Path(__file__).parents[2] / "datasets"


def cifar10(folder: str | Path | None = None, *, first: int | None = None) -> ImageData:
    """Load CIFAR-10 from ``folder``, or from ``$DSDIR`` (the data sets of a cluster), or from ``datasets/``.

    Args:
        folder: the folder of the files, or a folder that contains one with a name such as "cifar-10".
        first: the number of images to take from each part (the files are in random order); None takes all.

    Raises:
        UserError: the files are missing, or they are not those of CIFAR-10; the message names the folders
            searched.
    """
    roots = [Path(folder).expanduser()] if folder is not None else _usual_roots()
    for place in (place for root in roots for place in _places(root)):
        if (place / "test_batch.bin").is_file():
            train, test = sorted(place.glob("data_batch_*.bin")), [place / "test_batch.bin"]
            return standardised("cifar10", _binary(train, place, first), _binary(test, place, first), CLASSES)
        if test := sorted(place.glob("test-*.parquet")):
            train = sorted(place.glob("train-*.parquet"))
            return standardised(
                "cifar10", _parquet(train, place, first), _parquet(test, place, first), CLASSES
            )
    looked = ", ".join(str(root) for root in roots)
    raise UserError(
        f"no CIFAR-10 below {looked}: put its binary version (test_batch.bin ...) or Parquet files "
        "(test-*.parquet ...) into datasets/cifar-10, or use digits() or generated(), which need no files"
    )


def _usual_roots() -> list[Path]:
    shared = os.environ.get("DSDIR")
    return [*([Path(shared)] if shared else []), _COURSE_FOLDER, Path("datasets").absolute()]


def _places(root: Path) -> Iterator[Path]:
    """Yield ``root`` and the folders below it that are named after CIFAR-10.

    Other folders are not searched, because the data sets of a cluster have millions of files.
    """
    yield root
    below = [root, root / "HuggingFace"]
    named = [
        child
        for folder in below
        if folder.is_dir()
        for child in sorted(folder.iterdir())
        if _FOLDER_NAME.search(child.name)
    ]
    for folder in named:
        yield from (place for place in (folder, *sorted(folder.rglob("*"))) if place.is_dir())


def _binary(files: Sequence[Path], place: Path, first: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Read images (n, 3, 32, 32) and labels (n,), both uint8, from binary files."""
    parts, missing = [np.empty((0, _RECORD), np.uint8)], first
    for file in files:
        if missing is not None and missing <= 0:
            break
        if not file.stat().st_size or file.stat().st_size % _RECORD:
            raise UserError(
                f"{file} has {file.stat().st_size:,} bytes, not a multiple of {_RECORD:,}: it is damaged; "
                "download it again"
            )
        parts.append(
            np.fromfile(file, np.uint8, -1 if missing is None else missing * _RECORD).reshape(-1, _RECORD)
        )
        missing = None if missing is None else missing - len(parts[-1])
    records = np.concatenate(parts)
    return _checked(records[:, 1:].reshape(-1, *_SHAPE), records[:, 0], place)


def _parquet(files: Sequence[Path], place: Path, first: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Read images (n, 3, 32, 32) and labels (n,), both uint8, from Parquet files."""
    try:
        import pyarrow.parquet as pq
        from PIL import Image
    except ImportError as error:
        raise UserError(
            f"{place} holds Parquet files: pip install pyarrow pillow, or use the binary version"
        ) from error
    images: list[np.ndarray] = []
    labels: list[int] = []
    for file in files:
        table = pq.read_table(file)
        image = next((name for name in ("img", "image") if name in table.column_names), None)
        if image is None or "label" not in table.column_names:
            raise UserError(
                f"{file} has the columns {', '.join(table.column_names)}: CIFAR-10 has img and label"
            )
        rows: list[dict[str, Any]] = (
            table.slice(0, None if first is None else first - len(images))
            .select([image, "label"])
            .to_pylist()
        )
        images += [np.asarray(Image.open(io.BytesIO(row[image]["bytes"])).convert("RGB")) for row in rows]
        labels += [row["label"] for row in rows]
    stacked = np.stack(images).transpose(0, 3, 1, 2) if images else np.empty((0, *_SHAPE), np.uint8)
    return _checked(stacked, np.asarray(labels), place)


def _checked(images: np.ndarray, labels: np.ndarray, place: Path) -> tuple[np.ndarray, np.ndarray]:
    if not len(labels):
        raise UserError(f"{place} has missing or empty image files: download them again")
    if images.shape[1:] != _SHAPE or not 0 <= labels.min() <= labels.max() < len(CLASSES):
        raise UserError(
            f"{place} holds images {images.shape[1:]} with labels up to {labels.max()}: "
            "CIFAR-10 has (3, 32, 32), up to 9"
        )
    return images, labels
