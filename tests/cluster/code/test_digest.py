"""The digest of a call is the same in every process, and differs after any change that matters."""

from __future__ import annotations

import dataclasses
import enum
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlo_lib.cluster.code.digest import digest


@dataclasses.dataclass
class Point:
    x: int
    tags: set[str]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def values() -> list[object]:
    return [
        None, True, 1, 1.0, "1", b"1", [1, 2], [2, 1], (1, 2), {1, 2}, {"a": 1}, {"a": 2}, {"b": 1},
        Path("a"), Colour.RED, Colour.BLUE, Point(1, {"a"}), Point(1, {"b"}), torch.tensor([1.0]),
        torch.tensor([2.0]), torch.tensor([1]), torch.nn.Linear(2, 2), np.arange(3), np.arange(3.0), len,
        os.getcwd, os, torch.float32,
    ]  # fmt: skip


def test_different_values_differ_and_equal_ones_do_not():
    torch.manual_seed(0)
    first = [digest(value) for value in values()]
    torch.manual_seed(0)
    assert [digest(value) for value in values()] == first
    assert len(set(first)) == len(first)


def test_order_counts_in_lists_and_not_in_mappings():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest([1, 2]) != digest([2, 1])


def test_a_view_of_a_tensor_has_the_digest_of_its_values():
    whole = torch.arange(6.0)
    assert digest(whole[2:4]) == digest(torch.tensor([2.0, 3.0]))


def test_values_that_hold_themselves():
    loop: list[object] = [1]
    loop.append(loop)
    assert digest(loop) != digest([1, [1]])


def test_the_annotations_of_a_class_do_not_count():
    def kind(**attributes: object) -> type:
        return type("Model", (), {"__module__": "__main__", "width": 4, **attributes})

    compute = {"__annotate_func__": lambda format: {"width": int}}  # as Python 3.14 keeps them
    plain = digest(kind())
    assert digest(kind(**compute)) == digest(kind(**compute, __annotations_cache__={"width": int})) == plain
    assert digest(kind(__annotations__={"width": int})) == plain
    assert digest(kind(width=5)) != plain


CELL = """
import math
factor = {factor}
names = {{"sgd", "adam", "lamb", "lion", "muon"}}
class Model:
    width: int = {width}
    def forward(self, x): return x * self.width
def helper(x): return x {sign} 1
def fn(x, *, scale=2.0):
    {comment}
    return [helper(x) * factor * scale for _ in range(3)], Model().forward(x), names, math.pi
"""
IN_ANOTHER_KERNEL = """
import sys
from dlo_lib.cluster.code.digest import digest
cell = compile(sys.argv[1], f"/tmp/ipykernel_{sys.argv[2]}/1.py", "exec")
exec(cell, globals())
print(digest([fn, {"x": 1}]))
"""


def in_another_kernel(number: int, **changes: object) -> str:
    cell = CELL.format(**{"factor": 3, "width": 4, "sign": "+", "comment": "# first", **changes})
    run = [sys.executable, "-c", IN_ANOTHER_KERNEL, "\n" * number + cell, str(number)]
    return subprocess.run(
        run, env={**os.environ, "PYTHONHASHSEED": str(number)}, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def unchanged() -> str:
    return in_another_kernel(1)


def test_a_cell_has_the_same_digest_in_another_kernel_and_at_another_position(unchanged):
    assert in_another_kernel(2, comment="# second, and longer") == unchanged


@pytest.mark.parametrize("change", [{"factor": 5}, {"width": 5}, {"sign": "-"}])
def test_a_change_of_anything_that_a_function_uses_changes_the_digest(change, unchanged):
    assert in_another_kernel(1, **change) != unchanged
