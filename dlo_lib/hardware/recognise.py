"""Which GPU of the table a device is, from what CUDA says of it: its name and its memory.

A board that is not in the table, or a slower form of one that is (PCIe, a MIG slice), is nobody: a wrong peak would make every MFU wrong.
"""

from __future__ import annotations

import re

from dlo_lib.hardware.gpus import Gpu, gpus

_TOLERANCE = 0.05
"""Of the memory: driver and board move it by 1 %, the models of one chip differ by 15 % and more."""


def recognise(device_name: str, memory_bytes: int) -> Gpu | None:
    """The GPU called ``device_name`` by CUDA with that much memory, or None.

    >>> recognise("Tesla V100-SXM2-32GB", 34_072_559_616).name
    'v100-32'
    """
    if re.search(r"\b(PCIE|MIG)\b", device_name, re.IGNORECASE):
        return None
    for gpu in gpus().values():
        chip = gpu.name.split("-")[0]
        if re.search(rf"\b{chip}\b", device_name, re.IGNORECASE) and abs(memory_bytes / gpu.memory_bytes - 1) < _TOLERANCE:
            return gpu
    return None
