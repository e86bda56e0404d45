"""Images in shards: a few large files that are read from start to end, instead of one file for each image.

A parallel file system opens a file in milliseconds and then reads it fast, so a million small files cost
hours. Two formats are read: tar files as WebDataset defines them (``0001.png`` and ``0001.cls`` are one
sample; upper and lower case are equal), and Parquet as Hugging Face writes it (a column ``img`` or ``image``
with the bytes of the image, and a column ``label``). ``data.decoding`` turns the bytes into pixels.

The samples of an epoch are one sequence: the shards in an order that is drawn for the epoch. Each rank
reads an equal part of it, and each worker of its DataLoader an equal part of that, whatever the sizes of
the shards are. All ranks therefore have the same number of samples, as a collective in each step requires;
up to ``world_size - 1`` samples are left out. Within a shard, a buffer mixes the order.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_aside
from dlo_lib.data.decoding import IMAGE_ENDINGS, decoded
from dlo_lib.data.reproducible import hashes, permutation

Sample = tuple[Tensor, int]
"""An image (channels, height, width) uint8, with 1 channel (grey) or 3 (RGB), and its label."""
INDEX = "shards.json"
"""The file with the number of samples of each tar file, beside them; without it, the headers are read."""
_LABEL = "cls"


class ShardedImages(IterableDataset[Sample]):
    """The samples of this rank, one epoch for each iteration.

    Args:
        files: the shards, or a folder that contains them: all ``.tar`` or all ``.parquet``.
        rank, world_size: the rank and the number of ranks.
        seed: of the order of the shards and of the buffer; the same on all ranks.
        buffer: the number of samples from which the next one is drawn; 0 keeps the order of the files. A
            buffer mixes neighbours only: write the shards in random order.

    Raises:
        UserError: there are no shards, several formats, more ranks than samples, or a file cannot be read.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        rank: int = 0,
        world_size: int = 1,
        *,
        seed: int = 0,
        buffer: int = 1000,
    ) -> None:
        self.files = _shards(files)
        self.counts = _counts(self.files)
        if world_size < 1 or not 0 <= rank < world_size or buffer < 0:
            raise UserError(
                f"rank {rank} of {world_size}, buffer {buffer}: use a rank below the number of ranks"
            )
        if sum(self.counts) < world_size:
            raise UserError(
                f"{sum(self.counts)} samples for {world_size} ranks: use more data or fewer ranks"
            )
        self.rank, self.world_size, self.seed, self.buffer = rank, world_size, seed, buffer
        self._epoch, self._begun = 0, False
        # In memory that all processes share, because persistent workers have a copy of this object.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; set it before iterating, also with workers, persistent or not."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._shared_epoch.fill_(epoch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared_epoch.share_memory_()  # of a deep copy; a worker that is spawned receives it shared

    def __len__(self) -> int:
        """The number of samples of this rank in an epoch."""
        return sum(self.counts) // self.world_size

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker and self._begun:  # The first iteration of a worker begins with the epoch of its start.
            self._epoch = int(self._shared_epoch)
        self._begun = worker is not None
        begin = self.rank * len(self)
        first, last = (begin + len(self) * place // workers for place in (number, number + 1))
        samples = self._range(first, last, self._epoch)
        return self._mixed(samples, number, self._epoch) if self.buffer else samples

    def _range(self, first: int, last: int, epoch: int) -> Iterator[Sample]:
        """Yield the samples ``first`` to ``last`` of the epoch."""
        begin = 0
        for shard in permutation(len(self.files), self.seed, epoch):
            end = begin + self.counts[shard]
            if begin < last and first < end:
                yield from _read(self.files[shard], max(first, begin) - begin, min(last, end) - begin)
            begin = end

    def _mixed(self, samples: Iterable[Sample], worker: int, epoch: int) -> Iterator[Sample]:
        kept: list[Sample] = []
        draws = iter(hashes(len(self), self.seed, epoch, self.rank, worker).tolist())
        for sample in samples:
            if len(kept) < self.buffer:
                kept.append(sample)
                continue
            place = next(draws) % len(kept)
            kept[place], sample = sample, kept[place]
            yield sample
        for place in permutation(len(kept), self.seed, epoch, self.rank, worker, 1):
            yield kept[place]


def write_shards(
    images: np.ndarray | Tensor,
    labels: np.ndarray | Tensor,
    folder: str | Path,
    samples: int,
    kind: str = "tar",
) -> list[Path]:
    """Write images into shards of ``samples`` samples, as PNG; the last shard may be smaller. Return the
    files.

    Args:
        images: (n, channels, height, width) uint8, with 1 or 3 channels.
        labels: (n,) integers.
        kind: ``"tar"`` or ``"parquet"``.

    Raises:
        UserError: an unknown kind, ``samples`` below 1, another dtype or shape, or pyarrow is missing.
    """
    from PIL import Image

    if kind not in ("tar", "parquet") or samples < 1:
        raise UserError(f"kind={kind!r}, samples={samples}: use 'tar' or 'parquet', and at least 1")
    pixels, classes = np.asarray(images), np.asarray(labels)
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 4
        or pixels.shape[1] not in (1, 3)
        or len(pixels) != len(classes)
    ):
        raise UserError(
            f"images {pixels.shape} of {pixels.dtype} and {len(classes)} labels: use (n, 1 or 3, height, "
            "width) of uint8 and one label each"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    counts, files = {}, []
    for number, start in enumerate(range(0, len(pixels), samples)):
        file = folder / f"{number:05d}.{kind}"
        encoded = []
        for image in pixels[start : start + samples]:
            data = io.BytesIO()
            Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(data, "PNG")
            encoded.append(data.getvalue())
        write = _write_tar if kind == "tar" else _write_parquet
        write(file, start, encoded, [int(label) for label in classes[start : start + samples]])
        counts[file.name] = len(encoded)
        files.append(file)
    if kind == "tar":
        with write_aside(folder / INDEX) as aside:
            aside.write_text(json.dumps(counts))
    return files


def _write_tar(file: Path, start: int, images: list[bytes], labels: list[int]) -> None:
    with tarfile.open(file, "w") as archive:
        for index, (image, label) in enumerate(zip(images, labels, strict=True), start):
            for ending, data in (("png", image), ("cls", str(label).encode())):
                entry = tarfile.TarInfo(f"{index:08d}.{ending}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))


def _write_parquet(file: Path, start: int, images: list[bytes], labels: list[int]) -> None:
    arrow, parquet = _pyarrow()
    column = [{"bytes": image, "path": f"{start + index:08d}.png"} for index, image in enumerate(images)]
    parquet.write_table(arrow.table({"img": column, "label": labels}), file)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError("Parquet files need pyarrow: pip install pyarrow, or use tar files") from error
    return pyarrow, pyarrow.parquet


def _shards(files: str | Path | Sequence[str | Path]) -> list[Path]:
    if isinstance(files, str | Path):
        folder = Path(files)
        found = sorted([*folder.glob("*.tar"), *folder.glob("*.parquet")]) if folder.is_dir() else [folder]
    else:
        found = [Path(file) for file in files]
    if not found:
        raise UserError(f"{files} contains no .tar and no .parquet file: give the folder of the shards")
    kinds = sorted({file.suffix for file in found})
    if kinds not in ([".tar"], [".parquet"]):
        raise UserError(
            f"shards of the kinds {', '.join(kinds)}: give .tar files only, or .parquet files only"
        )
    return found


def _counts(files: list[Path]) -> list[int]:
    """Return the number of samples of each shard."""
    if files[0].suffix == ".parquet":
        _, parquet = _pyarrow()
        return [_opened(file, lambda file: parquet.read_metadata(file).num_rows) for file in files]
    known: dict[str, int] = {}
    for folder in {file.parent for file in files}:
        if (folder / INDEX).is_file():
            known |= {
                str(folder / name): count for name, count in json.loads((folder / INDEX).read_text()).items()
            }
    return [known[str(file)] if str(file) in known else _opened(file, _count_tar) for file in files]


def _count_tar(file: Path) -> int:
    with tarfile.open(file, "r:") as archive:
        return sum(_parts_of(entry.name)[1] == _LABEL for entry in archive)


def _opened(file: Path, read: Any) -> int:
    try:
        return read(file)
    except (OSError, tarfile.TarError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {str(error).splitlines()[0]}: write it again") from error


def _read(file: Path, first: int, last: int) -> Iterator[Sample]:
    """Yield the samples ``first`` to ``last`` of a shard; earlier ones are skipped without being decoded."""
    if file.suffix == ".parquet":
        yield from _read_parquet(file, first, last)
        return
    with tarfile.open(file, "r:") as archive:
        parts: dict[str, bytes] = {}
        key, index = None, 0
        endings: set[str] = set()
        for entry in archive:
            name, ending = _parts_of(entry.name)
            if name != key:
                parts, key = {}, name
            data = archive.extractfile(entry) if first <= index < last else None
            parts[ending] = data.read() if data else b""
            endings.add(ending)
            image = next((parts[ending] for ending in IMAGE_ENDINGS if ending in parts), None)
            if image is None or _LABEL not in parts:
                continue
            if first <= index < last:
                yield _sample(image, parts[_LABEL], f"{name} in {file}")
            index += 1
            parts, key = {}, None
            if index == last:
                return
    found = ", ".join(sorted(endings)) or "no file"
    raise UserError(
        f"{file} has {index} samples with an image and a label, {last} were expected: write it again, with "
        f"the endings {_LABEL} and {', '.join(IMAGE_ENDINGS)} (it has {found})"
    )


def _parts_of(entry: str) -> tuple[str, str]:
    """Return the key and the ending of a file of WebDataset: the ending begins after the first point.

    >>> _parts_of("train/0001.seg.PNG")
    ('train/0001', 'seg.png')
    """
    folder, slash, name = entry.rpartition("/")
    key, _, ending = name.partition(".")
    return folder + slash + key, ending.lower()


def _sample(image: bytes, label: bytes | int, where: str) -> Sample:
    try:
        return decoded(image, where), int(label)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} has the label {label!r}: write whole numbers") from error


def _read_parquet(file: Path, first: int, last: int) -> Iterator[Sample]:
    _, parquet = _pyarrow()
    opened = parquet.ParquetFile(file)
    names = opened.schema_arrow.names
    column = next((name for name in ("img", "image") if name in names), None)
    if column is None or "label" not in names:
        raise UserError(f"{file} has the columns {', '.join(names)}: img or image, and label are needed")
    begin = 0
    for rows in opened.iter_batches(batch_size=256, columns=[column, "label"]):
        end = begin + len(rows)
        if begin < last and first < end:
            chosen = rows.slice(max(first - begin, 0), min(last, end) - max(first, begin))
            for number, row in enumerate(chosen.to_pylist(), max(first, begin)):
                content = row[column].get("bytes") if isinstance(row[column], dict) else None
                if content is None:
                    raise UserError(
                        f"row {number} of {file} has no bytes of an image: write it again with them"
                    )
                yield _sample(content, row["label"], f"row {number} of {file}")
        begin = end
        if begin >= last:
            return
