"""Deferred initialisation: a model is built without storage, and the value of each parameter is computed on
demand.

Inside ``deferred_init``, modules are built on the meta device. Each operation that initialises a parameter is
recorded with the state of the random generator before it, and the generator is advanced as if the operation
had used its numbers. ``value`` replays the operations of one parameter. The values are therefore independent
of the order of the calls, and a model that is sharded this way is bitwise equal to a model that is built
whole from the same seed.

Cost: every random number is drawn twice, and 5 kB of generator state are stored for each parameter. Memory:
one whole parameter at a time.
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

from dlo_lib.base.errors import UserError

aten = torch.ops.aten
_UNINITIALISED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}


@dataclass(frozen=True)
class _InitOp:
    """An operation that created (``created``), or changed in place, one strided view of a storage."""

    func: Callable[..., Tensor]
    created: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: Tensor | None


class InitRecord:
    """The operations that initialise the tensors that were built inside a ``deferred_init``."""

    def __init__(self) -> None:
        self._ops: dict[int, list[_InitOp]] = {}
        # Keep every storage alive, because its address identifies it only during its lifetime.
        self._alive: list[torch.UntypedStorage] = []
        self._computed_by: dict[int, str] = {}

    def value(self, tensor: Tensor) -> Tensor:
        """Compute the initial value of a parameter or buffer that is on the meta device.

        Returns a new CPU tensor with the shape, strides and dtype of ``tensor``.

        Raises:
            UserError: ``tensor`` was not built in this context, was never initialised, or is the result of a
                computation instead of an initialisation in place.
        """
        key = tensor.untyped_storage()._cdata
        if key not in self._ops:
            computed_by = self._computed_by.get(key)
            cause = f"is the result of {computed_by}" if computed_by else "was not built inside it"
            raise UserError(
                f"deferred_init cannot make a tensor that {cause}: "
                "initialise parameters in place, with torch.nn.init",
            )
        flat = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
        if not self._ops[key]:
            raise UserError(
                "deferred_init cannot make a tensor that was never initialised: "
                "use torch.nn.init in the module's constructor",
            )
        before = torch.get_rng_state()
        for op in self._ops[key]:
            if op.random_state is not None:
                torch.set_rng_state(op.random_state)
            target = flat.as_strided(op.size, op.stride, op.offset)
            if op.created:
                target.copy_(op.func(*op.args, **op.kwargs))
            else:
                op.func(target, *op.args, **op.kwargs)
        torch.set_rng_state(before)
        return flat.as_strided(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def fill_buffers(self, module: nn.Module, device: torch.device) -> None:
        """Replace the meta buffers of ``module`` by their values on ``device``. Buffers are not sharded."""
        for inner in module.modules():
            for name, buffer in inner.named_buffers(recurse=False):
                if buffer.is_meta:
                    inner._buffers[name] = self.value(buffer).to(device)

    def record(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the operation ``func`` if its result ``out`` is on the meta device."""
        if not (isinstance(out, Tensor) and out.is_meta):
            return
        key = out.untyped_storage()._cdata
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        changed = bool(inputs) and func._schema.is_mutable and out is inputs[0]
        others = inputs[1:] if changed else inputs
        if key in self._computed_by or (key in self._ops and not changed):
            return  # a view
        if key not in self._ops:
            self._alive.append(out.untyped_storage())
            if func in _UNINITIALISED:
                self._ops[key] = []
                return
        if any(tensor.is_meta for tensor in others):
            self._computed_by[key] = str(func)
            self._ops.pop(key, None)
            return
        created = not changed
        dropped = ("device", "pin_memory", "layout") if created else ()
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            state = torch.get_rng_state()
            scratch = torch.empty(out.shape, dtype=out.dtype, device="cpu")
            func(*args, **kwargs, device="cpu") if created else func(scratch, *args[1:], **kwargs)
        if created:
            kwargs["device"] = "cpu"
        shape, offset = tuple(out.shape), int(out.storage_offset())
        op = _InitOp(func, created, shape, out.stride(), offset, args[changed:], kwargs, state)
        self._ops.setdefault(key, []).append(op)


class _Recorder(TorchDispatchMode):
    def __init__(self, record: InitRecord) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._record.record(func, out, args, kwargs or {})
        return out


@contextmanager
def deferred_init() -> Iterator[InitRecord]:
    """Build the modules inside the context on the meta device and record their initialisation.

    >>> with deferred_init() as init:
    ...     module = build_model()
    >>> model = FSDP(module, values=init.value, device=device)
    """
    record = InitRecord()
    with torch.device("meta"), _Recorder(record):
        yield record
