"""Token data sets by name, the sampler that distributes them over ranks, and data sets of small images.

Corpora of tokens:

- ``open``: finds a corpus by its name
- ``tokens``: bytes as tokens
- ``documents``: documents and their sequences
- ``python_corpus``: the sources of Python
- ``arithmetic``: generated additions
- ``huggingface``: data sets of Hugging Face on disk

The way of a batch to a rank:

- ``sampler``: the order of a rank
- ``batches``: micro-batches on the device
- ``reproducible``: random numbers that are the same everywhere

Images:

- ``images``: small images in memory
- ``images_cifar``: CIFAR-10
- ``images_generated``: images with a known best accuracy
- ``augment``: augmentation of batches
- ``shards``: images in large files
- ``decoding``: the pixels of an encoded image

Preparation:

- ``balanced``: every class equally often
- ``feature_scaling``: mean 0 and standard deviation 1

The room imports no other room.
"""

from dlo_lib.data.balanced import balanced_order
from dlo_lib.data.batches import batches, collate
from dlo_lib.data.documents import Layout, TokenDataset
from dlo_lib.data.feature_scaling import FeatureStatistics
from dlo_lib.data.images import ImageData, LabelledImages, digits
from dlo_lib.data.images_cifar import cifar10
from dlo_lib.data.images_generated import Difficulty, Level, generated
from dlo_lib.data.open import Split, open_dataset
from dlo_lib.data.sampler import PADDING, RankSampler, Uneven
from dlo_lib.data.shards import ShardedImages, write_shards
from dlo_lib.data.tokens import BYTE_VOCABULARY, END_OF_TEXT, IGNORE_INDEX, decode, encode

__all__ = [
    "BYTE_VOCABULARY",
    "END_OF_TEXT",
    "IGNORE_INDEX",
    "PADDING",
    "Difficulty",
    "FeatureStatistics",
    "ImageData",
    "LabelledImages",
    "Layout",
    "Level",
    "RankSampler",
    "ShardedImages",
    "Split",
    "TokenDataset",
    "Uneven",
    "balanced_order",
    "batches",
    "cifar10",
    "collate",
    "decode",
    "digits",
    "encode",
    "generated",
    "open_dataset",
    "write_shards",
]
