"""``--fp8``: the products of the blocks' linear layers have 8-bit operands (``optim.fp8_blocks``).

Checkpoints are those of a run without ``--fp8``.
"""

from __future__ import annotations

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.optim.precision.scaled_products import CAPABILITY


def require_fp8(device: torch.device) -> None:
    """Check that ``device`` multiplies 8-bit numbers.

    Raises:
        UserError: it does not.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        needed = ".".join(map(str, CAPABILITY))
        raise UserError(
            f"--fp8 needs a GPU with 8-bit tensor cores (compute capability {needed} or later, such as an "
            "H100): leave it out here"
        )
