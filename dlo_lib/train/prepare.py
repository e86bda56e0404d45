"""From a configuration to a run that is ready to step: data, model, optimiser, and all of it as a checkpoint left it when there is one.

Preparing does not communicate: every rank can fail alone, and all of them say so together. What cannot be trained is found before anything
is written: ``out`` is touched last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_lib.data import RankSampler, TokenDataset, open_dataset
from dlo_lib.errors import UserError
from dlo_lib.files import write_text
from dlo_lib.launch import Place
from dlo_lib.models import Llama, model_config
from dlo_lib.models.checkpoint import load_checkpoint, read_config
from dlo_lib.optim import Precision
from dlo_lib.parallel.deferred_init import deferred_init
from dlo_lib.parallel.forms import FORMS, Parallel, Sharded, Spread
from dlo_lib.parallel.grad_scaler import ShardedGradScaler
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.profiling.settings import OptimizerStep
from dlo_lib.train.checkpoint import Checkpoint, newest
from dlo_lib.train.config import TrainConfig
from dlo_lib.train.disk import writing
from dlo_lib.train.metrics import METRICS_FILE
from dlo_lib.train.state import TrainState, seed_everything

BETAS = (0.9, 0.95)
"""AdamW's, as the Llama papers have them."""

Values = Callable[[nn.Parameter], Tensor]


@dataclass(frozen=True)
class Prepared:
    """What the loop needs; ``checkpoint`` is what it goes on from, or None. ``values`` are those of a model without storage."""

    model: Llama
    values: Values | None
    sampler: RankSampler
    dataset: TokenDataset
    checkpoint: Checkpoint | None

    def spread(self, config: TrainConfig, place: Place, group: dist.ProcessGroup | None) -> TrainState:
        """The model spread over ``group``, and an optimiser for what this rank then holds; communicates.

        Raises:
            UserError: a form that these ranks cannot take, on every rank alike.
        """
        form = FORMS[config.parallel]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        spread = form.wrap(
            self.model,
            Spread(
                group,
                place.device,
                self.values,
                compute_dtype=config.precision.dtype if config.precision is not Precision.FP32 else None,
                shard_size=ranks_of_a_copy(config, place),
                schedule=config.schedule,
                micro_batches=config.accumulation,
                seq=config.seq,
            ),
        )
        scaler: torch.amp.GradScaler | None = None
        if config.precision is Precision.FP16:
            kind = place.device.type
            scaler = (
                ShardedGradScaler(kind, group) if form.sharded >= Sharded.GRADIENTS and group is not None else torch.amp.GradScaler(kind)
            )
        learns_with = spread.replicas if isinstance(spread, Pipeline) else group
        return TrainState(self.model, spread, parameters, _optimizer(config, spread), self.sampler, scaler, learns_with)


def ranks_of_a_copy(config: TrainConfig, place: Place) -> int:
    """How many consecutive ranks share one copy of the model where the form does not say it."""
    return config.shard_size or place.local_world_size


def prepare(config: TrainConfig, place: Place) -> Prepared:
    """Everything a rank needs, on its device; the model is not yet spread.

    Raises:
        UserError: something that cannot be trained, or resumed, with the cure.
    """
    if config.parallel is Parallel.NONE and place.world_size > 1:
        raise UserError(f"parallel none trains on one rank, this job has {place.world_size}: use --parallel ddp, or start one rank")
    checkpoint = _resumed(config, place) if config.resume else None
    seed_everything(config.seed)  # the same weights on every rank, and the same as on one
    model, values = _model(config, checkpoint, place.device)
    dataset = open_dataset(config.data, config.seq)
    if dataset.vocab_size > model.config.vocab_size:
        raise UserError(
            f"data {config.data} has {dataset.vocab_size:,} different tokens, model {config.model} knows {model.config.vocab_size:,}: "
            "choose another --model"
        )
    if config.seq > model.config.max_positions:
        raise UserError(f"seq is {config.seq}: {config.model} has {model.config.max_positions} positions; use at most that")
    together = ranks_of_a_copy(config, place) if config.parallel is Parallel.PP else 1  # ranks of a pipeline read the same data
    sampler = RankSampler(len(dataset), config.batch, place.rank // together, place.world_size // together, seed=config.seed)
    seed_everything(config.seed + 1 + place.rank)  # what is drawn from here on is each rank's own
    return Prepared(model, values, sampler, dataset, checkpoint)


def open_out(config: TrainConfig, resumed: bool) -> None:
    """Make the folder of the run; the work of one rank.

    Raises:
        UserError: another run's, or cannot be written to.
    """
    if not resumed and (config.out / METRICS_FILE).exists() and not config.resume:
        raise UserError(f"{config.out} holds a run already: go on with --resume, or choose another --out")
    with writing(config.out):
        write_text(config.out / "config.json", config.to_json())


def _resumed(config: TrainConfig, place: Place) -> Checkpoint | None:
    checkpoint = newest(config.out)
    if checkpoint is None:
        return None
    cure = f"start anew from its weights with --model {checkpoint.folder} and another --out"
    if checkpoint.world_size != place.world_size and FORMS[config.parallel].sharded is Sharded.NOTHING:
        raise UserError(
            f"{checkpoint.folder} was written by {checkpoint.world_size} ranks, this job has {place.world_size}: use as many, or {cure}"
        )
    if differences := config.differences(checkpoint.config):
        raise UserError(f"{checkpoint.folder} was trained with another {', '.join(differences)}: use the same, or {cure}")
    return checkpoint


def _model(config: TrainConfig, checkpoint: Checkpoint | None, device: torch.device) -> tuple[Llama, Values | None]:
    """The model on the device; one that will be sharded has no storage, for it may fit on no rank, and its values are given apart."""
    sharded = FORMS[config.parallel].sharded
    in_parts = sharded is Sharded.PARAMETERS
    source = str(checkpoint.folder) if checkpoint else config.model
    if checkpoint is not None and sharded is not Sharded.NOTHING:  # its values are read later, by all ranks together
        if not in_parts:
            return Llama(read_config(checkpoint.folder), checkpointing=config.checkpointing).to(device), None
        model = Llama(read_config(checkpoint.folder), checkpointing=config.checkpointing, device="meta")
        return model, lambda parameter: torch.zeros(parameter.shape, dtype=parameter.dtype)  # until the shards are read
    if "/" in source or Path(source).is_dir():
        # Weights that are trained are fp32, whatever is stored: a step in bf16 would be lost in their rounding.
        return load_checkpoint(source, dtype=torch.float32, checkpointing=config.checkpointing, device=device), None
    if in_parts:
        with deferred_init() as recipe:
            model = Llama(model_config(config.model), checkpointing=config.checkpointing)
        return model, recipe.value
    return Llama(model_config(config.model), checkpointing=config.checkpointing).to(device), None  # drawn on CPU: the same everywhere


def _optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """For the model as its form has spread it."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    how = config.optimizer_step
    fused, foreach = how is OptimizerStep.FUSED, how is OptimizerStep.FOREACH
    make = FORMS[config.parallel].optimizer
    return make(model, groups, torch.optim.AdamW, lr=config.lr, betas=BETAS, fused=fused, foreach=foreach)
