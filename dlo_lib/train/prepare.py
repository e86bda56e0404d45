"""Build the data, the model and the optimiser of a run from its configuration, or from its checkpoint.

``prepare`` does not communicate, so a rank can fail alone; the ranks then report the error together. All
errors of the configuration are found before the first write to ``out``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.base.files import write_text
from dlo_lib.base.garbage import without_collector
from dlo_lib.data import RankSampler, TokenDataset, open_dataset
from dlo_lib.kernels import Kernels, fuse
from dlo_lib.launch import Place
from dlo_lib.models import Llama, model_config
from dlo_lib.models.checkpoint import load_checkpoint, read_config
from dlo_lib.optim import Precision
from dlo_lib.optim.averaging import Averaging, WeightAverage
from dlo_lib.optim.batch_rules import BatchRule
from dlo_lib.optim.entry import OptimizerStep
from dlo_lib.optim.fp8_blocks import use_fp8
from dlo_lib.optim.registry import optimizer_entry
from dlo_lib.parallel.fsdp.deferred_init import deferred_init
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.materialize import Values
from dlo_lib.parallel.mesh import SEQUENCES, TOKENS, ParallelMesh
from dlo_lib.parallel.parallelize import make_optimizer, parallelize
from dlo_lib.parallel.plan import ParallelPlan
from dlo_lib.parallel.protocol import averaged_optimizer
from dlo_lib.profiling.settings import forms_of
from dlo_lib.train.checkpoint import Checkpoint, folder_of, newest
from dlo_lib.train.compiled import compile_model, inductor
from dlo_lib.train.config import Auto, TrainConfig
from dlo_lib.train.disk import writing
from dlo_lib.train.fp8 import require_fp8
from dlo_lib.train.metrics import METRICS_FILE
from dlo_lib.train.state import TrainState, seed_everything


@dataclass(frozen=True)
class Prepared:
    """The inputs of the loop.

    ``config`` has the batch of the checkpoint if it was auto. ``checkpoint`` is the checkpoint to resume
    from, or None. ``values`` gives the values of a model without storage. ``mesh`` is None in a process that
    trains alone.
    """

    config: TrainConfig
    model: Llama
    values: Values | None
    sampler: RankSampler
    dataset: TokenDataset
    checkpoint: Checkpoint | None
    plan: ParallelPlan
    mesh: ParallelMesh | None

    def spread(self, place: Place) -> TrainState:
        """Distribute the model over the mesh and create the optimiser of this rank; this communicates.

        Raises:
            UserError: the parallel form does not fit the ranks; every rank raises it.
        """
        config, plan, mesh = self.config, self.plan, self.mesh
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        spread = parallelize(self.model, plan, mesh, device=place.device, values=self.values, seq=config.seq)
        compiled = compile_model(spread, plan, place.device) if config.compile else None
        scaler: torch.amp.GradScaler | None = None
        if config.precision is Precision.FP16:
            kind = place.device.type
            in_parts = mesh is not None and plan.grads_in_parts
            scaler = (
                ShardedGradScaler(kind, mesh.group)
                if mesh is not None and in_parts
                else torch.amp.GradScaler(kind)
            )
        learns_with = None
        if mesh is not None and (not plan.pipelined or mesh.size(*TOKENS) > 1):
            learns_with = mesh.group_along(*TOKENS)
        optimizer = _optimizer(config, spread, plan, mesh)
        average = None
        if config.average is not Averaging.NONE:
            start = max(1, config.average_start)
            average = WeightAverage(
                averaged_optimizer(optimizer),
                config.average,
                config.average_decay,
                start,
                after_swap=getattr(optimizer, "sync_params", None),
            )
        return TrainState(
            self.model,
            spread,
            parameters,
            optimizer,
            self.sampler,
            scaler,
            learns_with,
            plan.saves_in_parts and mesh is not None,
            compiled=compiled,
            average=average,
        )


def prepare(config: TrainConfig, place: Place) -> Prepared:
    """Build everything that a rank needs, on its device; the model is not yet distributed.

    Raises:
        UserError: the configuration cannot be trained or resumed.
    """
    plan = config.plan(place.world_size, place.local_world_size)
    if why := optimizer_entry(config.optimizer).wrong_under(forms_of(plan if config.is_parallel else None)):
        raise UserError(f"{config.optimizer} {why}: use --parallel none, or --optimizer adamw")
    config.tracking.require()
    config = _with_rate(config, plan)
    mesh = ParallelMesh(plan.degrees) if config.is_parallel else None
    checkpoint = newest(config.out) if config.resume else None
    if checkpoint is not None:
        if config.batch is Auto.AUTO:
            config = replace(config, batch=checkpoint.config["batch"])
        _require_same(checkpoint, config, plan, place)
    if config.compile:
        inductor(place.device)  # before the model is built
    if config.fp8:
        require_fp8(place.device)
    seed_everything(config.seed)  # the same weights on every rank, and the same as on one
    model, values = _model(config, plan, checkpoint, place.device)
    dataset = open_dataset(config.data, config.seq)
    if dataset.vocab_size > model.config.vocab_size:
        raise UserError(
            f"data {config.data} has {dataset.vocab_size:,} different tokens, model {config.model} has "
            f"{model.config.vocab_size:,}: choose another --model"
        )
    if config.seq > model.config.max_positions:
        raise UserError(
            f"seq is {config.seq}: {config.model} has {model.config.max_positions} positions; "
            "use at most that"
        )
    fuse(model, config.kernels.operations, plan.takes_logits)
    if config.fp8:
        use_fp8(model)
    # The ranks of a pipeline, of cp and of tp read the same sequences.
    mine, readers = (mesh.coordinate(*SEQUENCES), mesh.size(*SEQUENCES)) if mesh is not None else (0, 1)
    # The batch that is found later has another sampler.
    batch = 1 if config.batch is Auto.AUTO else config.sequences
    sampler = RankSampler(len(dataset), batch, mine, readers, seed=config.seed)
    # From here on, ranks draw different numbers. The ranks of tp, the innermost dimension, hold the same
    # activations and need the same dropout.
    seed_everything(config.seed + 1 + place.rank // plan.tp)
    return Prepared(config, model, values, sampler, dataset, checkpoint, plan, mesh)


def _with_rate(config: TrainConfig, plan: ParallelPlan) -> TrainConfig:
    """Return the configuration with the learning rate for its sequences in a step of all ranks."""
    if config.lr_rule is BatchRule.NONE:
        return config
    lr = config.lr_rule.scaled(config.lr, _sequences(config, plan), config.lr_batch)
    return replace(config, lr=lr, lr_rule=BatchRule.NONE, lr_batch=0)


def _sequences(config: TrainConfig, plan: ParallelPlan) -> int:
    """Return the sequences in a step of all ranks."""
    return config.sequences * config.accumulation * plan.dp_replicate * plan.dp_shard


def open_out(config: TrainConfig, resumed: bool) -> None:
    """Create the folder of the run; only one rank calls it.

    Raises:
        UserError: the folder belongs to another run or cannot be written to.
    """
    if not resumed and (config.out / METRICS_FILE).exists() and not config.resume:
        raise UserError(
            f"{config.out} already contains a run: continue it with --resume or choose another --out"
        )
    if (folder := folder_of(config.out)).exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, and checkpoints need a folder there: choose another --out")
    write_config(config)


def write_config(config: TrainConfig) -> None:
    """Write ``config.json``; only one rank calls it.

    Raises:
        UserError: the disk is full or cannot be written to.
    """
    with writing(config.out):
        write_text(config.out / "config.json", config.to_json())


def _require_same(checkpoint: Checkpoint, config: TrainConfig, plan: ParallelPlan, place: Place) -> None:
    """Check that the run can continue from ``checkpoint``.

    Raises:
        UserError: it would be another run.
    """
    cure = f"start anew from its weights with --model {checkpoint.folder} and another --out"
    sequences = _sequences(config, plan)
    same_sequences = checkpoint.sequences == sequences
    if differences := config.differences(checkpoint.config, same_sequences):
        raise UserError(
            f"{checkpoint.folder} was trained with another {', '.join(differences)}: use the same, or {cure}"
        )
    if same_sequences:
        return
    # A sharded run may continue with the same options on more or fewer ranks, with other steps.
    if config.same_plan(checkpoint.config) and plan.saves_in_parts:
        return
    if checkpoint.sequences is not None:
        raise UserError(
            f"{checkpoint.folder} was written with {checkpoint.sequences} sequences in a step, this run has "
            f"{sequences}: choose --batch and --accumulation for as many, or {cure}"
        )
    if checkpoint.world_size != place.world_size:
        raise UserError(
            f"{checkpoint.folder} was written by {checkpoint.world_size} ranks, this job has "
            f"{place.world_size}: use as many, or {cure}"
        )


def _model(
    config: TrainConfig, plan: ParallelPlan, checkpoint: Checkpoint | None, device: torch.device
) -> tuple[Llama, Values | None]:
    """Build the model on the device.

    A model that no rank holds in full is built on the meta device, because it may not fit on one rank. The
    second result gives the values of a model on the meta device.
    """
    in_parts = plan.builds_in_parts
    source = str(checkpoint.folder) if checkpoint else config.model
    if checkpoint is not None and checkpoint.sharded:  # all ranks together read its values later
        if not in_parts:
            return Llama(read_config(checkpoint.folder), checkpointing=config.checkpointing).to(device), None
        model = Llama(read_config(checkpoint.folder), checkpointing=config.checkpointing, device="meta")
        # until the shards are read
        return model, lambda parameter: torch.zeros(parameter.shape, dtype=parameter.dtype)
    if "/" in source or Path(source).is_dir():
        # Trained weights are fp32, whatever dtype is stored, because bf16 would round a step away.
        return load_checkpoint(
            source, dtype=torch.float32, checkpointing=config.checkpointing, device=device
        ), None
    if in_parts:
        with deferred_init() as recipe:
            model = Llama(model_config(config.model), checkpointing=config.checkpointing)
        return model, recipe.value
    # drawn on CPU: the same on all devices
    return Llama(model_config(config.model), checkpointing=config.checkpointing).to(device), None


def _optimizer(
    config: TrainConfig, model: nn.Module, plan: ParallelPlan, mesh: ParallelMesh | None
) -> torch.optim.Optimizer:
    """Create the optimiser of the model that ``plan`` has distributed."""
    entry, step = optimizer_entry(config.optimizer), config.optimizer_step
    assert isinstance(step, OptimizerStep)
    matrices = [(name, parameter) for name, parameter in model.named_parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        *entry.groups(matrices, weight_decay=config.weight_decay),
        {"params": others, "weight_decay": 0.0},
    ]
    cls = entry.class_for(step, fused_kernels=config.kernels is Kernels.FUSED)
    with without_collector():  # the first optimiser of a process imports torch's compiler
        return make_optimizer(model, plan, mesh, groups, cls, **entry.arguments(step, lr=config.lr))
