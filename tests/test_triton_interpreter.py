"""Where Triton is installed, the tests of its kernels are interpreted in any order, or say why not."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests import triton_interpreter
from tests.triton_interpreter import VARIABLE, request_interpreter, why_not_interpreted


class InterpretedFunction:
    """Triton's class of a function that is interpreted has this name."""


def installed(monkeypatch: pytest.MonkeyPatch, triton: bool, gpu: bool, variable: str | None) -> None:
    """A machine with or without Triton and a GPU."""
    monkeypatch.setattr(triton_interpreter, "find_spec", lambda name: ModuleType(name) if triton else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv(VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)


def language(monkeypatch: pytest.MonkeyPatch, cdiv: object) -> None:
    """Triton is imported, and defined ``cdiv`` of its language as this."""
    monkeypatch.setitem(sys.modules, "triton.language", SimpleNamespace(cdiv=cdiv))


def test_this_process_interprets_the_kernels_that_it_has() -> None:
    if triton_interpreter.find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("NOT TESTED HERE: Triton's interpreter (make kernels)")
    assert why_not_interpreted() is None


@pytest.mark.parametrize(
    ("triton", "gpu", "before", "after"),
    [
        (True, False, None, "1"),
        (True, False, "0", "0"),
        (True, True, None, None),
        (False, False, None, None),
    ],
)
def test_the_variable_is_set_where_triton_has_no_gpu(monkeypatch, triton, gpu, before, after) -> None:
    installed(monkeypatch, triton, gpu, before)
    request_interpreter()
    assert os.environ.get(VARIABLE) == after


def test_kernels_that_cannot_run_are_skipped_with_the_reason(monkeypatch) -> None:
    language(monkeypatch, InterpretedFunction())
    installed(monkeypatch, True, False, "0")
    assert why_not_interpreted() == (
        "NOT TESTED HERE: the Triton kernels, because TRITON_INTERPRET is '0': unset it"
    )
    installed(monkeypatch, True, False, "1")
    assert why_not_interpreted() is None
    language(monkeypatch, SimpleNamespace())  # not interpreted
    assert why_not_interpreted() == (
        "NOT TESTED HERE: the Triton kernels, because Triton was imported before TRITON_INTERPRET was set"
    )
    installed(monkeypatch, True, True, None)
    assert why_not_interpreted() is None
