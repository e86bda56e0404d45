"""Records the memory of running code, for each storage.

A dispatch mode sees every operator. It records each new storage, and its release through a weak reference. It
counts storages instead of tensors, because views share a storage. Each storage belongs to a part (weights,
gradients, ...). The part may become known after the allocation: a gradient is identified when autograd
assigns it to ``.grad``. Therefore allocations and releases are recorded first, and summed afterwards.

Cost: one Python call per operator, independent of the number of bytes. With fake tensors, which have no data,
it works for a model of any size.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_lib.base.torch_compat import is_dtensor_class
from dlo_lib.optim import Phase


class Part(enum.Enum):
    """The use of memory. Every byte belongs to exactly one part."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    """``.grad``, and the tensors from which it is summed or cast: with autocast, the gradient of a weight is
    first computed in bf16."""
    OPTIMIZER_STATE = "optimizer state"
    STEP_TEMPORARIES = "step temporaries"
    """Temporary memory of gradient clipping and of the optimiser step."""
    CAST_WEIGHTS = "cast weights"
    """The low-precision copies of the weights that autocast creates in forward and that backward reads. They
    do not grow with the batch."""
    UNITS = "gathered units"
    """In sharded training, the unsharded parameters, and the messages of their all-gather and of the
    reduction of their gradients."""
    ACTIVATIONS = "activations"
    """The tensors that forward saves for backward, the gradients of activations, and the temporary memory of
    both, from the embedding to the last norm."""
    LOGITS_AND_LOSS = "logits and loss"
    """The same for the output projection and the cross-entropy."""
    BUFFERS = "buffers"
    """The batch, the buffers of the model, constants, and buckets of gradients if the gradients are not views
    of them."""


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation (``bytes`` > 0) or a release (``bytes`` < 0); ``phase`` is None before the step
    begins."""

    phase: Phase | None
    part: Part
    bytes: int


@dataclass(slots=True, eq=False)
class _Allocation:
    size: int
    part: Part
    sources: tuple[_Allocation, ...] = ()


_copy = torch.ops.aten._to_copy.default
_add = torch.ops.aten.add.Tensor
_fused_sgd = torch.ops.aten._fused_sgd_.default
_device = torch.ops.prim.device.default


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that records allocations and releases of storages. If there is a fake tensor mode,
    enter the tracker inside it.

    Args:
        fake_mode: the surrounding fake tensor mode, or None.
        scratch: for operators with temporary memory inside their kernel, a function that returns its size in
            bytes from the arguments of the operator.

    Attributes:
        phase: the phase of new events.
        scope: the part of new storages until ``claim`` changes it.
    """

    def __init__(
        self, fake_mode: FakeTensorMode | None = None, scratch: dict[object, Callable[..., int]] | None = None
    ) -> None:
        super().__init__()
        self.phase: Phase | None = None
        self.scope = Part.BUFFERS
        self.scratch = scratch or {}
        self._fake_mode = fake_mode
        self._live: dict[int, tuple[weakref.ref, _Allocation]] = {}
        self._events: list[tuple[Phase | None, _Allocation, int]] = []
        self._resize: AbstractContextManager | None = None
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile inside this mode, which sees the graphs run and not their tracing."""
        return True

    def claim(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Assign the storages of ``tensors`` to ``part``, from their allocation on, together with the
        storages from which they were copied or summed."""
        for tensor in tensors:
            waiting = [self._track(tensor)]
            while waiting:
                allocation = waiting.pop()
                allocation.part = part
                waiting += [source for source in allocation.sources if source.part is not part]

    def events(self) -> list[MemoryEvent]:
        """Return the recorded events in order."""
        return [MemoryEvent(phase, allocation.part, size) for phase, allocation, size in self._events]

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Record the operators inside the context as one kernel: its results exist, its temporary tensors do
        not."""
        begin = len(self._events)
        yield
        inside = self._events[begin:]
        born = {id(allocation) for _, allocation, size in inside if size == allocation.size}
        gone = {id(allocation) for _, allocation, size in inside if size < 0}
        temporary = born & gone
        self._events[begin:] = [event for event in inside if id(event[1]) not in temporary]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operator inside the context. Releases are recorded."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def allocated(
        self, func: object, args: Sequence[object], results: Iterable[object], sources: Sequence[Tensor] = ()
    ) -> None:
        """Record the results of an operator that ran while this mode was paused.

        Args:
            func, args: the operator and its arguments, for its ``scratch``.
            results: its results, of which the tensors are recorded.
            sources: the tensors of which the result is a copy in another dtype. Those that are not recorded
                do not exist in memory.
        """
        known = [source for source in sources if source.untyped_storage()._cdata in self._live]
        for result in results:
            if isinstance(result, Tensor):
                self._follow(self._track(result), known)
        self._record_scratch(func, args)

    def live_bytes(self) -> dict[Part, int]:
        """Return the bytes that are allocated now, by part."""
        held = dict.fromkeys(Part, 0)
        for _, allocation in self._live.values():
            held[allocation.part] += allocation.size
        return held

    def __enter__(self) -> MemoryTracker:
        # Sharded training frees memory by resizing a storage, which is not an operator.
        resize = torch.UntypedStorage.resize_

        def resize_and_record(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._resized(storage)
            return result

        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_record)
        self._resize.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        assert self._resize is not None
        self._resize.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _device and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # what the operator returns: two of three calls are this one
        if any(is_dtensor_class(kind) for kind in types):
            return NotImplemented  # DTensor then calls operators on its local tensors
        if func is _fused_sgd and self._fake_mode is not None:
            # PyTorch has no fake kernel for this operator, which works in place and allocates nothing
            return None
        out = func(*args, **(kwargs or {}))
        if self._paused:
            return out
        if isinstance(out, Tensor):
            allocation = self._track(out)
            if func is _copy or func is _add:
                sources = [arg for arg in args if isinstance(arg, Tensor)]
                self._follow(allocation, sources, is_cast=func is _copy)
        elif isinstance(out, Sequence):
            for tensor in out:
                if isinstance(tensor, Tensor):
                    self._track(tensor)
        self._record_scratch(func, args)
        return out

    def _follow(self, allocation: _Allocation, sources: Sequence[Tensor], is_cast: bool = True) -> None:
        """Assign to ``allocation`` the tensors from which it was cast or summed."""
        found = [self._track(source) for source in sources]
        if is_cast and found and found[0].part is Part.WEIGHTS and allocation is not found[0]:
            allocation.part = Part.CAST_WEIGHTS
        allocation.sources = tuple(source for source in found if source is not allocation)

    def _record_scratch(self, func: object, args: Sequence[object]) -> None:
        if func in self.scratch:
            size = self.scratch[func](*args)
            allocation = _Allocation(size, self.scope)
            self._events += [(self.phase, allocation, size), (self.phase, allocation, -size)]

    def _track(self, tensor: Tensor) -> _Allocation:
        if isinstance(tensor, FakeTensor):
            # Read fake_device, because .device would call an operator.
            foreign, device = self._fake_mode not in (None, tensor.fake_mode), tensor.fake_device
        else:
            foreign, device = False, tensor.device
        if foreign or device.type == "meta":
            return _Allocation(0, self.scope)  # a computation of shapes, which allocates nothing
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key][1]
        allocation = _Allocation(storage.nbytes(), self.scope)

        def on_release(_: weakref.ref) -> None:
            del self._live[key]
            self._events.append((self.phase, allocation, -allocation.size))

        self._live[key] = (weakref.ref(storage, on_release), allocation)
        self._events.append((self.phase, allocation, allocation.size))
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            allocation = self._live[storage._cdata][1]
            change = storage.nbytes() - allocation.size
            allocation.size += change
            self._events.append((self.phase, allocation, change))
