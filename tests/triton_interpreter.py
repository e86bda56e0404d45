"""Without a GPU, Triton interprets the kernels of the suite.

Triton reads ``TRITON_INTERPRET`` when it is imported, because that defines the functions of its language, and
when a kernel is defined. Not only the tests of the kernels import it: ``torch._dynamo`` does, which the first
optimiser imports. Therefore ``tests/conftest.py`` sets the variable for every process of the suite, before it
imports a test.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

VARIABLE = "TRITON_INTERPRET"


def request_interpreter() -> None:
    """Set the variable where Triton is installed and there is no GPU. A value that is set is kept."""
    if find_spec("triton") is not None and not _has_gpu():
        os.environ.setdefault(VARIABLE, "1")


def why_not_interpreted() -> str | None:
    """Return why this process cannot run a kernel of Triton; None if it can: on the GPU, or interpreted."""
    if _has_gpu():
        return None
    value = os.environ.get(VARIABLE)
    if value != "1":
        return f"NOT TESTED HERE: the Triton kernels, because {VARIABLE} is {value!r}: unset it"
    language = sys.modules.get("triton.language")
    if language is not None and type(language.cdiv).__name__ != "InterpretedFunction":
        return f"NOT TESTED HERE: the Triton kernels, because Triton was imported before {VARIABLE} was set"
    return None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
