"""Notebooks that students already have import from these names: the modules have moved, the names stay."""

from __future__ import annotations

import importlib

import pytest

# What the notebooks of the labs imported before `base` and the rooms of `cluster` existed.
RELEASED = {
    "dlo_lib.errors": ("UserError",),
    "dlo_lib.text": ("columns", "tr"),
    "dlo_lib.torch_compat": ("grouped_mm", "pytorch_ring", "pytorch_ring_backward"),
    "dlo_lib.cluster.site": ("sites",),
}


@pytest.mark.parametrize("module", RELEASED)
def test_an_old_name_is_the_same_object(module: str) -> None:
    names = importlib.import_module(module)
    for name in RELEASED[module]:
        now = getattr(names, name)
        assert now is getattr(importlib.import_module(now.__module__), now.__name__)
        assert now.__module__.startswith(("dlo_lib.base.", "dlo_lib.cluster.site."))
