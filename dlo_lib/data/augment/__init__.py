"""Augmentation of a batch of images on its device, without a loop over the images.

- ``mixing``: combines pairs of images and their labels
- ``rand_augment``: distorts each image by operations drawn at random
- ``geometry``: moves pixels
- ``colours``: changes the values of pixels

All work on tensors (batch, channels, height, width) and run on an accelerator. The modules import no other
room.
"""

from dlo_lib.data.augment.mixing import cutmix, mixup
from dlo_lib.data.augment.rand_augment import RandAugment

__all__ = ["RandAugment", "cutmix", "mixup"]
