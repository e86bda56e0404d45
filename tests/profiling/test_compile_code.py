"""A fused chain of operations is one kernel that reads each input once. Eager operations write and read every
intermediate result."""

from __future__ import annotations

import shutil

import pytest
import torch

from dlo_lib.profiling.compile_code import generated_code, moved_eagerly
from dlo_lib.profiling.compile_time import COMPILERS

needs_a_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)),
    reason="NOT TESTED HERE: no C++ compiler: apt-get install g++",
)


def chain(x, bias, y):
    return torch.tanh(x + bias) * y * 2


def test_each_operation_reads_its_operands_and_writes_its_result():
    x, bias, y = torch.ones(64, 16), torch.ones(16), torch.ones(64, 16)
    moved = moved_eagerly(chain, x, bias, y)
    assert moved.kernels == 4
    assert moved.bytes == (2 * x.nbytes + bias.nbytes) + 2 * x.nbytes + 3 * x.nbytes + 2 * x.nbytes


def test_an_operand_used_twice_is_read_once_and_views_are_not_counted():
    x = torch.ones(64, 16)
    moved = moved_eagerly(lambda x: (x * x).t(), x)
    assert (moved.kernels, moved.bytes) == (1, 2 * x.nbytes)


@pytest.mark.slow
@needs_a_compiler
def test_a_chain_becomes_one_kernel_and_a_matrix_product_a_library_call():
    def product(x, bias, y):
        return chain(x, bias, y) @ y.t()

    code = generated_code(product, torch.ones(64, 16), torch.ones(16), torch.ones(64, 16))
    (kernel,) = code.kernels
    assert (kernel.reads, kernel.writes) == (3, 1)
    assert code.library_calls == ("mm",)
    torch.compiler.reset()
