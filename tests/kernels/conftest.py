"""The kernels run in Triton's interpreter, where Triton is installed, and are compared with fp64.

`make kernels` installs Triton outside .venv, because its import would add 1.5 s of CPU time to every
process that imports ``torch.optim``. Without Triton only the PyTorch twins are tested here.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
