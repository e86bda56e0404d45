"""Carries out a schedule: each rank goes through its row of the table and does what the cells say. One loop for every schedule.

A forward keeps its input and the edge of the graph from which its output came; a backward takes the gradient of that output and leaves
the gradient of the input to be sent; a weight part does what an input part left open (``deferred``). Sends are not waited for within a
step and receives are begun ahead (``wire``), so data moves while ranks compute.

Gradients are those of the whole batch, however many micro-batches there are and however unequal: the loss that comes in is a sum of token
losses over the number of valid tokens of *all* of them (``optim.step``), never a mean of means.

Sent per micro-batch and cut: batch * seq * hidden elements each way. Held: as many micro-batches as the table has in flight. The output of
a stage is not kept once it is sent: the graph does not need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dlo_lib.errors import UserError
from dlo_lib.optim.step import LossOf, MicroBatch, Precision
from dlo_lib.parallel.ddp import DDP
from dlo_lib.parallel.pipeline.clock import now
from dlo_lib.parallel.pipeline.deferred import SplitBackward, WeightPart
from dlo_lib.parallel.pipeline.simulate import Simulation, Span
from dlo_lib.parallel.pipeline.table import COMPUTE, RECEIVES, Action, ActionKind, F, I, Schedule, with_communication
from dlo_lib.parallel.pipeline.tied import TiedEnds
from dlo_lib.parallel.pipeline.validate import validate
from dlo_lib.parallel.pipeline.wire import AHEAD, Arrival, Wire

Cell = tuple[int, int]  # stage, micro-batch


class Pipeline(nn.Module):
    """One rank's stages and its row of ``schedule``; ``train_step`` trains it like any model, on every rank with the same micro-batches.

    Args:
        stages: this rank's stages by number, each a module from one tensor to one tensor. They may be wrapped for data parallelism
            (``no_sync``, ``finish_grad_sync``) over another group.
        schedule: a table for as many ranks as ``group`` has.
        group: the ranks of the pipeline in the order of the table's rows; None for all.
        tied: a parameter that two stages hold a copy of (``tied.TiedEnds``).
        replicas: the ranks whose stages are wrapped together with these, as ``train_step`` must know; None for a single pipeline.

    Raises:
        UserError: the stages are not the schedule's for this rank, the group has another size, the schedule cannot be carried out, or it
            splits the backward of stages whose gradients are communicated as they arise.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        *,
        tied: TiedEnds | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise UserError("a pipeline needs a process group: start with torchrun or srun, or call launch.run_ranks")
        self.rank = dist.get_rank(group)
        if schedule.ranks != dist.get_world_size(group):
            raise UserError(f"the schedule is for {schedule.ranks} ranks, the group has {dist.get_world_size(group)}: make one for as many")
        if tuple(sorted(stages)) != schedule.stages_of(self.rank):
            raise UserError(f"rank {self.rank} has stages {sorted(stages)}, the schedule gives it {list(schedule.stages_of(self.rank))}")
        validate(schedule)
        self.schedule = schedule if schedule.has_communication else with_communication(schedule)
        validate(self.schedule)
        self.group: dist.ProcessGroup = group
        self.tied, self.replicas = tied, replicas
        self.stages = nn.ModuleDict({str(stage): module for stage, module in sorted(stages.items())})
        # Where gradients are communicated by hooks as they arise, backward stays autograd's.
        self.splits = {stage: SplitBackward(module) for stage, module in stages.items() if _communicates_afterwards(module)}
        if schedule.splits_backward and len(self.splits) < len(stages):
            raise UserError(f"{schedule.name} splits the backward, which sharded stages cannot: use 1F1B or interleaved 1F1B with them")
        self._device = next(self.parameters(), torch.empty(0)).device
        self._wire = Wire(group, self._device)
        self._recorded: list[tuple[Action, Span]] | None = None

    def accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision = Precision.FP32,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """All forwards and backwards of a step: gradients are added to ``.grad`` of this rank's parameters.

        Args:
            micro_batches: inputs and targets, as many as the schedule has, the same on every rank of the pipeline.
            loss_of: the last stage's output and the targets to the part of the loss that is this micro-batch's, ().
            scaler: for fp16; one that agrees over the group (``grad_scaler.ShardedGradScaler``), so that a step is skipped by all or none.

        Returns:
            The sum of these parts, (), on every rank of the pipeline.
        """
        with contextlib.ExitStack() as stack:
            for module in self.stages.values():
                stack.enter_context(getattr(module, "no_sync", contextlib.nullcontext)())
            loss = _Step(self, self._wire, micro_batches, loss_of, precision, scaler).run(self.schedule.rows[self.rank])
        if self.tied is not None:
            self.tied.add_gradients()
        if scaler is not None:
            scaler.scale(loss)  # it exists once it has scaled something, which only the last stage's rank has asked for
        for module in self.stages.values():
            getattr(module, "finish_grad_sync", lambda: None)()
        return self._from_last(loss)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], loss_of: LossOf, precision: Precision = Precision.FP32) -> Tensor:
        """The loss of ``micro_batches`` without gradients, (), on every rank of the pipeline: the forwards of the table alone."""
        forwards = {F, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD}
        row = [action for action in self.schedule.rows[self.rank] if action.kind in forwards]
        return self._from_last(_Step(self, self._wire, micro_batches, loss_of, precision, None).run(row))

    def plain_stages(self) -> list[nn.Module]:
        """This rank's stages without what wraps them."""
        return [stage.module if isinstance(stage, DDP) else stage for stage in self.stages.values()]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all ranks' gradients so that their global 2-norm is at most ``max_norm``; the norm before, ()."""
        again = self.tied.counted_elsewhere if self.tied is not None else None
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None and parameter is not again]
        squared = torch.stack([grad.double().square().sum() for grad in grads] or [torch.zeros((), dtype=torch.float64)]).sum()
        squared = squared.to(self._device)
        dist.all_reduce(squared, group=self.group)
        norm = squared.sqrt()
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(shrink.to(parameter.grad.dtype))
        return norm

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note when each action of the steps inside begins and ends; ``measured`` gives the last one's. An accelerator is waited for."""
        self._recorded = []
        try:
            yield
        finally:
            self._recorded = None

    def measured(self) -> Simulation:
        """The last recorded step in time, of all ranks, in seconds from its first action: what ``draw`` draws. Inside ``recording``.

        The ranks' clocks must be one clock, as they are on one machine. Waiting for data counts as bubble, not as part of an action.
        """
        if self._recorded is None:
            raise UserError("nothing was recorded: run a step inside `with pipeline.recording():` and ask for it there")
        row = [span for _, span in self._recorded[-sum(action.kind in COMPUTE for action in self.schedule.rows[self.rank]) :]]
        rows: list[list[Span]] = [[] for _ in range(self.schedule.ranks)]
        dist.all_gather_object(rows, row, group=self.group)
        began = min(start for spans in rows for start, _ in spans)
        return Simulation(self.schedule.compute(), tuple(tuple((start - began, end - began) for start, end in spans) for spans in rows))

    def _from_last(self, loss: Tensor) -> Tensor:
        """The loss that the rank of the last stage knows, for all, in float64: the others do not know its dtype."""
        loss = loss.double()
        dist.broadcast(loss, dist.get_global_rank(self.group, self.schedule.placement[-1]), group=self.group)
        return loss


class _Step:
    """The state of one step on one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        wire: Wire,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        schedule = pipeline.schedule
        if len(micro_batches) != schedule.micro_batches:
            raise UserError(f"the schedule is for {schedule.micro_batches} micro-batches, not {len(micro_batches)}: make one for as many")
        self._pipeline, self._wire = pipeline, wire
        self._micro_batches, self._loss_of, self._precision, self._scaler = micro_batches, loss_of, precision, scaler
        self._placement, self._last = schedule.placement, schedule.stages - 1
        self._arrivals: dict[Action, Arrival] = {}
        self._inputs: dict[Cell, Tensor] = {}  # leaves, whose .grad the backward leaves
        self._edges: dict[Cell, GradientEdge] = {}
        self._outputs: dict[Cell, Tensor] = {}  # on their way to the next stage
        self._gradients: dict[Cell, Tensor] = {}  # of inputs, on their way to the stage before
        self._open: dict[Cell, WeightPart] = {}
        self._loss = torch.zeros((), device=pipeline._device)

    def run(self, row: Sequence[Action]) -> Tensor:
        """Carry out ``row``; the loss, on the rank with the last stage."""
        receives = [action for action in row if action.kind in RECEIVES]
        begun = 0
        for action in row:
            while begun < len(receives) and len(self._arrivals) < AHEAD and self._begin(receives[begun], wait=False):
                begun += 1
            match action.kind:
                case ActionKind.RECEIVE_FORWARD | ActionKind.RECEIVE_BACKWARD:
                    if action not in self._arrivals:
                        self._begin(action, wait=True)
                        begun += 1
                case ActionKind.SEND_FORWARD:
                    output = self._outputs.pop(action[1:])
                    self._wire.send_output(self._placement[action.stage + 1], action.stage, self._shape(action), output)
                case ActionKind.SEND_BACKWARD:
                    self._wire.send_gradient(self._placement[action.stage - 1], self._gradients.pop(action[1:]))
                case ActionKind.FORWARD:
                    self._forward(action)
                case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                    self._backward(action)
                case ActionKind.WEIGHT_GRADIENT:
                    with self._timed(action):
                        self._open.pop(action[1:]).run()
        self._wire.finish()
        return self._loss

    def _begin(self, action: Action, wait: bool) -> bool:
        """Begin a receive. Without ``wait`` only if nothing has to come before it."""
        shape = self._shape(action)
        if action.kind is ActionKind.RECEIVE_FORWARD:
            if not wait and not self._wire.knows(action.stage - 1, shape):
                return False
            arrival = self._wire.receive_output(self._placement[action.stage - 1], action.stage - 1, shape)
        else:
            if not self._wire.knows(action.stage, shape):  # its output has not been sent yet
                return False
            arrival = self._wire.receive_gradient(self._placement[action.stage + 1], action.stage, shape)
        self._arrivals[action] = arrival
        return True

    def _forward(self, action: Action) -> None:
        _, stage, micro_batch = action
        inputs, targets = self._micro_batches[micro_batch]
        if stage == 0:
            x = inputs
        elif (arrival := self._arrivals.pop(Action(ActionKind.RECEIVE_FORWARD, stage, micro_batch), None)) is not None:
            x = arrival.take()
        else:  # the stage before is on this rank too
            x = self._outputs.pop((stage - 1, micro_batch))
        if stage > 0 and torch.is_grad_enabled():
            x.requires_grad_()
        with self._timed(action), torch.autocast(x.device.type, self._precision.dtype, enabled=self._precision is not Precision.FP32):
            output = self._pipeline.stages[str(stage)](x)
            if stage == self._last:
                output = self._loss_of(output, targets)
                self._loss = self._loss + output.detach()
                if self._scaler is not None:
                    output = self._scaler.scale(output)
        if torch.is_grad_enabled():
            self._inputs[stage, micro_batch] = x
            if output.requires_grad:
                self._edges[stage, micro_batch] = get_gradient_edge(output)
        if stage < self._last:
            self._outputs[stage, micro_batch] = output.detach()

    def _backward(self, action: Action) -> None:
        kind, stage, micro_batch = action
        if stage == self._last:
            gradient = None
        elif (arrival := self._arrivals.pop(Action(ActionKind.RECEIVE_BACKWARD, stage, micro_batch), None)) is not None:
            gradient = arrival.take()
        else:
            gradient = self._gradients.pop((stage + 1, micro_batch))
        edge, x = self._edges.pop((stage, micro_batch), None), self._inputs.pop((stage, micro_batch))
        with self._timed(action), contextlib.ExitStack() as stack:
            if kind is I:
                part = self._open[stage, micro_batch] = WeightPart()
                stack.enter_context(self._pipeline.splits[stage].leaving(part))
            if edge is not None:  # else nothing before the cut is trained
                torch.autograd.backward((edge,), None if gradient is None else (gradient,))
        if stage > 0:
            self._gradients[stage, micro_batch] = x.grad if x.grad is not None else torch.zeros_like(x)

    def _shape(self, action: Action) -> tuple[int, ...]:
        return tuple(self._micro_batches[action.micro_batch][0].shape)

    @contextlib.contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        recorded = self._pipeline._recorded
        if recorded is None:
            yield
            return
        began = now(self._pipeline._device)
        yield
        recorded.append((action, (began, now(self._pipeline._device))))


def _communicates_afterwards(stage: nn.Module) -> bool:
    """Whether the gradients of ``stage`` may be added in place by whoever: nobody communicates them, or DDP when all are there."""
    return isinstance(stage, DDP) or not hasattr(stage, "finish_grad_sync")
