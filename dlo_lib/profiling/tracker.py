"""Live memory, counted storage by storage while real code runs.

Every operator passes a dispatch mode, which notes each storage that appears and, through a weak reference, when it dies. Storages
are counted and not tensors, since views share one. Each belongs to a part (weights, gradients, ...), which may be known only after
its birth: a gradient shows itself once autograd has put it in ``.grad``. So births and deaths are recorded, and summed afterwards.

Cost: one Python call per operator, nothing per byte; on fake tensors (no data) a model of any size can be followed.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_lib.optim import Phase


class Part(enum.Enum):
    """What memory holds. Every byte is in exactly one part."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    """``.grad``, and what it is summed and cast from: under autocast a weight's gradient exists in bf16 first."""
    OPTIMIZER_STATE = "optimizer state"
    STEP_TEMPORARIES = "step temporaries"
    """What clipping and the optimiser's step allocate and free again."""
    CAST_WEIGHTS = "cast weights"
    """The low-precision copies of the weights that autocast makes in forward and backward still needs; they do not grow with the batch."""
    UNITS = "gathered units"
    """Sharded training: parameters that are whole for the moment, and the messages that bring them and take their gradients away."""
    ACTIVATIONS = "activations"
    """What forward keeps for backward, gradients of activations, and the temporaries of both, from the embedding to the last norm."""
    LOGITS_AND_LOSS = "logits and loss"
    """The same for the output projection and the cross-entropy."""
    BUFFERS = "buffers"
    """The batch, the model's buffers, constants, and buckets of gradient communication that are not the gradients themselves."""


@dataclass(frozen=True)
class Event:
    """A storage appears (``bytes`` > 0) or disappears (< 0) in that phase; ``phase`` is None before the step begins."""

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


class MemoryTracker(TorchDispatchMode):
    """A dispatch mode that records the births and deaths of storages; use it as a context inside the fake tensor mode, if any.

    Attributes:
        phase: the phase that new events are in.
        scope: the part that new storages are taken for until they are claimed.
        scratch: what an operator allocates inside its kernel and frees again, in bytes, by operator, from the operator's arguments.
    """

    def __init__(self, fake_mode: FakeTensorMode | None = None, scratch: dict[object, Callable[..., int]] | None = None) -> None:
        super().__init__()
        self.phase: Phase | None = None
        self.scope = Part.BUFFERS
        self.scratch = scratch or {}
        self._fake_mode = fake_mode
        self._live: dict[int, tuple[weakref.ref, _Allocation]] = {}
        self._events: list[tuple[Phase | None, _Allocation, int]] = []
        self._resize: AbstractContextManager | None = None

    def claim(self, tensors: Iterable[Tensor], part: Part) -> None:
        """Say that the storages of ``tensors`` belong to ``part``, since their birth and with what they were copied or added from."""
        for tensor in tensors:
            waiting = [self._track(tensor)]
            while waiting:
                allocation = waiting.pop()
                allocation.part = part
                waiting += [source for source in allocation.sources if source.part is not part]

    def events(self) -> list[Event]:
        """What happened so far, in order."""
        return [Event(phase, allocation.part, size) for phase, allocation, size in self._events]

    def live_bytes(self) -> dict[Part, int]:
        """What is alive now, by part."""
        held = dict.fromkeys(Part, 0)
        for _, allocation in self._live.values():
            held[allocation.part] += allocation.size
        return held

    def __enter__(self) -> MemoryTracker:
        # Sharded code frees a tensor's memory by resizing its storage, which is no operator.
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            self._resized(storage)
            return result

        self._resize = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_note)
        self._resize.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        assert self._resize is not None
        self._resize.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operators on its local tensors
        if func is _fused_sgd and self._fake_mode is not None:
            return None  # PyTorch has no fake kernel for it; it works in place and allocates nothing
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            allocation = self._track(out)
            if func is _copy or func is _add:
                sources = tuple(self._track(arg) for arg in args if isinstance(arg, Tensor))
                if func is _copy and sources[0].part is Part.WEIGHTS and allocation is not sources[0]:
                    allocation.part = Part.CAST_WEIGHTS
                allocation.sources = tuple(source for source in sources if source is not allocation)
        elif isinstance(out, Sequence):
            for tensor in out:
                if isinstance(tensor, Tensor):
                    self._track(tensor)
        if func in self.scratch:
            size = self.scratch[func](*args)
            allocation = _Allocation(size, self.scope)
            self._events += [(self.phase, allocation, size), (self.phase, allocation, -size)]
        return out

    def _track(self, tensor: Tensor) -> _Allocation:
        if isinstance(tensor, FakeTensor):
            foreign, device = self._fake_mode not in (None, tensor.fake_mode), tensor.fake_device  # .device would be an operator
        else:
            foreign, device = False, tensor.device
        if foreign or device.type == "meta":
            return _Allocation(0, self.scope)  # shape arithmetic: nothing is allocated
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return self._live[key][1]
        allocation = _Allocation(storage.nbytes(), self.scope)

        def died(_: weakref.ref) -> None:
            del self._live[key]
            self._events.append((self.phase, allocation, -allocation.size))

        self._live[key] = (weakref.ref(storage, died), allocation)
        self._events.append((self.phase, allocation, allocation.size))
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            allocation = self._live[storage._cdata][1]
            change = storage.nbytes() - allocation.size
            allocation.size += change
            self._events.append((self.phase, allocation, change))
