"""The kernels run on the GPU, or in Triton's interpreter where there is none, and are compared with fp64.

`make kernels` installs Triton outside .venv, because its import would add 1.5 s of CPU time to every
process that imports ``torch.optim``. Without Triton only the PyTorch twins are tested here.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.parity import NO_TRITON
from tests.triton_interpreter import why_not_interpreted


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs Triton where this process can run no kernel."""
    if any(mark.kwargs.get("reason") == NO_TRITON for mark in item.iter_markers("skipif")):
        reason = why_not_interpreted()
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def tensors_on_the_gpu() -> Iterator[None]:
    """Tensors of a test are made on the GPU, where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield
