"""The report of registers, spills and shared memory."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import record
from dlo_lib.kernels.cases import SIZES, Size, products
from dlo_lib.kernels.dispatch import has_triton
from dlo_lib.kernels.report import CAPABILITIES, CompiledKernel, compile_kernels
from dlo_lib.kernels.triton_code import tuning
from tests.kernels.parity import NO_TRITON


def run_report(tmp_path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the command in another process, because Triton interprets the kernels of this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "dlo_lib.kernels", "report", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run_program(program: str, *args: object) -> str:
    """Run Python code in another process, as ``run_report`` does; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
from dlo_lib.kernels.cases import SIZES
from dlo_lib.kernels.dispatch import KernelBackend, using

found = {}
with using(KernelBackend.TRITON):
    for capability in (86, 90):
        launches = report.launches_of("flash_attention, causal", torch.bfloat16, capability, SIZES["small"])
        found[capability] = sorted(
            (launch.kernel.__name__, launch.arguments["ROWS"], launch.arguments["COLS"], launch.options)
            for launch in launches
        )
print(len(found[86]), len(found[90]), found[86] != found[90])
"""


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_tiles_are_those_of_the_architecture_that_is_compiled_for():
    assert run_program(PROGRAM).split() == ["3", "3", "True"]


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


RECORD = Path(__file__).with_name("compiled.csv")


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_every_rule_of_every_architecture_was_compiled_and_spills_nothing():
    """``make kernels ARGS="report --record tests/kernels/compiled.csv"`` compiles what is missing."""
    compiled_with, rows = record.read(RECORD)
    assert compiled_with
    if compiled_with != version("triton"):
        pytest.skip(f"the kernels were compiled with Triton {compiled_with}, not {version('triton')}")
    assert {(row.sm, row.dtype) for row in rows.values()} == {
        (str(capability), dtype) for capability in CAPABILITIES for dtype in ("bf16", "fp16", "fp32")
    }
    program = "import sys; from pathlib import Path; from dlo_lib.kernels.record import differences; "
    assert run_program(program + "print(*differences(Path(sys.argv[1])), sep='\\n')", RECORD).split() == []


# Records one operation, and records it again: nothing is compiled the second time.
UPDATES = """
import os, sys
from pathlib import Path
os.environ["TRITON_CACHE_DIR"] = sys.argv[1] + "-cache"
from dlo_lib.kernels import record

record.CASES, record.EDGES, record.CAPABILITIES = {"vector_add": None}, {}, (86, 90)
print(*record.update(Path(sys.argv[1])))
record.compiled = None
print(*record.update(Path(sys.argv[1])))
record.CASES = {}
print(*record.update(Path(sys.argv[2])))
"""


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_a_code_is_compiled_once_and_forgotten_when_no_case_has_it(tmp_path):
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    stale = record.RecordedCode("0", "90", "old.kernel", "bf16", "", "1", "0", "")
    second.write_text(f"Triton {version('triton')}\n{','.join(stale._fields)}\n{','.join(stale)}\n")
    assert record.read(second)[1] == {("0", "90"): stale}
    assert run_program(UPDATES, first, second).split() == []
    compiled_with, rows = record.read(first)
    assert compiled_with == version("triton")
    found = {(row.sm, row.dtype) for row in rows.values()}
    assert found == {(sm, dtype) for sm in ("86", "90") for dtype in ("bf16", "fp16", "fp32")}
    assert len(rows) == 6  # one code for all sizes
    for row in rows.values():
        assert (row.kernel, row.tiles, row.instructions) == (
            "vector_add.add_kernel", "BLOCK=1024 num_warps=4", "128-bit"
        )  # fmt: skip
        assert 8 <= int(row.registers) <= 64
    assert record.read(second) == (version("triton"), {})


# Prints whether kernels that differ by a comment, and by a constant, have one code.
CODES = """
import importlib.util, sys
from pathlib import Path
import torch
from dlo_lib.kernels.report import code_of
from dlo_lib.kernels.triton_code.launch import KernelLaunch

def code(text, block):
    path = Path(sys.argv[1]) / f"kernels_{len(text)}.py"
    path.write_text("import triton\\nimport triton.language as tl\\n" + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.empty(64, device="meta")
    return code_of(KernelLaunch(module.double, (1,), {"x_ptr": x, "BLOCK": block}, {"num_warps": 4}), 90)

text = '''
@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, 2 * tl.load(at))
'''
print(code(text, 64) == code("# A comment." + text, 64), code(text, 64) == code(text, 32))
"""


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_a_comment_does_not_change_the_code_of_a_kernel(tmp_path):
    assert run_program(CODES, tmp_path).split() == ["True", "False"]


def test_differences_from_the_record_are_named(tmp_path, monkeypatch):
    def variant(code: str) -> record.CodeVariant:
        kernel = SimpleNamespace(__name__="_add_kernel", params=[])
        launch = SimpleNamespace(kernel=kernel, arguments={}, options={"num_warps": 4})
        return record.CodeVariant(code, 90, "vector_add", "bf16", SIZES["3b"], launch)

    monkeypatch.setattr(record, "CAPABILITIES", (90,))
    monkeypatch.setattr(tuning, "rules_of", lambda capability: {("sum", "sm_90", 1)})
    path = tmp_path / "compiled.csv"
    row = record.RecordedCode("a", "90", "vector_add.add_kernel", "bf16", "num_warps=4", "22", "0", "128-bit")
    path.write_text(f"Triton 3.9.0\n{','.join(row._fields)}\n{','.join(row)}\n")
    monkeypatch.setattr(record, "variants", lambda capability: iter([variant("a")]))
    unused = "no case on sm_90 uses rule 1 of sum, sm_90, in tuning.toml"
    assert record.differences(path) == [unused]
    monkeypatch.setattr(record, "variants", lambda capability: map(variant, "bcdefgh"))
    missing = ["not compiled: vector_add: add_kernel in bf16 on sm_90, num_warps=4"] * 5
    stale = "no case has this code any more: " + " ".join(row)
    assert record.differences(path) == [unused, *missing, "and 2 more", stale]
