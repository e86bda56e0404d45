"""The references of the checks: one process with the whole sequence, and an explicit softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.functional import vjp

from dlo_lib.grading.checks.twins import twin
from dlo_lib.models.llama import Llama, LlamaConfig

Block = tuple[Tensor, Tensor]
"""The output of attention to some keys, and the log-sum-exp of their scores."""


def scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """The scores (batch, heads, queries, keys); those that the mask hides are -inf."""
    return torch.einsum("bhqd,bhkd->bhqk", q, k).div(q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)


@twin
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Block:
    """Attention to the keys that the mask (queries, keys) shows; a row without a key is 0, with -inf."""
    found = scores(q, k, mask)
    return found.softmax(-1).nan_to_num() @ v, found.logsumexp(-1)


@twin
def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
    """The gradients of q, k and v, by autograd; each query sees a key."""
    return list(vjp(lambda q, k, v: scores(q, k, mask).softmax(-1) @ v, (q, k, v), grad)[1])


def block_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor
) -> list[Tensor]:
    """What a block contributes to dq, dk and dv, with ``out`` and ``lse`` of the whole rows; by autograd."""
    inner = torch.einsum("bhqd,bhkd->bhqk", grad, v) - (grad * out).sum(-1, keepdim=True)

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shares = (scores(q, k, torch.ones_like(mask)) - lse.unsqueeze(-1)).exp() * mask
        return (shares * inner).sum() + ((shares.detach() @ v) * grad).sum()

    return list(vjp(total, (q, k, v))[1])


def causal(positions: Tensor, others: Tensor) -> Tensor:
    """The mask of queries at ``positions`` and keys at ``others``."""
    return positions[:, None] >= others


def own(tensor: Tensor, positions: Tensor) -> Tensor:
    """The tokens at ``positions`` of (batch, heads, seq, ...)."""
    return tensor.index_select(2, positions)


def rectangle(queries: Tensor, keys: Tensor) -> list[int] | None:
    """The first query and the end of the keys of the smallest rectangle, from the whole mask."""
    pairs = causal(queries, keys).nonzero()
    return [int(pairs[:, 0].min()), int(pairs[:, 1].max()) + 1] if len(pairs) else None


def mask_mistakes(positions: Tensor, rank: int) -> dict[str, Tensor]:
    """What a rank's queries see of the whole sequence, by mistake."""
    world, row, seq = len(positions), positions[rank], positions.numel()
    unmasked, of_own, of_wrong = (torch.zeros(len(row), seq, dtype=torch.bool) for _ in range(3))
    for owner, keys in enumerate(positions):
        of_wrong[:, keys] = causal(row, positions[(2 * rank - owner) % world])
        if part := rectangle(row, keys):
            first, last = part
            unmasked[first:, keys[:last]] = True
            of_own[first:, keys[:last]] = causal(row, row)[first:, :last]
    return {
        "rank {rank} uses the mask of its block for all blocks: compare with the positions of the owner of "
        "the block": of_own,
        "rank {rank} takes a block for that of another rank: blocks come from the previous rank, so in step "
        "i the owner is (rank - i) % world": of_wrong,
        "the queries of rank {rank} see later keys of a block: inside the rectangle of visible the causal "
        "mask is needed as well": unmasked,
        "the queries of rank {rank} see later keys: the mask compares the positions of the owner of the "
        "block": torch.ones_like(unmasked),
    }


def wrong_blocks(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rank: int) -> dict[str, Tensor]:
    """The output of a rank that takes block after block at the right time, but another block than it
    believes.

    q, k and v (batch, heads, seq, d) are those of the whole sequence.
    """
    world, row = len(positions), positions[rank]
    early = (
        "rank {rank} is one block too far: it waits for the next block before it computes. Compute with the "
        "block that is here, then wait"
    )
    own_block = "rank {rank} computes with its own block in every step: the next block is what wait() returns"
    taken = {
        early: [(rank - min(step + 1, world - 1)) % world for step in range(world)],
        early + ".": [(rank - step - 1) % world for step in range(world)],
        own_block: [rank] * world,
    }
    believed = torch.cat([causal(row, positions[(rank - step) % world]) for step in range(world)], 1)
    keys = {message: positions[owners].flatten() for message, owners in taken.items()}
    return {
        message: attention(own(q, row), own(k, at), own(v, at), believed)[0] for message, at in keys.items()
    }


@twin
def context_loss(logits: Tensor, targets: Tensor) -> Block:
    """The mean loss of the tokens with a target, and the gradient of the logits (batch, seq, vocabulary)."""
    return vjp(lambda whole: F.cross_entropy(whole.flatten(0, 1), targets.flatten()), logits)


@twin
def llama_step(
    sizes: Mapping[str, Any], state: Mapping[str, Tensor], tokens: Tensor, padding: int
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """The loss of one process for tokens (batch, seq + 1), the logits, and the gradients by name."""
    model = Llama(LlamaConfig(**sizes), dtype=torch.float64)
    model.load_state_dict(state)
    targets, logits = tokens[:, 1:], model(tokens[:, :-1])
    valid = targets != padding
    loss = F.cross_entropy(logits[valid], targets[valid])
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(loss.detach()), logits.detach(), grads
