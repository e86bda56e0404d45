"""Cache the results of twins, the functions that compute expected values, because they are equal for a whole
class.

Inputs are drawn from the class secret and the check's name; a twin is a function of its inputs alone. The
grading process first judges the reference solution, which computes every twin. The judge of each submission
is a fork of that process and inherits the results; ``proof_record`` stores them on disk. In a notebook, where
inputs are new in each run, the oldest results are dropped. Cost: one entry per result; a hit costs the hash
of its arguments.
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

MAX_RESULTS = 256  # of one function; more than a lab's checks need
RESULTS = "__twin_results__"  # the attribute of a twin that holds its results

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def twin(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache the results of ``function`` by the content of its arguments.

    Tensors count by dtype, shape and bytes, default arguments as if given. ``function`` must depend on its
    arguments alone, and none of them may come from the student. Tensors and containers in a result are
    copied, so that a check may change them; any other object is shared and must not be changed.

    Raises:
        TypeError: an argument is neither plain data, a tensor, a dataclass nor hashable.
    """
    results: OrderedDict[Hashable, Result] = OrderedDict()
    signature = inspect.signature(function)

    @functools.wraps(function)
    def cached(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        key = _key(bound.arguments)
        if key not in results:
            results[key] = function(*args, **kwargs)
            if len(results) > MAX_RESULTS:
                results.popitem(last=False)
        results.move_to_end(key)
        return _copied(results[key])

    setattr(cached, RESULTS, results)
    return cached


def results_of(modules: Iterable[ModuleType]) -> dict[str, OrderedDict[Hashable, Any]]:
    """Return the cached results of the twins of ``modules`` by name, to save or to fill."""
    functions = {
        id(value): value for module in modules for value in vars(module).values() if hasattr(value, RESULTS)
    }
    return {
        f"{function.__module__}.{function.__qualname__}": getattr(function, RESULTS)
        for function in functions.values()
    }


def _key(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (
            "tensor",
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
            flat.view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return ("dict", *((_key(name), _key(item)) for name, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(_key(getattr(value, field.name)) for field in fields(value)))
    hash(value)
    return (type(value), value)  # 1, 1.0 and True are equal, but different arguments


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict:
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
