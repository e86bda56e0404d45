"""Notebooks that students already have, and programs of users as in slurm/README.md, import from these names:
the modules have moved, the names stay."""

from __future__ import annotations

import importlib

import pytest

# What notebooks and the README's program imported before `base` and the rooms of `cluster` existed.
RELEASED = {
    "dlo_lib.errors": ("dlo_lib.base.errors", "UserError"),
    "dlo_lib.text": ("dlo_lib.base.text", "columns", "tr"),
    "dlo_lib.torch_compat": (
        "dlo_lib.base.torch_compat",
        "grouped_mm",
        "pytorch_ring",
        "pytorch_ring_backward",
    ),
    "dlo_lib.progress": ("dlo_lib.base.progress", "report"),
    "dlo_lib.stop": ("dlo_lib.base.stop", "EXIT_STOPPED", "StopRequests"),
    "dlo_lib.cluster.site": ("dlo_lib.cluster.site.description", "sites"),
}


@pytest.mark.parametrize("module", RELEASED)
def test_an_old_name_is_the_same_object(module: str) -> None:
    moved = importlib.import_module(RELEASED[module][0])
    for name in RELEASED[module][1:]:
        assert getattr(importlib.import_module(module), name) is getattr(moved, name)
