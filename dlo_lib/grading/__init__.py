"""Checks, the notebook's side of a lab, and grading. ``from dlo_lib.grading import Lab`` is all that a notebook needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlo_lib.grading.notebook import Lab

__all__ = ["Lab"]


def __getattr__(name: str) -> Any:
    # Imported when first asked for: listing labs must not wait for torch.
    if name == "Lab":
        from dlo_lib.grading.notebook import Lab

        return Lab
    raise AttributeError(name)
