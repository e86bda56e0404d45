"""The pipeline as a model: the stages of one rank, trained by a schedule (``step_runner`` executes it).

The gradients are those of the whole batch, also for micro-batches of unequal size: the loss of a micro-batch
is the sum of its token losses divided by the number of valid tokens of *all* micro-batches (``optim.step``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.optim.step import LossOf, MicroBatch, Precision, summed_cross_entropy
from dlo_lib.parallel.pipeline.action_times import ActionTimes
from dlo_lib.parallel.pipeline.p2p import StageP2P
from dlo_lib.parallel.pipeline.simulate import Simulation
from dlo_lib.parallel.pipeline.split_backward import SplitBackward
from dlo_lib.parallel.pipeline.step_runner import StepRunner
from dlo_lib.parallel.pipeline.table import Action, ActionKind, F, Schedule, with_communication
from dlo_lib.parallel.pipeline.tied_embeddings import TiedEmbeddings
from dlo_lib.parallel.pipeline.validate import validate
from dlo_lib.parallel.protocol import (
    MemoryObserver,
    ParallelModel,
    ParamShard,
    groups_by_param,
    process_group,
    whole_params,
)
from dlo_lib.parallel.sharding.clip import clip_sharded_grad_norm_
from dlo_lib.parallel.sharding.held_parts import Held, mark_held
from dlo_lib.parallel.sharding.sharded_grad import GradScope, RemoteGrad, mark

_REFUSAL = (
    "the gradients of a pipeline are on all its ranks: "
    "call pipeline.clip_grad_norm_, and scale the loss with parallel.grad_scaler.ShardedGradScaler"
)


class Pipeline(nn.Module):
    """The stages of one rank and its row of ``schedule``. ``train_step`` trains it as any other model; all
    ranks of the pipeline need the same micro-batches.

    Args:
        stages: the stages of this rank by number. Each maps one tensor to one tensor. They may be wrapped for
            data parallelism over another group (``no_sync``, ``finish_grad_sync``).
        schedule: a table with a row for each rank of ``group``.
        group: the ranks of the pipeline in the order of the rows; None for all ranks.
        tied: the embedding table that the first and the last stage share.

    Raises:
        UserError: the schedule gives other stages to this rank, the group has another size, the schedule
            cannot be executed, or it splits the backward of stages that communicate their gradients during
            backward; later, the optimiser needs the parameters of all ranks.
    """

    holds_every_param = False
    takes_added_grads = False

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None = None,
        *,
        tied: TiedEmbeddings | None = None,
    ) -> None:
        super().__init__()
        group = process_group(group, "a pipeline")
        self.rank = dist.get_rank(group)
        ranks, own = dist.get_world_size(group), schedule.stages_of(self.rank)
        if schedule.ranks != ranks:
            raise UserError(
                f"the schedule is for {schedule.ranks} ranks, the group has {ranks}: "
                f"make a schedule for {ranks} ranks",
            )
        if tuple(sorted(stages)) != own:
            raise UserError(
                f"rank {self.rank} has stages {sorted(stages)}, the schedule gives it {list(own)}: "
                "build these stages",
            )
        validate(schedule)
        self.schedule = schedule if schedule.has_communication else with_communication(schedule)
        validate(self.schedule)
        self.group: dist.ProcessGroup = group
        self.tied = tied
        self.stages = nn.ModuleDict({str(stage): module for stage, module in sorted(stages.items())})
        # Stages whose hooks communicate gradients during backward keep the backward of autograd.
        splittable = {stage: module for stage, module in stages.items() if _may_add_grads(module)}
        self.splits = {stage: SplitBackward(module) for stage, module in splittable.items()}
        if schedule.splits_backward and len(self.splits) < len(stages):
            raise UserError(
                f"{schedule.name} splits the backward, which sharded stages cannot: "
                "use 1F1B or interleaved 1F1B with them",
            )
        self._device = next(self.parameters(), torch.empty(0)).device
        self._p2p = StageP2P(group, self._device)
        self._grad_scope = GradScope((), self._device, _REFUSAL)
        self._times = ActionTimes(self._device)
        if ranks > 1:
            mark_held(self.parameters(), Held.SOME, "a pipeline")

    def accumulate_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision = Precision.FP32,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run all forwards and backwards of a step. The gradients are added to ``.grad`` of the parameters.

        Args:
            micro_batches: the inputs and targets of each micro-batch, equal on every rank of the pipeline.
            loss_of: maps the output of the last stage and the targets to the loss of the micro-batch, ().
            precision: the dtype of matrix products (autocast).
            scaler: the loss scaler for fp16. It must agree over the group
                (``grad_scaler.ShardedGradScaler``), so that either all ranks skip a step or none does.

        Returns:
            The sum of the losses, () fp64, on every rank of the pipeline.

        Raises:
            UserError: the number of micro-batches is not that of the schedule; a stage returns another shape
                or dtype than before; the tied parameter was replaced.
        """
        if self.tied is not None:
            self.tied.check(self.parameters())
        with contextlib.ExitStack() as stack:
            for module in self.stages.values():
                stack.enter_context(getattr(module, "no_sync", contextlib.nullcontext)())
            loss = self._run(self.schedule.rows[self.rank], micro_batches, loss_of, precision, scaler)
        if scaler is not None:
            # Initialises the scale on the ranks without the last stage, which have not used it
            scaler.scale(loss)
        for module in self.stages.values():
            getattr(module, "finish_grad_sync", lambda: None)()
        if self.tied is not None:  # after finish_grad_sync, when the gradients of both ends are sharded alike
            self.tied.add_gradients()
        for param in self.parameters():
            if param.grad is not None:
                mark(param.grad, self._grad_scope)
        return self._broadcast_loss(loss)

    def simulate_messages(
        self, micro_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Prepare for a group whose other ranks are simulated: no rank sends the shape and dtype of the
        hidden states, and each send completes immediately.

        Args:
            micro_shape: the shape of the inputs of a micro-batch, (batch, seq).
            shape: the shape of the output of a stage, (batch, seq, hidden), or a part of it.
            dtype: the dtype of the output.
        """
        self._p2p.simulate(self.schedule.stages, micro_shape, shape, dtype)

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision = Precision.FP32,
    ) -> Tensor:
        """Return the loss of ``micro_batches`` without gradients, () fp64, on every rank of the pipeline.
        Only the forwards of the table are executed."""
        forwards = {F, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD}
        row = [action for action in self.schedule.rows[self.rank] if action.kind in forwards]
        return self._broadcast_loss(self._run(row, micro_batches, loss_of, precision, None))

    def summed_cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the sum of the losses of the valid tokens, (), as the last stage defines it
        (``TensorParallel``)."""
        last = self.stages[str(self.schedule.stages - 1)]
        compute = getattr(last, "summed_cross_entropy", summed_cross_entropy)
        loss: Tensor = compute(logits, targets)
        return loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing, because ``accumulate_gradients`` synchronises once, at the end of a step."""
        return contextlib.nullcontext()

    def finish_grad_sync(self) -> None:
        """Do nothing, because ``accumulate_gradients`` has synchronised the gradients."""

    def unwrapped(self) -> list[nn.Module]:
        """Return the stages of this rank without their wrappers."""
        found: list[nn.Module] = []
        for stage in self.stages.values():
            found += stage.unwrapped() if isinstance(stage, ParallelModel) else [stage]
        return found

    def shards(self) -> list[ParamShard]:
        """Return the parameters of this rank's stages, with their names in the whole model. A tied parameter
        has its name in the first stage."""
        found: dict[nn.Parameter, ParamShard] = {}
        for stage in reversed(list(self.stages.values())):
            shards = stage.shards() if isinstance(stage, ParallelModel) else whole_params(stage)
            found |= {shard.param: shard for shard in shards}
        if self.tied is not None and self.tied.duplicate is not None:
            copy = self.tied.duplicate
            found[copy] = replace(found[copy], name=self.tied.name)
        return list(found.values())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters and buffers of this rank's stages, with their names in the whole model."""
        found: dict[str, Any] = {}
        for stage in self.stages.values():
            found |= stage.state_dict(*args, **kwargs)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:  # type: ignore[override]
        """Load the stages of this rank from ``state_dict``, which may contain those of other ranks too.

        Raises:
            RuntimeError: a parameter of this rank is missing (with ``strict``), or has another shape.
        """
        for stage in self.stages.values():
            own = {name: state_dict[name] for name in stage.state_dict(keep_vars=True) if name in state_dict}
            stage.load_state_dict(own, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Refuse ``torch.distributed.checkpoint.state_dict``, which calls this method."""
        raise UserError(
            "get_state_dict does not know the stages of a pipeline: save pipeline.state_dict() with "
            "torch.distributed.checkpoint, or the optimiser too with parallel.checkpoint.save_sharded"
        )

    def observe_memory(self, observer: MemoryObserver) -> None:
        for stage in self.stages.values():
            if isinstance(stage, ParallelModel):
                stage.observe_memory(observer)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all ranks so that their global norm is at most ``max_norm``.

        Args:
            norm_type: p > 0 of the p-norm; ``math.inf`` for the largest absolute value.

        Returns the norm before scaling, () fp64, the same on every rank.
        """
        duplicate = self.tied.duplicate if self.tied is not None else None
        shards = self.shards()
        copies = [shard.param for shard in shards if shard.param is duplicate or not shard.counted]
        groups_of: dict[nn.Parameter, Sequence[dist.ProcessGroup]] = dict.fromkeys(self.parameters(), ())
        groups_of |= groups_by_param(shards)
        for param in self.parameters():
            if isinstance(param.grad, RemoteGrad):
                groups_of[param] = param.grad.groups
        return clip_sharded_grad_norm_(
            self.parameters(),
            max_norm,
            [self.group],
            self._device,
            norm_type=norm_type,
            copies=copies,
            groups_of=groups_of,
        )

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Record the start and the end of each action of the steps inside the context. ``measured`` returns
        those of the last step. On an accelerator, each action is synchronised."""
        return self._times.recording()

    def measured(self) -> Simulation:
        """Return the spans of the last recorded step on all ranks, in seconds from its first action, for
        ``draw``. Call it inside ``recording``, on every rank.

        All ranks must use the same clock, as they do on one machine. Waiting for data counts as bubble, not
        as part of an action.

        Raises:
            UserError: nothing was recorded.
        """
        return self._times.measured(self.schedule, self.rank, self.group)

    def _run(
        self,
        row: Sequence[Action],
        micro_batches: Sequence[MicroBatch],
        loss_of: LossOf,
        precision: Precision,
        scaler: torch.amp.GradScaler | None,
    ) -> Tensor:
        stages = {int(stage): module for stage, module in self.stages.items()}
        step = StepRunner(
            stages,
            self.splits,
            self.schedule,
            self._p2p,
            micro_batches,
            loss_of,
            precision,
            scaler,
            self._times,
        )
        return step.run(row)

    def _broadcast_loss(self, loss: Tensor) -> Tensor:
        """Broadcast the loss of the rank with the last stage, in fp64, because the other ranks do not know
        its dtype."""
        loss = loss.double()
        dist.broadcast(loss, dist.get_global_rank(self.group, self.schedule.placement[-1]), group=self.group)
        return loss


def _may_add_grads(stage: nn.Module) -> bool:
    """Return whether gradients may be added to ``.grad`` of ``stage`` outside autograd. They may if the stage
    communicates no gradients, or communicates them after backward."""
    if isinstance(stage, ParallelModel):
        return stage.takes_added_grads
    return not hasattr(stage, "finish_grad_sync")
