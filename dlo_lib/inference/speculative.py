"""Speculative decoding: a small draft model proposes γ tokens, and one forward of the target judges them.

Proposal x, drawn from the draft's distribution q, is accepted with probability min(1, p(x) / q(x)), where p
is the target's distribution. At the first rejection a token is drawn from the residual

    max(0, p − q) / Σ max(0, p − q)

and the rest is dropped. If all γ are accepted, the target's forward gives one more token, the bonus. The
tokens are then distributed as those of the target alone. If each proposal is accepted with probability α
independently, a target's forward yields (1 − α^(γ+1)) / (1 − α) tokens on average. The cost is γ forwards of
the draft for each forward of the target, over γ + 1 positions.

Papers: Y. Leviathan et al. (arXiv:2211.17192); C. Chen et al. (arXiv:2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.inference.cache import KVCache, forward_cached, require_positions
from dlo_lib.inference.engine import require_prompt
from dlo_lib.inference.sampling import SamplingParams, draw, is_complete, probabilities, uniform
from dlo_lib.models.llama import Llama


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the mean number of tokens of a target's forward, with γ proposals that are each accepted with
    probability ``acceptance``.

    >>> expected_tokens(0.5, 3)
    1.875
    """
    return float(sum(acceptance**accepted for accepted in range(gamma + 1)))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return the distribution of the token after a rejection, (vocab_size,); p if p equals q."""
    excess = (p - q).clamp(min=0)
    total = excess.sum()
    return excess / total if total > 0 else p


def judge(
    p: Tensor, q: Tensor, proposed: Sequence[int], uniforms: Sequence[float], last: float
) -> tuple[list[int], int]:
    """Accept or reject proposals, and draw the token that follows them.

    Args:
        p: (γ + 1, vocab_size), the target's distributions at the proposals and after them.
        q: (γ, vocab_size), the draft's distributions, from which the proposals were drawn.
        proposed: the γ proposals.
        uniforms: for each proposal a number in [0, 1).
        last: the number in [0, 1) of the residual or bonus token.

    Returns:
        the tokens, 1 to γ + 1, and the number of accepted proposals.
    """
    for place, (token, u) in enumerate(zip(proposed, uniforms, strict=True)):
        # u < p / q without the division
        if u * float(q[place, token]) >= float(p[place, token]):
            return [*proposed[:place], draw(residual(p[place], q[place]), last)], place
    return [*proposed, draw(p[len(proposed)], last)], len(proposed)


@dataclass(frozen=True)
class Speculated:
    """A continuation, and what it cost.

    Args:
        tokens: the continuation.
        target_calls: forwards of the target, that of the prompt included.
        draft_calls: forwards of the draft.
        proposed: proposals that the target judged.
        accepted: proposals that it accepted.
    """

    tokens: tuple[int, ...]
    target_calls: int
    draft_calls: int
    proposed: int
    accepted: int


class _Side:
    """A model with the cache of one sequence."""

    def __init__(self, model: Llama, capacity: int) -> None:
        weight = model.embed_tokens.weight
        self.model, self.calls, self.device = model, 0, weight.device
        self.cache = KVCache(model.config, 1, capacity, weight.dtype, weight.device)

    def extend(self, tokens: Sequence[int], params: SamplingParams) -> Tensor:
        """Compute the tokens that are not stored; return the distribution after each of them."""
        self.calls += 1
        new = torch.tensor(tokens[self.cache.lengths[0] :], device=self.device)
        return probabilities(forward_cached(self.model, [new], self.cache)[0], params)

    def keep(self, length: int) -> None:
        """Cut the cache back to the tokens that are right."""
        self.cache.cut(0, min(length, self.cache.lengths[0]))


def generate_speculative(
    target: Llama, draft: Llama, prompt: Sequence[int], params: SamplingParams, gamma: int
) -> Speculated:
    """Return the continuation of one prompt by the target, with the help of the draft.

    Its distribution is the target's; with temperature 0 its tokens are the target's greedy ones.

    Args:
        target, draft: models with the same vocabulary.
        prompt: at least one token.
        params: temperature, top-k and top-p apply to both models.
        gamma: proposals for each forward of the target.

    Raises:
        UserError: the vocabularies differ, the prompt is empty or has an unknown token, or a model has too
            few positions.
    """
    require_count("gamma", gamma)
    if target.config.vocab_size != draft.config.vocab_size:
        raise UserError(
            f"the target has {target.config.vocab_size} tokens and the draft {draft.config.vocab_size}: "
            "use models with the same vocabulary"
        )
    require_prompt(target, prompt)
    capacity = len(prompt) + params.max_tokens - 1
    for model in (target, draft):
        require_positions(model.config, capacity)
    judging, proposing = _Side(target, capacity), _Side(draft, capacity)
    tokens, output = [int(token) for token in prompt], list[int]()
    turn = proposals = accepted_in_all = 0
    while not is_complete(output, params):
        # The bonus token needs no proposal, so that no computed token is beyond max_tokens.
        count = min(gamma, params.max_tokens - len(output) - 1)
        proposed, q = list[int](), list[Tensor]()
        for place in range(count):
            q.append(proposing.extend(tokens + proposed, params)[-1])
            proposed.append(draw(q[-1], uniform(params.seed, turn, "draft", place)))
        p = judging.extend(tokens + proposed, params)[-count - 1 :]
        uniforms = [uniform(params.seed, turn, "accept", place) for place in range(count)]
        last = uniform(params.seed, turn, "last")
        q_all = torch.stack(q) if q else p[:0]
        new, accepted = judge(p, q_all, proposed, uniforms, last)
        judging.keep(len(tokens) + accepted)
        proposing.keep(len(tokens) + accepted)
        for token in new:
            tokens.append(token)
            output.append(token)
            if is_complete(output, params):
                break
        turn, proposals, accepted_in_all = turn + 1, proposals + count, accepted_in_all + accepted
    return Speculated(tuple(output), judging.calls, proposing.calls, proposals, accepted_in_all)
