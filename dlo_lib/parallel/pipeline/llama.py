"""Builds the pipeline of this rank from a Llama and a schedule. With a model on the meta device, no rank
holds the whole model.

The parameters of a stage have the same names as in the whole model, so that checkpoints need no conversion.
If the embeddings are tied and the first and the last stage are on different ranks, both ranks have a copy of
the table, and the gradients of both copies are summed (``tied_embeddings``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import Llama, rotation
from dlo_lib.parallel.materialize import Values, materialize
from dlo_lib.parallel.pipeline.partition import counted_costs, partition
from dlo_lib.parallel.pipeline.runtime import Pipeline
from dlo_lib.parallel.pipeline.table import Schedule
from dlo_lib.parallel.pipeline.tied_embeddings import TiedEmbeddings
from dlo_lib.parallel.protocol import ParallelModel


class LlamaStage(nn.Module):
    """Successive pieces of a Llama.

    The input is tokens (batch, seq) int64 or hidden states (batch, seq, hidden); the output is hidden states
    (batch, seq, hidden) or logits (batch, seq, vocab_size).

    Args:
        model: the model whose modules the stage shares. It may be on the meta device.
        pieces: the numbers of the pieces: 0 is the embedding, 1 ... num_layers are the blocks, and num_layers
            + 1 is the last norm with the output projection.
        sequence_parts: the number of parts of a sequence, if hidden states are one part (sequence
            parallelism). Attention rotates the whole sequence.

    Raises:
        UserError: the model does not have these pieces.
    """

    def __init__(self, model: Llama, pieces: range, sequence_parts: int = 1) -> None:
        super().__init__()
        last = model.config.num_layers + 1
        if not pieces or pieces.start < 0 or pieces.stop > last + 1:
            raise UserError(f"pieces {pieces.start} ... {pieces.stop - 1} of a Llama that has 0 ... {last}")
        self.config, self.checkpointing = model.config, model.checkpointing
        self.sequence_parts = sequence_parts
        if 0 in pieces:
            self.embed_tokens = model.embed_tokens
        # The keys are the numbers of the blocks in the whole model, so that the parameters keep their names.
        self.layers = nn.ModuleDict(
            {str(piece - 1): model.layers[piece - 1] for piece in pieces if 1 <= piece < last}
        )
        if last in pieces:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        seq = x.shape[1] * self.sequence_parts
        if hasattr(self, "embed_tokens"):
            seq = x.shape[1]
            x = self.embed_tokens(x)  # (batch, seq, hidden)
        cos, sin = rotation(self.config, seq, x)
        for block in self.layers.values():
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.lm_head(self.norm(x)) if hasattr(self, "lm_head") else x


def tied_embedding_ranks(config_is_tied: bool, placement: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the ranks of the first and the last stage if each needs a copy of a tied embedding table, else
    None."""
    first, last = placement[0], placement[-1]
    return (first, last) if config_is_tied and first != last else None


def build_pipeline(
    model: Llama,
    schedule: Schedule,
    seq: int,
    group: dist.ProcessGroup | None = None,
    *,
    wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    wrap_shards: bool = False,
    values: Values | None = None,
    device: torch.device | None = None,
    sequence_parts: int = 1,
) -> Pipeline:
    """Build this rank's part of ``model`` as a pipeline over ``group``; called by every rank of the group.

    Args:
        model: the whole model, equal on every rank. The parts of other ranks are not kept.
        schedule: the table to execute.
        seq: the number of tokens in a sequence, for the balance of the stages.
        group: the ranks of the pipeline; None for all ranks.
        wrap: wraps a stage for data parallelism over the ranks that hold the same stage.
        wrap_shards: whether ``wrap`` sets the values of the parameters shard by shard. No rank then holds a
            whole stage.
        values: returns the value of a parameter, for a model on the meta device; None for the values of the
            model.
        device: the device of the stages; None for the current device.
        sequence_parts: as in ``LlamaStage``.

    Raises:
        UserError: the model has fewer pieces than stages, or ``Pipeline`` refuses the stages.
    """
    rank = dist.get_rank(group)
    cuts = partition(counted_costs(model.config, seq), schedule.stages)
    stages: dict[int, nn.Module] = {
        stage: LlamaStage(model, cuts[stage], sequence_parts) for stage in schedule.stages_of(rank)
    }
    if not wrap_shards:
        materialize(stages.values(), values, device)
    stages = {number: wrap(stage) for number, stage in stages.items()}
    tied = None
    ends = tied_embedding_ranks(model.config.tied_embeddings, schedule.placement)
    if ends is not None:
        tied = TiedEmbeddings(_embedding_table(stages, schedule, rank, ends), ends, group)
    return Pipeline(stages, schedule, group, tied=tied)


def _embedding_table(
    stages: dict[int, nn.Module],
    schedule: Schedule,
    rank: int,
    ends: tuple[int, int],
) -> nn.Parameter | None:
    """Return this rank's copy of the embedding table, whole or as a shard; None if the rank is not an end."""
    if rank not in ends:
        return None
    first = rank == ends[0]
    stage = stages[0 if first else schedule.stages - 1]
    name = "embed_tokens.weight" if first else "lm_head.weight"
    plain = stage.unwrapped()[0] if isinstance(stage, ParallelModel) else stage
    return plain.get_parameter(name)
