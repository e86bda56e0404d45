"""Texts to train on: by name, in sequences, over ranks."""

from dlo_lib.data.batches import batches, collate
from dlo_lib.data.documents import Layout, TokenDataset
from dlo_lib.data.open import Split, open_dataset
from dlo_lib.data.sampler import PADDING, RankSampler, Uneven
from dlo_lib.data.tokens import BYTE_VOCABULARY, END_OF_TEXT, IGNORE_INDEX, decode, encode

__all__ = [
    "BYTE_VOCABULARY",
    "END_OF_TEXT",
    "IGNORE_INDEX",
    "PADDING",
    "Layout",
    "RankSampler",
    "Split",
    "TokenDataset",
    "Uneven",
    "batches",
    "collate",
    "decode",
    "encode",
    "open_dataset",
]
