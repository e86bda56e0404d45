"""The choice of the next token: greedy, or drawn with temperature, top-k and top-p.

    p = softmax(logits / temperature), cut to the k most probable tokens and to the smallest set of most
    probable tokens with a sum of at least top_p, and divided by its sum

Draw number n of a request depends on its seed and n only. The tokens of a request are therefore the same in
each batch, after each pre-emption, and alone. Cost: a sort of the vocabulary for each token.

Paper: A. Holtzman et al., The Curious Case of Neural Text Degeneration (arXiv:1904.09751), top-p.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count


@dataclass(frozen=True)
class SamplingParams:
    """How a request is continued.

    Args:
        temperature: 0 takes the most probable token.
        top_k: draws from the k most probable tokens; None from all.
        top_p: draws from the smallest set of most probable tokens with at least this probability.
        max_tokens: tokens at most.
        stop: tokens that end the continuation, such as the end-of-text token; the result contains it.
        seed: of the draws.

    Raises:
        UserError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    max_tokens: int = 16
    stop: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("max_tokens", self.max_tokens)
        if self.top_k is not None:
            require_count("top_k", self.top_k)
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature is {self.temperature}: use 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: use a number above 0 and at most 1")


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution of the next token in float64, (..., vocab_size) as ``logits``.

    Greedy gives probability 1 to the first of the largest logits."""
    wide = logits.double()
    if params.temperature == 0:
        return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(wide / params.temperature, -1)
    if params.top_k is None and params.top_p == 1:
        return p
    # Stable, so that among equal tokens the first ones stay on every machine.
    ordered, tokens = torch.sort(p, stable=True, dim=-1, descending=True)
    if params.top_k is not None:
        ordered[..., params.top_k :] = 0
    ordered = ordered / ordered.sum(-1, keepdim=True)
    if params.top_p < 1:
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= params.top_p, 0)
        ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter_(-1, tokens, ordered)


def uniform(seed: int, *index: int | str) -> float:
    """Return a number in [0, 1) that depends on the seed and the index only, with 53 random bits."""
    digest = hashlib.sha256(repr((seed, *index)).encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def draw(p: Tensor, u: float) -> int:
    """Return the token at which the sum of the probabilities p (vocab_size,) first exceeds u · sum(p)."""
    total = p.double().cumsum(-1)
    token = int(torch.searchsorted(total, u * total[-1], right=True))
    # Rounding can lead beyond the last token that has a probability.
    return min(token, int(p.nonzero()[-1]))


def next_token(logits: Tensor, params: SamplingParams, number: int) -> int:
    """Return token ``number`` (from 0) of a continuation, from the logits (vocab_size,)."""
    if params.temperature == 0:
        return int(logits.argmax())
    return draw(probabilities(logits, params), uniform(params.seed, number))


def is_complete(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Return whether a continuation has ended: by a stop token, or by its number of tokens."""
    return len(tokens) >= params.max_tokens or (len(tokens) > 0 and tokens[-1] in params.stop)
