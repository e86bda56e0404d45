"""The pixels of an encoded image: grey (1, height, width) or RGB (3, height, width), uint8.

Large data sets have images of every mode of PNG and JPEG, whose stored numbers are not such pixels: indices
of a palette, four inks (CMYK), an opacity, 1 or 16 bits, or rows that EXIF says to rotate. Each becomes what
a viewer shows, with two exceptions: the opacity is left out, and of 16 bits the upper 8 remain.
"""

from __future__ import annotations

import io
import struct

import numpy as np
import torch
from torch import Tensor

from dlo_lib.base.errors import UserError

IMAGE_ENDINGS = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm", "pbm", "pnm")
"""The endings of image files in WebDataset, without the point, in lower case."""
_GREY = ("1", "L", "LA", "La")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


def decoded(data: bytes, where: str) -> Tensor:
    """Return the pixels of an encoded image: (1, height, width) uint8 if it is grey, else (3, height, width).

    Args:
        data: the content of an image file.
        where: the place of the image, for the message.

    Raises:
        UserError: Pillow cannot read the image, or its numbers are no colours (32 bits).
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(data)) as stored:
            ImageOps.exif_transpose(stored, in_place=True)
            if stored.mode in _SIXTEEN_BITS or (stored.mode == "I" and stored.format in ("PNG", "PPM")):
                pixels = (np.asarray(stored).astype(np.int64) >> 8).astype(np.uint8)
            elif stored.mode in ("I", "F"):
                raise UserError(f"{where} has 32 bits a pixel (mode {stored.mode}): write images of 8 bits")
            else:
                pixels = np.asarray(stored.convert("L" if stored.mode in _GREY else "RGB"))
    except (OSError, SyntaxError, ValueError, struct.error, Image.DecompressionBombError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where} is no image that can be read ({reason}): write it again") from error
    return torch.from_numpy(pixels[None].copy() if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
