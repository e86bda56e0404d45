"""The tile sizes, warps and pipeline stages of the kernels, from ``tuning.toml``.

A kernel has a table for each architecture that was measured, and ``default`` for the others. A table is a
list of rules: the first rule whose conditions hold for the shape of a call gives the values.

    tuned("flash_attention.forward", q.device, head_dim=128, dtype=q.dtype, is_causal=True)
    # {"ROWS": 128, "COLS": 64, "num_warps": 8, "num_stages": 2}

``trying`` replaces values, which is how a search measures them; ``compiled_for`` selects an architecture
where no GPU is, for kernels that are compiled ahead of time; ``used_rules`` says which rules they use.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

import torch

from dlo_lib.base.errors import UserError, unknown_name

P = ParamSpec("P")
T = TypeVar("T")
DEFAULT, INTERPRETED = "default", "interpreted"
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Not context variables: autograd computes the backward of CUDA tensors in another thread.
_TRIED: dict[str, dict[str, int]] = {}
_ARCHITECTURE: list[str] = []
_CHANGES = [0]
Rule = tuple[str, str, int]
"""A kernel, the name of one of its tables, and the place of the rule in it, from 0."""
_USED: list[set[Rule]] = []


def tuned(kernel: str, device: torch.device, **shape: Any) -> dict[str, int]:
    """Return the constants and options of a kernel: tile sizes, ``num_warps`` and ``num_stages``.

    Args:
        kernel: the name of a table of ``tuning.toml``.
        device: of the tensors. A CPU tensor is interpreted, with the small tiles of ``interpreted``.
        shape: what the conditions of the rules compare: whole numbers, bools, names and dtypes.

    Raises:
        UserError: no table has the name, or no rule holds for the shape.
    """
    table, place = _found(kernel, _architecture(device), tuple(shape.items()))
    if _USED:
        _USED[-1].add((kernel, table, place))
    values = {name: value for name, value in _table(kernel)[table][place].items() if name != "when"}
    return values | _TRIED[kernel] if kernel in _TRIED else values


def changes() -> int:
    """Return a number that changes whenever ``trying`` or ``compiled_for`` changes what ``tuned`` returns.

    The key of a result that depends on these values contains it.
    """
    return _CHANGES[0]


def planned(plan: Callable[P, T]) -> Callable[P, T]:
    """Keep the results of ``plan``, which calls ``tuned`` and whose arguments are hashable: those without
    ``trying`` and ``compiled_for``, and those of each such context. A kept result is found in a tenth of the
    time, and a search measures a kernel with the start that it has outside of the search."""

    def numbered(number: int, /, *args: Any, **kwargs: Any) -> T:
        return plan(*args, **kwargs)

    kept: Callable[..., T] = lru_cache(maxsize=4096)(numbered)

    @wraps(plan)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        return kept(_CHANGES[0] if _TRIED or _ARCHITECTURE else 0, *args, **kwargs)

    return found


@contextlib.contextmanager
def trying(kernel: str, values: Mapping[str, int]) -> Iterator[None]:
    """Replace the given values of a kernel inside the context, in every thread.

    Raises:
        UserError: no table has the name.
    """
    _table(kernel)
    before = _TRIED.get(kernel)
    _TRIED[kernel] = {**(before or {}), **values}
    _CHANGES[0] += 1
    try:
        yield
    finally:
        if before is None:
            del _TRIED[kernel]
        else:
            _TRIED[kernel] = before
        _CHANGES[0] += 1


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[None]:
    """Return from ``tuned`` the values of a compute capability, such as 90, for tensors of each device."""
    _ARCHITECTURE.append(f"sm_{capability}")
    _CHANGES[0] += 1
    try:
        yield
    finally:
        _ARCHITECTURE.pop()
        _CHANGES[0] += 1


@contextlib.contextmanager
def used_rules() -> Iterator[set[Rule]]:
    """Collect the rules whose values ``tuned`` returns inside the context. A plan that is kept asks for none:
    enter ``compiled_for`` inside the context, which computes plans again."""
    _USED.append(set())
    try:
        yield _USED[-1]
    finally:
        _USED.pop()


def rules_of(capability: int) -> set[Rule]:
    """Return all rules of all kernels that hold for a compute capability."""
    found: set[Rule] = set()
    for kernel, table in _tables()["kernels"].items():
        name = _name_of_table(kernel, f"sm_{capability}")
        found |= {(kernel, name, place) for place in range(len(table[name]))}
    return found


@lru_cache(maxsize=256)
def _architecture_of(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return INTERPRETED if device.type == "cpu" else DEFAULT


def _architecture(device: torch.device) -> str:
    return _ARCHITECTURE[-1] if _ARCHITECTURE else _architecture_of(device)


@cache
def _tables() -> dict[str, Any]:
    text = files("dlo_lib.kernels.triton_code").joinpath("tuning.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _table(kernel: str) -> dict[str, list[dict[str, Any]]]:
    kernels = _tables()["kernels"]
    if kernel not in kernels:
        raise unknown_name("kernel", kernel, kernels)
    found: dict[str, list[dict[str, Any]]] = kernels[kernel]
    return found


def _name_of_table(kernel: str, arch: str) -> str:
    """Return the name of the table of a kernel that has the rules of an architecture."""
    table = _table(kernel)
    arch = arch if arch in table else _tables()["like"].get(arch, arch)
    return arch if arch in table else DEFAULT


@lru_cache(maxsize=4096)
def _found(kernel: str, arch: str, shape: tuple[tuple[str, Any], ...]) -> tuple[str, int]:
    """Return the table and the place of the first rule that holds."""
    given = {name: _DTYPES.get(value, value) for name, value in shape}
    table = _name_of_table(kernel, arch)
    for place, rule in enumerate(_table(kernel)[table]):
        if all(_holds(kernel, given, name, value) for name, value in rule.get("when", {}).items()):
            return table, place
    raise UserError(
        f"tuning.toml has no rule of {kernel} for {arch} and {given}: add one, without conditions, at the end"
    )


def _holds(kernel: str, given: Mapping[str, Any], name: str, wanted: Any) -> bool:
    """Compare with one value, with a list of values, or with ``min`` and ``max``, both included."""
    if name not in given:
        raise UserError(f"a rule of {kernel} compares {name}: the call should give it, beside {list(given)}")
    value = given[name]
    if isinstance(wanted, dict):
        least, most = wanted.get("min", value), wanted.get("max", value)
        return bool(least <= value <= most)
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)
