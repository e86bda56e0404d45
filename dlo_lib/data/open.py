"""Open a data set by its name."""

from __future__ import annotations

import enum
from pathlib import Path

import numpy as np

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.data.arithmetic import arithmetic, entropy
from dlo_lib.data.documents import Documents, Layout, Selection, TokenDataset
from dlo_lib.data.huggingface import huggingface_documents
from dlo_lib.data.python_corpus import python_corpus

_VALIDATION_EVERY = 20
"""In a data set without splits, every n-th document belongs to the validation split."""

NAMES = ("arithmetic", "python")


class Split(enum.Enum):
    """The training documents and the validation documents. No document is in both splits."""

    TRAIN = "train"
    VALIDATION = "validation"


def open_dataset(
    name: str | Path,
    seq: int,
    *,
    split: Split = Split.TRAIN,
    layout: Layout = Layout.PACK,
    column: str | None = None,
) -> TokenDataset:
    """Open the data set with this name, in sequences of ``seq`` tokens.

    Args:
        name: "python" (the sources of the standard library), "arithmetic" (generated, with known entropy), or
            the path of a folder written by Hugging Face's ``save_to_disk``.
        layout: PACK concatenates the documents; PAD cuts each document separately and pads with ignored
            targets.
        column: the column of a Hugging Face data set.

    Raises:
        UserError: the data set does not exist or cannot be read.
    """
    documents, best_loss, is_split = _open(name, split, column)
    if not is_split:
        kept = np.arange(len(documents.lengths)) % _VALIDATION_EVERY == _VALIDATION_EVERY - 1
        documents = Selection(documents, np.flatnonzero(kept if split is Split.VALIDATION else ~kept))
    return TokenDataset(documents, seq, layout, best_loss)


def _open(name: str | Path, split: Split, column: str | None) -> tuple[Documents, float | None, bool]:
    if column is not None and str(name) in NAMES:
        raise UserError(f'data set "{name}" has no columns: omit column')
    if name == "python":
        return python_corpus(), None, False
    if name == "arithmetic":
        return arithmetic(), entropy(), False
    folder = Path(name).expanduser()
    if not folder.is_dir() and folder.name == str(name):
        raise unknown_name("data set", str(name), NAMES)
    documents, is_split = huggingface_documents(folder, split.value, column)
    return documents, None, is_split
