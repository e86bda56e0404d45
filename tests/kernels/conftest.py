"""The kernels run on the GPU, or in Triton's interpreter where there is none, and are compared with fp64.

`make kernels` installs Triton outside .venv, because its import would add 1.5 s of CPU time to every
process that imports ``torch.optim``. Without Triton only the PyTorch twins are tested here.
"""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture(autouse=True)
def tensors_on_the_gpu() -> Iterator[None]:
    """Tensors of a test are made on the GPU, where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
