"""Read a Hugging Face data set from disk (``Dataset.save_to_disk``): a column of texts or of lists of tokens.

The Arrow table stays memory-mapped. A text becomes its bytes, followed by ``END_OF_TEXT``. A list of integers
is used as tokens without changes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.data.tokens import BYTE_VOCABULARY, END_OF_TEXT, encode

if TYPE_CHECKING:
    import pyarrow as pa


class TextColumn:
    """A column of texts: each row becomes byte tokens and an end token."""

    vocab_size = BYTE_VOCABULARY

    def __init__(self, column: pa.ChunkedArray) -> None:
        import pyarrow.compute as pc

        self.column = column
        self.lengths = _numbers(pc.binary_length(column)) + 1

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        tokens = encode(memoryview(self.column[document].as_buffer())[start:stop])
        missing = stop - start - len(tokens)
        return np.append(tokens, np.uint16(END_OF_TEXT)) if missing else tokens


class TokenColumn:
    """A column of lists of integers: each row is a document of tokens."""

    def __init__(self, column: pa.ChunkedArray, name: str) -> None:
        import pyarrow.compute as pc

        self.column = column
        self.lengths = _numbers(pc.list_value_length(column))
        tokens = pc.list_flatten(column)
        bounds = pc.min_max(tokens, skip_nulls=False).as_py()
        if bounds["min"] is None or bounds["min"] < 0:
            raise UserError(
                f'column "{name}" has no tokens, or missing or negative ones: tokens are integers from 0'
            )
        self.vocab_size = bounds["max"] + 1

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.column[document].values.slice(start, stop - start).to_numpy()


def huggingface_documents(
    folder: Path, split: str, column: str | None
) -> tuple[TextColumn | TokenColumn, bool]:
    """Return the documents of a data set on disk and whether the data set has splits.

    The documents are those of ``split``, or all documents of a data set without splits.

    Args:
        column: the name of the column; None takes ``text``, ``input_ids`` or ``tokens``, or the only column.

    Raises:
        UserError: the package, the folder, the split or the column is missing, or the column has neither
            texts nor tokens.
    """
    data = _load(folder)
    splits: dict[str, Any] = data if isinstance(data, dict) else {}
    if splits and split not in splits:
        raise unknown_name(f"split of {folder}", split, splits)
    table = (splits[split] if splits else data).data
    name = _column_name(table.column_names, column, folder)
    return _documents(table.column(name), name), bool(splits)


def _load(folder: Path) -> Any:
    try:
        # Not `import datasets`: without the package, Python would import a folder of this name in the working
        # directory as a namespace package. The type checker does so.
        from datasets import load_from_disk  # type: ignore[attr-defined]
    except ImportError as error:
        raise UserError(
            f"{folder} needs Hugging Face's datasets package, which is not installed: pip install datasets"
        ) from error
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give one written by Dataset.save_to_disk, or a data set's name")
    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} cannot be read as a Hugging Face data set: write it again with save_to_disk"
        ) from error


def _column_name(names: list[str], chosen: str | None, folder: Path) -> str:
    if chosen is not None:
        if chosen not in names:
            raise unknown_name(f"column of {folder}", chosen, names)
        return chosen
    for usual in ("text", "input_ids", "tokens"):
        if usual in names:
            return usual
    if len(names) == 1:
        return names[0]
    raise UserError(f"{folder} has the columns {', '.join(names)}: choose the one with the text with column=")


def _documents(column: pa.ChunkedArray, name: str) -> TextColumn | TokenColumn:
    import pyarrow as pa

    if column.null_count:
        raise UserError(
            f'column "{name}" has {column.null_count} missing values: filter them out before save_to_disk'
        )
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return TextColumn(column)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if is_list and pa.types.is_integer(kind.value_type):
        return TokenColumn(column, name)
    raise UserError(f'column "{name}" holds {kind}: use one of strings or of lists of integers')


def _numbers(lengths: pa.ChunkedArray) -> np.ndarray:
    return lengths.to_numpy().astype(np.int64)
