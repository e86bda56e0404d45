"""The memory-bound kernels access 16 bytes at a time: a warp then moves 512 bytes with one instruction."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import NO_TRITON

# Compiles every memory-bound kernel for sm_90, with its tiles for bf16, and prints its accesses to tensors.
PROGRAM = """
import dataclasses, re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dlo_lib.kernels.cases import SIZES, run_forward_and_backward
from dlo_lib.kernels.dispatch import KernelBackend, using
from dlo_lib.kernels.report import source_of
from dlo_lib.kernels.triton_code.launch import recorded
from dlo_lib.kernels.triton_code.tuning import compiled_for

names = ("vector_add", "softmax", "rms_norm", "layer_norm", "rope", "swiglu", "cross_entropy")
with using(KernelBackend.TRITON), compiled_for(90), recorded() as launches:
    for name in names:
        run_forward_and_backward(name, torch.bfloat16, "meta")
    odd = dataclasses.replace(SIZES["3b"], vocab=50_257)
    run_forward_and_backward("cross_entropy", torch.bfloat16, "meta", odd)
for launch in {str(launch.kernel) + str(source_of(launch)): launch for launch in launches}.values():
    signature, constants, attributes = source_of(launch)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options).asm["ptx"]
    loads = re.findall(r"ld\\.global\\S*v4\\.b32|cp\\.async\\.cg.*, 0x10", ptx)
    stores = re.findall(r"st\\.global\\S*v4\\.b32", ptx)
    narrow = re.findall(r"(?:ld|st)\\.global\\S*\\.b16", ptx)
    odd = launch.arguments.get("columns") == 50_257
    module = "odd" if odd else launch.kernel.__module__.rpartition(".")[2]
    print(module, launch.kernel.__name__, len(loads), len(stores), len(narrow))
"""


@pytest.mark.skipif(not has_triton(), reason=NO_TRITON)
def test_rows_are_read_and_written_16_bytes_at_a_time(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+ \w+) (\d+) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    of_rows = [line for line in found if not line[0].endswith("_total_kernel")]  # that one sums a few numbers
    assert len({name for name, *_ in of_rows}) == 13, done.stdout
    for name, loads, stores, narrow in of_rows:
        assert int(loads) > 0, name
        if name == "cross_entropy _losses_kernel":  # writes two numbers, and reads the target's logit
            assert int(narrow) == 1
        elif name == "odd _losses_kernel":  # rows of 50,257: the last block has a mask for each element
            assert 1 < int(narrow) <= 17
        elif name == "odd _gradient_kernel":
            assert int(stores) > 0
            assert int(narrow) <= 16
        elif name == "rows _sum_parts_kernel":  # writes a row
            assert int(loads) >= 4
        else:
            assert int(stores) > 0, name
            assert int(narrow) == 0, name
