"""Launches: the binary of a signature is found again, and it is the one that Triton finds."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

from dlo_lib.kernels.dispatch import has_triton
from tests.kernels.parity import NO_TRITON

pytestmark = pytest.mark.skipif(not has_triton(), reason=NO_TRITON)

INTEGERS = (0, 1, -1, 2, 15, 16, -16, 48, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**31 + 16, 2**33 + 1)
LARGE = (2**63 - 16, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 16)
OTHERS = (0.0, 1.0, 16.0, -2.5, True, False, None)


def _tensors() -> list[torch.Tensor]:
    found = [nn.Parameter(torch.zeros(16)), torch.zeros(0), torch.zeros(4, 4, dtype=torch.int64)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8):
        pool = torch.zeros(64, dtype=dtype)
        found += [pool, pool[1:], pool[8:], pool[16:]]
    return found


def _specialised(backend, arg):
    """Return how Triton specialises an argument. It passes the value of a 1 and of None as a constant."""
    from triton.runtime.jit import native_specialize_impl

    kind, value = native_specialize_impl(backend, arg, False, True, True)
    return kind, value if kind != "constexpr" else repr(value)


def test_arguments_of_one_class_are_those_that_triton_specialises_alike():
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from dlo_lib.kernels.triton_code.binaries import classify

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    generator = random.Random(0)
    drawn = [generator.randrange(-(2**bits), 2**bits) for bits in range(1, 63) for _ in range(4)]
    theirs_of, ours_of = {}, {}
    for arg in (*INTEGERS, *LARGE, *OTHERS, *drawn, *_tensors()):
        key: list[object] = []
        values = classify((arg,), key)
        expected = arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
        assert values == [expected]
        ours = tuple((type(part), part) for part in key)
        theirs = _specialised(backend, arg)
        assert theirs_of.setdefault(ours, theirs) == theirs, arg
        assert ours_of.setdefault(theirs, ours) == ours, arg


def test_other_arguments_are_left_to_triton():
    from dlo_lib.kernels.triton_code.binaries import classify

    class Marked(torch.Tensor):
        pass

    for arg in (torch.zeros(2).as_subclass(Marked), "text", (1, 2), torch.float32):
        assert classify((1, arg), []) is None


def test_keys_of_different_calls_differ():
    from dlo_lib.kernels.triton_code.binaries import classify

    seen = set()
    some = (*OTHERS[:1], *OTHERS[4:5], None, 1, 2, 16, 2**31, 2**63, torch.zeros(4), torch.zeros(4)[1:])
    calls = [(a,) for a in some] + [(a, b) for a in some for b in some]
    for args in calls:
        key: list[object] = []
        classify(args, key)
        seen.add(tuple((type(part), part) for part in key))
    assert len(seen) == len(calls)


def test_the_launcher_receives_what_triton_passes(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.without_a_card"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
