"""A Llama's pieces and the stages made of them: what a rank of a pipeline holds in place of the model.

A stage keeps the names that its parameters have in the whole model, so that checkpoints and comparisons need no translation. Where
embeddings are tied and the two ends lie on different ranks, each has a copy of the table and the gradients of both are added (``tied``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_lib.errors import UserError
from dlo_lib.models.llama import Llama, rotation


class LlamaStage(nn.Module):
    """Some successive pieces of a Llama: tokens (batch, seq) int64 or hidden states (batch, seq, hidden) to hidden states or logits.

    Args:
        model: what the pieces are taken from; modules are shared with it, not copied. May be on ``meta``.
        pieces: 0 is the embedding, 1 ... num_layers are the blocks, num_layers + 1 is the last norm with the head.

    Raises:
        UserError: pieces that the model does not have.
    """

    def __init__(self, model: Llama, pieces: range) -> None:
        super().__init__()
        last = model.config.num_layers + 1
        if not pieces or pieces.start < 0 or pieces.stop > last + 1:
            raise UserError(f"pieces {pieces.start} ... {pieces.stop - 1} of a Llama that has 0 ... {last}")
        self.config, self.checkpointing = model.config, model.checkpointing
        if 0 in pieces:
            self.embed_tokens = model.embed_tokens
        # A dictionary by the block's number in the whole model: the parameters' names are then the whole model's.
        self.layers = nn.ModuleDict({str(piece - 1): model.layers[piece - 1] for piece in pieces if 1 <= piece < last})
        if last in pieces:
            self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embed_tokens"):
            x = self.embed_tokens(x)  # (batch, seq, hidden)
        cos, sin = rotation(self.config, x.shape[1], x)
        for block in self.layers.values():
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return self.lm_head(self.norm(x)) if hasattr(self, "lm_head") else x


def tied_ends(config_is_tied: bool, placement: tuple[int, ...]) -> tuple[int, int] | None:
    """The ranks with the first and the last stage, where both hold a copy of a tied embedding table; else None."""
    first, last = placement[0], placement[-1]
    return (first, last) if config_is_tied and first != last else None
