"""Reference answers make tensors on the device of their arguments.

A default device without data stands for the processor when the arguments are on a GPU: an operation on both
raises an error, or its result has no data.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch.nn import functional as F

from dlo_lib.grading.lab.source import CellKind, read_lab

ROOT = Path(__file__).parents[2]


def answers_of(lab: str) -> dict:
    """Return the names that the reference answers of ``lab`` and its given functions define."""
    names = {"torch": torch, "F": F, "math": math, "dist": torch.distributed}
    for cell in read_lab(ROOT / "solutions" / lab).cells:
        if cell.kind is CellKind.SOLUTION or cell.source.startswith(("def ", "class ")):
            exec("from __future__ import annotations\n" + cell.source, names)
    return names


def test_experts_within_a_capacity():
    """Lab 21 has counts on the GPU."""
    answers = answers_of("21_expert_parallel")
    experts = torch.tensor([[0, 1], [0, 2], [0, 1]])
    order, counts = answers["sort_choices"](experts, 3)
    with torch.device("meta"):
        kept, fewer = answers["keep_within"](order, counts, 2)
    assert fewer.tolist() == [2, 2, 1]
    assert len(kept) == 5


def test_expert_parallelism_of_one_rank(monkeypatch):
    answers = answers_of("21_expert_parallel")
    torch.manual_seed(0)
    x, router = torch.randn(6, 4), torch.randn(3, 4)
    first, second = torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda out, x, *_, **__: out.copy_(x))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    with torch.device("meta"):
        for name, arguments in (("expert_parallel", ()), ("padded_expert_parallel", (6,))):
            assert answers[name](x, router, first, second, 2, *arguments).device == x.device, name
