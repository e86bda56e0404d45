"""Documents of tokens and their division into training sequences of one length, packed or padded.

*Packed*: the documents are concatenated and cut every ``seq`` tokens. The targets are the inputs shifted by
one token, so sequence i needs the tokens [i seq, (i + 1) seq]. Only the last sequence can have ignored
targets. *Padded*: each document is cut separately, and the loss ignores the padding of its last sequence. The
sequences then have unequal numbers of valid targets, as in instruction tuning.

The tokens stay in their storage (a memory-mapped file, an Arrow table); a sequence is read on access.
"""

from __future__ import annotations

import enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError
from dlo_lib.data.tokens import END_OF_TEXT, IGNORE_INDEX


class Documents(Protocol):
    """A list of documents.

    Attributes:
        lengths: (documents,) int64, the number of tokens of each document, including its end token.
        vocab_size: all tokens are below this number.
    """

    lengths: np.ndarray
    vocab_size: int

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the tokens [start, stop) of a document, (stop - start,) integers."""
        ...


class Layout(enum.Enum):
    """The division of documents into sequences of one length: packed or padded."""

    PACK = "pack"
    PAD = "pad"


class FlatDocuments:
    """Documents in one array of tokens, which may be memory-mapped.

    Each document ends with ``END_OF_TEXT``.
    """

    vocab_size = END_OF_TEXT + 1

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        ends = np.flatnonzero(tokens == END_OF_TEXT) + 1
        self.starts = np.concatenate(([0], ends[:-1]))
        self.lengths = np.diff(ends, prepend=0)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        first = self.starts[document]
        return self.tokens[first + start : first + stop]


class Selection:
    """The subset of ``documents`` at ``indices``, in this order."""

    def __init__(self, documents: Documents, indices: np.ndarray) -> None:
        self.documents, self.indices = documents, indices
        self.lengths = documents.lengths[indices]
        self.vocab_size = documents.vocab_size

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.documents.read(int(self.indices[document]), start, stop)


class TokenDataset:
    """Sequences of ``seq`` tokens: ``dataset[i]`` is (inputs, targets), each (seq,) int64.

    Missing targets are ``IGNORE_INDEX``. Missing inputs are ``END_OF_TEXT`` if it is in the vocabulary,
    otherwise 0. In the padded layout, a document of n tokens gives n - 1 targets.

    Attributes:
        vocab_size: all tokens are below this number.
        best_loss: the entropy of the data in nats per token; None if it is unknown.

    Raises:
        UserError: ``seq`` is below 1, or no document has a target.
    """

    def __init__(
        self, documents: Documents, seq: int, layout: Layout = Layout.PACK, best_loss: float | None = None
    ) -> None:
        if seq < 1:
            raise UserError(f"seq is {seq}: use at least 1 token")
        self.documents, self.seq, self.layout, self.best_loss = documents, seq, layout, best_loss
        self.vocab_size = documents.vocab_size
        self._filler = END_OF_TEXT if self.vocab_size > END_OF_TEXT else 0
        lengths = documents.lengths
        if layout is Layout.PACK:
            self._ends = np.cumsum(lengths)  # of documents, in tokens
            targets = int(self._ends[-1]) - 1 if len(lengths) else 0
            self._size = -(-targets // seq)
        else:
            self._ends = np.cumsum(-(-np.maximum(lengths - 1, 0) // seq))  # of documents, in sequences
            self._size = int(self._ends[-1]) if len(lengths) else 0
        if self._size < 1:
            raise UserError("the data set is empty: it needs a document of at least two tokens")

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self._size:
            raise IndexError(f"sequence {index} of {self._size}")
        window = self._packed(index) if self.layout is Layout.PACK else self._padded(index)
        inputs = torch.full((self.seq,), self._filler, dtype=torch.int64)
        targets = torch.full((self.seq,), IGNORE_INDEX, dtype=torch.int64)
        tokens = torch.from_numpy(window.astype(np.int64))
        inputs[: len(tokens)] = tokens[: self.seq]
        targets[: len(tokens) - 1] = tokens[1:]
        return inputs, targets

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return a sequence of the same shape whose targets are all ignored."""
        return torch.full((self.seq,), self._filler, dtype=torch.int64), torch.full(
            (self.seq,), IGNORE_INDEX, dtype=torch.int64
        )

    def _padded(self, index: int) -> np.ndarray:
        document = int(np.searchsorted(self._ends, index, side="right"))
        earlier = int(self._ends[document - 1]) if document else 0
        start = (index - earlier) * self.seq
        return self.documents.read(
            document, start, min(start + self.seq + 1, int(self.documents.lengths[document]))
        )

    def _packed(self, index: int) -> np.ndarray:
        start = index * self.seq
        stop = min(start + self.seq + 1, int(self._ends[-1]))
        pieces = []
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[document])
            begin = end - int(self.documents.lengths[document])
            if start < end:
                pieces.append(self.documents.read(document, start - begin, min(stop, end) - begin))
            start = max(start, min(stop, end))
            document += 1
        return np.concatenate(pieces)
