"""Find the GPU of a device in the table, from the name and the memory that CUDA reports.

A device that is not in the table, or a slower variant of one (PCIe, a MIG slice), gives None, because a wrong
peak would make every MFU wrong."""

from __future__ import annotations

import re

from dlo_lib.hardware.gpus import Gpu, gpus

_TOLERANCE = 0.05
"""The relative tolerance of the memory: it varies by 1 % with the driver and the board; models differ by at
least 15 %.
"""


def recognise(device_name: str, memory_bytes: int) -> Gpu | None:
    """Return the GPU with the CUDA name ``device_name`` and this amount of memory, or None.

    >>> recognise("Tesla V100-SXM2-32GB", 34_072_559_616).name
    'v100-32'
    """
    if re.search(r"\b(PCIE|MIG)\b", device_name, re.IGNORECASE):
        return None
    for gpu in gpus().values():
        chip = gpu.name.split("-")[0]
        if (
            re.search(rf"\b{chip}\b", device_name, re.IGNORECASE)
            and abs(memory_bytes / gpu.memory_bytes - 1) < _TOLERANCE
        ):
            return gpu
    return None
