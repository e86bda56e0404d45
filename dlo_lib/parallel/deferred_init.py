"""Initial values later, and elsewhere: a model built without storage, whose parameters are drawn one by one when they are asked for.

Inside ``deferred_init`` modules are built on the meta device. What initialises them is recorded: the operation, and the state of the
random generator before it; the generator is then moved on as if the numbers had been used. So ``value`` draws exactly what the parameter
would have held, in any order, and a model that is sharded with it is bit for bit the one that is built whole from the same seed.

Cost: every random number is drawn twice, and 5 kB of generator state kept for each parameter. Memory: one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlo_lib.errors import UserError

aten = torch.ops.aten
_WITHOUT_VALUES = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}


@dataclass(frozen=True)
class _Step:
    """An operation that made (``made``), or changed in place, what lies at that place of a storage."""

    func: Callable[..., Tensor]
    made: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor | None


class Recipe:
    """How to make the values of what was built in a ``deferred_init``."""

    def __init__(self) -> None:
        self._steps: dict[int, list[_Step]] = {}
        self._alive: list[torch.UntypedStorage] = []  # a storage's address is its name only as long as it lives
        self._unknown: dict[int, str] = {}

    def value(self, tensor: Tensor) -> Tensor:
        """What ``tensor``, a parameter or buffer on the meta device, would hold, as a new tensor on the CPU.

        Raises:
            UserError: it was not built in this context, or computed rather than initialised in place.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self._steps:
            cause = f"is the result of {self._unknown[key]}" if key in self._unknown else "was not built inside it"
            raise UserError(f"deferred_init cannot make a tensor that {cause}: initialise parameters in place, with torch.nn.init")
        flat = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
        if not self._steps[key]:
            raise UserError("deferred_init cannot make a tensor that was never initialised: use torch.nn.init in the module's constructor")
        before = torch.get_rng_state()
        for step in self._steps[key]:
            if step.random_state is not None:
                torch.set_rng_state(step.random_state)
            target = flat.as_strided(step.size, step.stride, step.offset)
            if step.made:
                target.copy_(step.func(*step.args, **step.kwargs))
            else:
                step.func(target, *step.args, **step.kwargs)
        torch.set_rng_state(before)
        return flat.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def fill_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Put the buffers of ``module``, which are not sharded, on ``device``."""
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                if buffer.is_meta:
                    inner._buffers[name] = self.value(buffer).to(device)

    def record(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation that gave ``out`` on the meta device."""
        if not (isinstance(out, Tensor) and out.is_meta):
            return
        key = out.untyped_storage()._cdata
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        changed = bool(inputs) and func._schema.is_mutable and out is inputs[0]
        others = inputs[1:] if changed else inputs
        if key in self._unknown or (key in self._steps and not changed):
            return  # a view
        if key not in self._steps:
            self._alive.append(out.untyped_storage())
            if func in _WITHOUT_VALUES:
                self._steps[key] = []
                return
        if any(tensor.is_meta for tensor in others):
            self._unknown[key] = str(func)
            self._steps.pop(key, None)
            return
        made = not changed
        kwargs = {name: value for name, value in kwargs.items() if not (made and name in ("device", "pin_memory", "layout"))}
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            scratch = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            func(*args, **kwargs, device="cpu") if made else func(scratch, *args[1:], **kwargs)
        if made:
            kwargs["device"] = "cpu"
        step = _Step(func, made, tuple(out.shape), out.stride(), int(out.storage_offset()), args[changed:], kwargs, state)
        self._steps.setdefault(key, []).append(step)


class _Recorder(TorchDispatchMode):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._recipe.record(func, out, args, kwargs or {})
        return out


@contextmanager
def deferred_init() -> Iterator[Recipe]:
    """Build modules inside without storage; the recipe makes their values: ``FSDP(module, values=recipe.value, device=device)``."""
    recipe = Recipe()
    with torch.device("meta"), _Recorder(recipe):
        yield recipe
