"""An embedding whose table is cut by rows over the ranks: a rank looks up the tokens of its rows and gives 0
for the others, and the sum over the ranks is the whole result.

    y = sum over r of (table_r[token - first_r] if the token is in the rows of rank r, else 0)

The rows are ceil(vocab / t) on each rank and fewer on the last one, so the vocabulary may have any size.
Communication: one all-reduce of batch * seq * hidden elements in forward, nothing in backward; with sequence
parallelism a reduce-scatter in forward and an all-gather in backward.

Paper: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.parallel.tensor.exchange import TensorGroup
from dlo_lib.parallel.tensor.functions import reduce_from_group, scatter_sequence


class VocabParallelEmbedding(nn.Embedding):
    """Maps tokens (batch, seq) int64, equal on all ranks, to vectors (batch, seq, hidden).

    Args:
        weight: (rows, hidden), the rows of this rank.
        first: the token of the first row.
        group: the ranks.
        sequence_parallel: whether the result is this rank's part of the sequence, (batch, seq / t, hidden).
        padding_idx: as in ``nn.Embedding``, a token of the whole vocabulary.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        first: int,
        group: TensorGroup,
        *,
        sequence_parallel: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        rows, hidden = weight.shape
        padding = None if padding_idx is None else padding_idx - first
        in_rows = padding is not None and 0 <= padding < rows
        super().__init__(rows, hidden, padding if in_rows else None, _weight=weight.detach())
        self.weight = weight
        self.first, self.group, self.sequence_parallel = first, group, sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        if self.group.ranks == 1:
            return super().forward(tokens)
        local = tokens - self.first
        outside = (local < 0) | (local >= self.num_embeddings)
        vectors = F.embedding(local.masked_fill_(outside, 0), self.weight, self.padding_idx)
        vectors = vectors.masked_fill_(outside.unsqueeze(-1), 0)  # (batch, seq, hidden)
        if self.sequence_parallel:
            return scatter_sequence(vectors, self.group)
        return reduce_from_group(vectors, self.group)
