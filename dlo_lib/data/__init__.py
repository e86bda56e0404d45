"""Token data sets by name, the sampler that distributes them over ranks, and data sets of small images.

``open`` finds a corpus, ``documents`` and ``tokens`` make sequences from it, ``sampler`` and ``batches``
distribute them over ranks. ``images`` and the modules next to it hold data sets of small images, ``augment``
augments them. ``shards`` reads images from large files, with ``decoding``. ``balanced`` and
``feature_scaling`` prepare data. The room imports no other room.
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
