"""What to write in a kernel instead of a function or a name that the interpreter does not have."""

from __future__ import annotations

INSTEAD = {
    "print": "to look at a tile, store it in a tensor with tl.store, and print that after the launch",
    "max": "use tl.maximum(a, b) for two values, and tl.max(x, axis) for the largest element of a tile",
    "min": "use tl.minimum(a, b) for two values, and tl.min(x, axis) for the smallest element of a tile",
    "sum": "use tl.sum(x, axis)",
    "abs": "use tl.abs(x)",
    "mean": "use tl.sum(x, axis) / n, with the number n of elements that count",
    "softmax": "write it with tl.max, tl.exp and tl.sum",
    "cdiv": "use tl.cdiv(a, b)",
    "matmul": "use tl.dot(a, b)",
    "pow": "x * x is a square, tl.sqrt(x) a root, and tl.rsqrt(x) is 1 / tl.sqrt(x)",
}
"""The last part of a name -> the cure."""
KNOWN = "print(tl.__doc__) lists what a kernel can use"


def instead_of(name: str) -> str:
    """Return the cure for a call of ``name``, such as ``tl.mean``, ``x.max`` or ``print``."""
    return INSTEAD.get(name.rsplit(".", 1)[-1], KNOWN)


def dtype_cure(name: str) -> str:
    """Return the cure for the attribute ``name``, such as ``torch.float32``."""
    owner, _, last = name.rpartition(".")
    if owner in ("torch", "np", "numpy", "math") and last == "inf":
        return 'use float("inf") or float("-inf")'
    if owner in ("torch", "np", "numpy"):
        return f"a kernel sees tl only, so a dtype is tl.float32, not {owner}.float32"
    return KNOWN
