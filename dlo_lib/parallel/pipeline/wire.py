"""What travels between the stages of a pipeline: activations forwards, their gradients backwards, beside the computation.

A send is issued when its tensor is made and nobody waits for it; a receive is issued before it is needed, at most ``AHEAD`` at a time for
each rank, so that it arrives while the rank computes. Between two ranks messages are matched by their order, which the table gives
(``table.with_communication``); so both sides know what comes next. What they cannot know is the shape and dtype of an output: it goes ahead
of the first output of a stage for each shape of the micro-batch, once in a run, and a gradient has its output's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.errors import UserError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_DIMENSIONS = 8
AHEAD = 2

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a stage's output."""

    shape: Shape
    dtype: torch.dtype


class Wire:
    """One rank's side of all messages.

    Args:
        group: the ranks of the pipeline, in the order of the schedule's ranks.
        device: where received tensors are made.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._forms: dict[tuple[int, Shape], Form] = {}  # by stage and shape of the micro-batch
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def send_output(self, rank: int, stage: int, micro_shape: Shape, output: Tensor) -> None:
        """Send ``output`` of ``stage``, for a micro-batch whose inputs have ``micro_shape``, to ``rank`` of the group."""
        key = (stage, micro_shape)
        if key not in self._forms:
            form = self._forms[key] = Form(tuple(output.shape), output.dtype)
            self._send(rank, _encoded(form).to(self._device))
        self._send(rank, output)

    def send_gradient(self, rank: int, gradient: Tensor) -> None:
        """Send the gradient of a stage's input to ``rank``, which has the stage before."""
        self._send(rank, gradient)

    def receive_output(self, rank: int, stage: int, micro_shape: Shape) -> Arrival:
        """Begin to receive the output of ``stage`` from ``rank``."""
        key = (stage, micro_shape)
        if key not in self._forms:
            header = torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._device)
            dist.recv(header, self._globally(rank), group=self._group)
            self._forms[key] = _decoded(header)
        return self._receive(rank, self._forms[key])

    def receive_gradient(self, rank: int, stage: int, micro_shape: Shape) -> Arrival:
        """Begin to receive the gradient of the output of ``stage``, which was sent before."""
        return self._receive(rank, self._forms[stage, micro_shape])

    def knows(self, stage: int, micro_shape: Shape) -> bool:
        """Whether a receive can begin without waiting for the form first."""
        return (stage, micro_shape) in self._forms

    def release_sent(self) -> None:
        """Forget what has gone out: its memory is free then."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, rank: int, tensor: Tensor) -> None:
        self.release_sent()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._globally(rank), group=self._group)
        assert work is not None  # this rank is in the group
        self._sent.append((work, tensor))

    def _receive(self, rank: int, form: Form) -> Arrival:
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        work = dist.irecv(tensor, self._globally(rank), group=self._group)
        assert work is not None  # this rank is in the group
        return Arrival(work, tensor)

    def _globally(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


@dataclass
class Arrival:
    """A tensor on its way here."""

    work: dist.Work
    tensor: Tensor

    def take(self) -> Tensor:
        """Wait for it."""
        self.work.wait()
        return self.tensor


def _encoded(form: Form) -> Tensor:
    if form.dtype not in _DTYPES or len(form.shape) > _MOST_DIMENSIONS:
        raise UserError(f"a stage returned {form.dtype} of {len(form.shape)} dimensions: stages exchange floating-point tensors")
    padded = [*form.shape, *[0] * (_MOST_DIMENSIONS - len(form.shape))]
    return torch.tensor([_DTYPES.index(form.dtype), len(form.shape), *padded])


def _decoded(header: Tensor) -> Form:
    dtype, dimensions, *shape = header.tolist()
    return Form(tuple(shape[:dimensions]), _DTYPES[dtype])
