"""The report of registers, spills and shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from dlo_lib.errors import UserError
from dlo_lib.kernels.dispatch import has_triton
from dlo_lib.kernels.report import compile_kernels
from tests.kernels.parity import NO_TRITON


def run_report(tmp_path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process, because Triton interprets the kernels of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "dlo_lib.kernels", "report", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_kernels_are_compiled_for_both_devices(tmp_path):
    done = run_report(tmp_path, "--operation", "vector_add", "--operation", "softmax")
    assert done.returncode == 0, done.stderr
    rows = [re.findall(r"[\w.]+", line) for line in done.stdout.splitlines() if "kernel" in line]
    made = {(name, sm): [int(number) for number in rest] for _, name, sm, *rest in rows if sm.isdigit()}
    kernels = ("add_kernel", "softmax_kernel", "softmax_backward_kernel")
    assert set(made) == {(name, sm) for name in kernels for sm in ("80", "90")}
    for warps, registers, spilled, shared in made.values():
        assert warps in (4, 8)
        assert 8 <= registers <= 64
        assert spilled == 0
        assert shared <= 1024
    assert made["softmax_kernel", "90"][3] > 0  # the maximum and the sum of a row pass through shared memory


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with pytest.raises(UserError, match="operation"):
        next(compile_kernels(["vector_addition"]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="unset it to compile"):
        next(compile_kernels(["vector_add"], (80,), torch.float32))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("dlo_lib.kernels.dispatch.has_triton", lambda: False)
    with pytest.raises(UserError, match="Triton is not installed"):
        next(compile_kernels(["vector_add"]))
