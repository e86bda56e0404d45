"""Twins computed once: what a check compares with is the same for a whole class, so it is kept.

Inputs are drawn from the class secret and the check's name; a twin is a function of them alone. The grading process judges the reference
solution first, which computes every twin, and each submission's judge is forked from it with all of them; ``proved`` keeps them on disk.
In a notebook, where inputs are new in each run, the oldest are forgotten. Cost: one entry a twin; a hit costs the hash of its arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

KEPT = 256  # results of one function: more than a lab's checks ask for
RESULTS = "__twin_results__"  # the attribute of a twin that holds them

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def twin(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep what ``function`` returns, by the content of its arguments: tensors count by dtype, shape and bytes, defaults as if written.

    It must be a function of its arguments alone, and none of them may come from the student. Tensors and containers in a result are
    copied, so that a check that changes one spoils no other check; any other object is shared and must not be changed.

    Raises:
        TypeError: an argument is neither plain data, a tensor, a dataclass nor hashable.
    """
    kept: OrderedDict[Hashable, Result] = OrderedDict()
    signature = inspect.signature(function)

    @functools.wraps(function)
    def remembered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = _key(bound.arguments)
        if key not in kept:
            kept[key] = function(*args, **kwargs)
            if len(kept) > KEPT:
                kept.popitem(last=False)
        kept.move_to_end(key)
        return _copied(kept[key])

    setattr(remembered, RESULTS, kept)
    return remembered


def results_of(modules: Iterable[ModuleType]) -> dict[str, OrderedDict[Hashable, Any]]:
    """What the twins of ``modules`` keep, by the twins' names: to be saved, or filled with what was."""
    functions = {id(value): value for module in modules for value in vars(module).values() if hasattr(value, RESULTS)}
    return {f"{function.__module__}.{function.__qualname__}": getattr(function, RESULTS) for function in functions.values()}


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return ("tensor", value.dtype, tuple(value.shape), value.requires_grad, flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return ("dict", *((_key(name), _key(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_key(getattr(value, field.name)) for field in fields(value)))
    hash(value)
    return (type(value), value)  # 1, 1.0 and True are equal, and not the same argument


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
