"""The point-to-point messages between the stages of a pipeline: activations in forward, their gradients in
backward. They overlap with computation.

A send starts when its tensor is computed, and the step does not wait for it. A receive starts before the
tensor is needed, with at most ``AHEAD`` receives in flight on each rank. Messages between two ranks are
matched by their order, which the table defines (``table.with_communication``). The receiver does not know the
shape and dtype of an output. The sender therefore sends them before the first output of a stage for each
shape of the micro-batch, once in a run. A gradient has the shape and dtype of its output.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_lib.base.errors import UserError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMENSIONS = 8
AHEAD = 2
"""The largest number of receives in flight."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OutputMeta:
    """The shape and dtype of the output of a stage."""

    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class StageP2P:
    """The sends and receives of one rank.

    Args:
        group: the ranks of the pipeline, in the order of the ranks of the schedule.
        device: the device of received tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self._metas: dict[tuple[int, Shape], OutputMeta] = {}  # by stage and by shape of the micro-batch
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._simulated = False

    def send_output(self, rank: int, stage: int, micro_shape: Shape, output: Tensor) -> None:
        """Start to send ``output`` of ``stage`` to ``rank`` of the group. ``micro_shape`` is the shape of the
        inputs of the micro-batch.

        Raises:
            UserError: the output does not have a floating-point dtype, or has too many dimensions, or has
                another shape or dtype than the first one, which the other rank expects.
        """
        key, meta = (stage, micro_shape), OutputMeta(tuple(output.shape), output.dtype)
        if key not in self._metas:
            self._metas[key] = meta
            self._send(rank, _encoded(meta).to(self.device))
        elif self._metas[key] != meta and not self._simulated:
            raise UserError(
                f"stage {stage} returns {meta}, and {self._metas[key]} before: cast and change the stages "
                "before the pipeline is made, and use one precision with it"
            )
        self._send(rank, output)

    def simulate(self, stages: int, micro_shape: Shape, shape: Shape, dtype: torch.dtype) -> None:
        """Prepare for simulated ranks: set the shape and dtype of the outputs of all ``stages`` but the last,
        so that no rank sends them, and keep no tensor after its send."""
        self._simulated = True
        for stage in range(stages - 1):
            self._metas[stage, micro_shape] = OutputMeta(shape, dtype)

    def send_gradient(self, rank: int, gradient: Tensor) -> None:
        """Start to send the gradient of the input of a stage to ``rank``, which has the previous stage."""
        self._send(rank, gradient)

    def receive_output(self, rank: int, stage: int, micro_shape: Shape) -> ReceiveWork:
        """Start to receive the output of ``stage`` from ``rank``. The first receive waits for the shape and
        dtype."""
        key = (stage, micro_shape)
        if key not in self._metas:
            header = torch.empty(_MAX_DIMENSIONS + 2, dtype=torch.int64, device=self.device)
            dist.recv(header, self._global_rank(rank), group=self._group)
            self._metas[key] = _decoded(header)
        return self._receive(rank, self._metas[key])

    def receive_gradient(self, rank: int, stage: int, micro_shape: Shape) -> ReceiveWork:
        """Start to receive the gradient of the output of ``stage``, which this rank has sent before."""
        return self._receive(rank, self._metas[stage, micro_shape])

    def knows(self, stage: int, micro_shape: Shape) -> bool:
        """Return whether the shape and dtype of the output are known, so that a receive can start
        immediately."""
        return (stage, micro_shape) in self._metas

    def release_sent(self) -> None:
        """Free the tensors of the sends that have completed."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, rank: int, tensor: Tensor) -> None:
        self.release_sent()
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self._global_rank(rank), group=self._group)
        assert work is not None  # this rank is in the group
        if not self._simulated:  # a simulated send never reports that it has completed
            self._sent.append((work, tensor))

    def _receive(self, rank: int, meta: OutputMeta) -> ReceiveWork:
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
        work = dist.irecv(tensor, self._global_rank(rank), group=self._group)
        assert work is not None  # this rank is in the group
        return ReceiveWork(work, tensor)

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


@dataclass
class ReceiveWork:
    """A receive in flight."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        self.work.wait()
        return self.tensor


def _encoded(meta: OutputMeta) -> Tensor:
    if meta.dtype not in _DTYPES or len(meta.shape) > _MAX_DIMENSIONS:
        raise UserError(
            f"a stage returned {meta.dtype} of {len(meta.shape)} dimensions: "
            f"stages exchange floating-point tensors of at most {_MAX_DIMENSIONS} dimensions",
        )
    padded = [*meta.shape, *[0] * (_MAX_DIMENSIONS - len(meta.shape))]
    return torch.tensor([_DTYPES.index(meta.dtype), len(meta.shape), *padded])


def _decoded(header: Tensor) -> OutputMeta:
    dtype, dimensions, *shape = header.tolist()
    return OutputMeta(tuple(shape[:dimensions]), _DTYPES[dtype])
