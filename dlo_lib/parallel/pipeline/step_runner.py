"""Executes a schedule: each rank executes the actions of its row of the table. One loop serves every
schedule.

A forward stores its input and the graph edge of its output. A backward takes the gradient of this output and
computes the gradient of the input, which is sent to the previous stage. A weight part computes the weight
gradients that an input part has deferred (``split_backward``). A step does not wait for sends, and receives
start early (``p2p``), so that communication overlaps with computation.

Bytes sent per micro-batch and cut: batch * seq * hidden elements in each direction. Memory: the activations
of the micro-batches in flight. The output of a stage is freed after the send, because the graph does not need
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dlo_lib.base.errors import UserError
from dlo_lib.base.torch_compat import owned_edge
from dlo_lib.optim.step import LossOf, MicroBatch, Precision
from dlo_lib.parallel.pipeline.action_times import ActionTimes
from dlo_lib.parallel.pipeline.p2p import AHEAD, ReceiveWork, StageP2P
from dlo_lib.parallel.pipeline.split_backward import SplitBackward, WeightPart
from dlo_lib.parallel.pipeline.table import RECEIVES, Action, ActionKind, I, Schedule

Cell = tuple[int, int]  # stage, micro-batch


class StepRunner:
    """Executes one step on one rank.

    Args:
        stages: the stages of this rank by number.
        splits: those of its stages whose backward can be split.
        schedule: with the communication in its rows.
        p2p: the messages to and from the neighbouring stages.
        micro_batches: the inputs and targets of each micro-batch.
        loss_of: maps the output of the last stage and the targets to the loss of the micro-batch, ().
        precision: the dtype of matrix products (autocast).
        scaler: the loss scaler for fp16.
        times: records the time of each action.

    Raises:
        UserError: the number of micro-batches is not that of the schedule.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        splits: Mapping[int, SplitBackward],
        schedule: Schedule,
        p2p: StageP2P,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision,
        scaler: torch.amp.GradScaler | None,
        times: ActionTimes,
    ) -> None:
        if len(micro_batches) != schedule.micro_batches:
            raise UserError(
                f"the schedule is for {schedule.micro_batches} micro-batches, not {len(micro_batches)}: "
                f"make a schedule for {len(micro_batches)}",
            )
        self._stages, self._splits, self._p2p, self._times = stages, splits, p2p, times
        self._micro_batches, self._loss_of = micro_batches, loss_of
        self._precision, self._scaler = precision, scaler
        self._placement, self._last = schedule.placement, schedule.stages - 1
        self._receives: dict[Action, ReceiveWork] = {}
        self._inputs: dict[Cell, Tensor] = {}  # leaf tensors; backward sets their .grad
        self._edges: dict[Cell, tuple[GradientEdge, object]] = {}  # each with what keeps its graph
        self._outputs: dict[Cell, Tensor] = {}  # to be sent to the next stage
        self._gradients: dict[Cell, Tensor] = {}  # of inputs, to be sent to the previous stage
        self._deferred: dict[Cell, WeightPart] = {}
        self._loss = torch.zeros((), device=p2p.device)

    def run(self, row: Sequence[Action]) -> Tensor:
        """Execute ``row`` and return the loss, (), which is 0 on ranks without the last stage."""
        receives = [action for action in row if action.kind in RECEIVES]
        started = 0
        for action in row:
            while started < len(receives) and len(self._receives) < AHEAD:
                if not self._start_receive(receives[started], wait=False):
                    break
                started += 1
            match action.kind:
                case ActionKind.RECEIVE_FORWARD | ActionKind.RECEIVE_BACKWARD:
                    if action not in self._receives:
                        self._start_receive(action, wait=True)
                        started += 1
                case ActionKind.SEND_FORWARD:
                    self._send_output(action)
                case ActionKind.SEND_BACKWARD:
                    self._p2p.send_gradient(
                        self._placement[action.stage - 1], self._gradients.pop(action[1:])
                    )
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                    self._backward(action)
                case ActionKind.WEIGHT_GRADIENT:
                    with self._times.of(action):
                        self._deferred.pop(action[1:]).run()
        self._p2p.finish()
        return self._loss

    def _send_output(self, action: Action) -> None:
        # No variable of the loop holds what was sent: it would stay until the next send.
        target = self._placement[action.stage + 1]
        self._p2p.send_output(target, action.stage, self._shape(action), self._outputs.pop(action[1:]))

    def _start_receive(self, action: Action, wait: bool) -> bool:
        """Start a receive and return True. Without ``wait``, start it only if its shape and dtype are
        known."""
        shape = self._shape(action)
        if action.kind is ActionKind.RECEIVE_FORWARD:
            if not wait and not self._p2p.knows(action.stage - 1, shape):
                return False
            source = self._placement[action.stage - 1]
            self._receives[action] = self._p2p.receive_output(source, action.stage - 1, shape)
        else:
            if not self._p2p.knows(action.stage, shape):  # this rank has not sent the output yet
                return False
            source = self._placement[action.stage + 1]
            self._receives[action] = self._p2p.receive_gradient(source, action.stage, shape)
        return True

    def _forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        inputs, targets = self._micro_batches[micro_batch]
        if stage == 0:
            x = inputs
        elif (receive := self._pop_receive(ActionKind.RECEIVE_FORWARD, stage, micro_batch)) is not None:
            x = receive.wait()
        else:  # the previous stage is on this rank
            x = self._outputs.pop((stage - 1, micro_batch))
        if stage > 0 and torch.is_grad_enabled():
            x.requires_grad_()
        low_precision = self._precision is not Precision.FP32
        autocast = torch.autocast(x.device.type, self._precision.dtype, enabled=low_precision)
        with self._times.of(action), autocast:
            output = self._stages[stage](x)
            if stage == self._last:
                output = self._loss_of(output, targets)
                self._loss = self._loss + output.detach()
                if self._scaler is not None:
                    output = self._scaler.scale(output)
        if torch.is_grad_enabled():
            self._inputs[stage, micro_batch] = x
            if output.requires_grad:
                self._edges[stage, micro_batch] = owned_edge(output)
        if stage < self._last:
            self._outputs[stage, micro_batch] = output.detach()

    def _backward(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if stage == self._last:
            gradient = None
        elif (receive := self._pop_receive(ActionKind.RECEIVE_BACKWARD, stage, micro_batch)) is not None:
            gradient = receive.wait()
        else:  # the next stage is on this rank
            gradient = self._gradients.pop((stage + 1, micro_batch))
        owned, x = self._edges.pop((stage, micro_batch), None), self._inputs.pop((stage, micro_batch))
        with self._times.of(action), contextlib.ExitStack() as stack:
            if kind is I:
                deferred = self._deferred[stage, micro_batch] = WeightPart()
                stack.enter_context(self._splits[stage].defer_to(deferred))
            if owned is not None:  # otherwise this stage and the previous ones have no trained parameter
                torch.autograd.backward(owned[:1], None if gradient is None else (gradient,))
        if stage > 0:
            self._gradients[stage, micro_batch] = x.grad if x.grad is not None else torch.zeros_like(x)

    def _pop_receive(self, kind: ActionKind, stage: int, micro_batch: int) -> ReceiveWork | None:
        return self._receives.pop(Action(kind, stage, micro_batch), None)

    def _shape(self, action: Action) -> tuple[int, ...]:
        return tuple(self._micro_batches[action.micro_batch][0].shape)
