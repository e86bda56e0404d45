"""The report of registers, spills and shared memory."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.cases import Size, products
from dlo_lib.kernels.dispatch import has_triton
from dlo_lib.kernels.report import CAPABILITIES, CompiledKernel, compile_kernels
from tests.kernels.parity import NO_TRITON


def run_report(tmp_path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process, because Triton interprets the kernels of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "dlo_lib.kernels", "report", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_kernels_are_compiled_for_every_architecture(tmp_path):
    architectures = [str(capability) for capability in CAPABILITIES]
    assert architectures == ["80", "86", "89", "90", "100", "120"]
    selected = ["--operation", "vector_add", "--operation", "softmax"]
    for architecture in architectures:
        selected += ["--sm", architecture]
    done = run_report(tmp_path / "cache", *selected, "--jobs", "2", "--ptx", str(tmp_path / "ptx"))
    assert done.returncode == 0, done.stderr
    rows = [re.findall(r"[\w.-]+", line) for line in done.stdout.splitlines() if "kernel" in line]
    made = {(name, sm): [float(number) for number in rest[:5]] for _, name, sm, *rest in rows if sm.isdigit()}
    kernels = ("add_kernel", "softmax_kernel", "softmax_backward_kernel")
    assert set(made) == {(name, sm) for name in kernels for sm in architectures}
    for warps, registers, spilled, shared, megabytes in made.values():
        assert warps in (4, 8)
        assert 8 <= registers <= 64
        assert spilled == 0
        assert shared <= 1024
        assert megabytes > 0
    assert made["softmax_kernel", "90"][3] > 0  # the maximum and the sum of a row pass through shared memory
    assert made["add_kernel", "90"][4] == pytest.approx(3 * 2048 * 3072 * 2 / 1e6, rel=0.01)
    code = (tmp_path / "ptx" / "vector_add-add_kernel-sm_90-bf16-3b.ptx").read_text()
    assert ".target sm_90" in code
    assert re.search(r"ld\.global[.\w:]*v4", code)  # 128 bits at a time


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_attention_on_sm_90_copies_tiles_in_bulk_and_spills_nothing(tmp_path):
    """The exit status is 1 if a kernel spills, does not fit, or has no copies that its tiles are made for."""
    done = run_report(tmp_path / "cache", "--operation", "flash_attention, causal", "--sm", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if "_kernel" in line]
    assert [re.search(r"(\w+)_kernel", line)[1] for line in rows] == ["forward", "dq", "dkv"]
    assert all("bulk copies" in line and "wgmma" in line for line in rows)


def compiled(**changed: Any) -> CompiledKernel:
    own = CompiledKernel("softmax", "softmax_kernel", 90, 4, 32, 0, 1024, 3_350_000, 0, "bf16", "")
    return dataclasses.replace(own, **changed)


def test_a_kernel_that_spills_or_does_not_fit_is_a_problem():
    assert compiled(shared_bytes=227 * 1024).problem is None
    assert compiled(shared_bytes=112 * 1024, capability=86).problem == (
        "softmax: softmax_kernel on sm_86 needs 112 KiB of shared memory of 99: "
        "choose smaller tiles or fewer stages in tuning.toml"
    )
    assert compiled(spilled_bytes=8).problem == (
        "softmax: softmax_kernel on sm_90 spills 8 bytes: choose smaller tiles or more warps in tuning.toml"
    )
    assert compiled(bulk=True, ptx="cp.async.bulk.tensor.2d.shared").problem is None
    assert compiled(bulk=True, ptx="cp.async.cg.shared").problem == (
        "softmax: softmax_kernel on sm_90 has no bulk copy, although its tiles have BULK: "
        "leave BULK out of tuning.toml"
    )


def test_the_floor_is_the_larger_of_memory_and_products():
    assert compiled().floor_us() == pytest.approx(1)  # 3.35 MB at 3.35 TB/s
    assert compiled(operations=2 * 989_500_000).floor_us() == pytest.approx(2)
    assert compiled(capability=100, moved_bytes=8_000_000).floor_us() == pytest.approx(1)  # 8 TB/s
    assert compiled(capability=120).floor_us() is None


def test_the_instructions_of_the_code_are_named():
    code = "cp.async.bulk.tensor.2d.shared\nwgmma.mma_async.sync.aligned\nld.global.L1::evict_first.v4.b32 {"
    assert compiled(ptx=code).instructions == ("bulk copies", "wgmma", "128-bit")
    assert compiled(ptx="mma.sync.aligned.m16n8k16\ncp.async.cg.shared").instructions == (
        "async copies",
        "mma",
    )
    assert compiled(ptx="ld.global.b16 %rs1").instructions == ()


def test_the_products_of_a_kernel_are_counted():
    size = Size(tokens=4, hidden=8, wide=16, heads=2, vocab=10)
    assert products("forward_kernel", "grouped_matmul", size) == 2 * 4 * 8 * 16
    assert products("forward_kernel", "flash_attention", size) == 2 * (2 * 2 * 4 * 4 * 128)
    assert products("dkv_kernel", "flash_attention, causal, 64", size) == 4 * (2 * 2 * 8 * 64)
    assert products("softmax_kernel", "softmax", size) == 0


# Prints the constants and options of the kernels that two architectures receive.
PROGRAM = """
import torch
from dlo_lib.kernels import report
from dlo_lib.kernels.dispatch import KernelBackend, using

found = {}
with using(KernelBackend.TRITON):
    for capability in (86, 90):
        launches = report._launches("flash_attention, causal", torch.bfloat16, capability, "small")
        found[capability] = sorted(
            (launch.kernel.__name__, launch.arguments["ROWS"], launch.arguments["COLS"], launch.options)
            for launch in launches
        )
print(len(found[86]), len(found[90]), found[86] != found[90])
"""


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_tiles_are_those_of_the_architecture_that_is_compiled_for():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["3", "3", "True"], done.stderr


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    with pytest.raises(UserError, match="operation"):
        next(compile_kernels(["vector_addition"]))
    with pytest.raises(UserError, match="compute capability"):
        next(compile_kernels(["vector_add"], (91,)))
    with pytest.raises(UserError, match="size"):
        next(compile_kernels(["vector_add"], size="5b"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="unset it to compile"):
        next(compile_kernels(["vector_add"], (80,), torch.float32))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr("dlo_lib.kernels.dispatch.has_triton", lambda: False)
    with pytest.raises(UserError, match="Triton is not installed"):
        next(compile_kernels(["vector_add"]))
