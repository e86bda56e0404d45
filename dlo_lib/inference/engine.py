"""The engine: a scheduler, a paged cache and a model generate the continuations of many requests.

An iteration computes the tokens of all its sequences in one forward: the linear layers treat them together,
the attention treats each sequence alone (the selective batching of Orca). The continuations are those of the
plain loop in every schedule, up to the rounding of the matrix products.

    engine = Engine(model, blocks=64, block_size=16, token_budget=128)
    completions = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=20))

Papers: G. Yu et al., Orca (OSDI 2022); W. Kwon et al., PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.inference.blocks import BlockPool
from dlo_lib.inference.cache import require_positions
from dlo_lib.inference.paged import PagedCache, forward_paged
from dlo_lib.inference.sampling import SamplingParams, next_token
from dlo_lib.inference.scheduler import Batching, BatchPart, BatchScheduler, GenerationRequest
from dlo_lib.models.llama import Llama


@dataclass(frozen=True)
class Completion:
    """The continuation of a request: its tokens, and whether a stop token ended it (``stopped``)."""

    number: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    stopped: bool
    preemptions: int = 0


@dataclass(frozen=True)
class Iteration:
    """What an iteration did.

    Args:
        computed: the number of tokens that went through the model.
        past: for all sequences together, the stored tokens that attention read.
        tokens: the new token of each request that has one, by its number.
        completed: the requests that are now complete.
    """

    computed: int
    past: int
    tokens: dict[int, int]
    completed: tuple[Completion, ...]


class Engine:
    """Generates text with continuous batching and a paged cache.

    Args:
        model: the model; it is not changed.
        blocks: blocks of the cache.
        block_size: tokens of a block.
        token_budget: tokens of an iteration at most; None computes each prompt in one iteration.
        max_running: sequences that run at the same time at most.
        watermark: blocks that an admission leaves free.
        batching: continuous or static.
        share_prefixes: whether requests share the full blocks of equal prefixes.

    Raises:
        UserError: a size is not a whole number in its range.
    """

    def __init__(
        self,
        model: Llama,
        blocks: int = 256,
        block_size: int = 16,
        token_budget: int | None = None,
        max_running: int = 256,
        watermark: int = 0,
        batching: Batching = Batching.CONTINUOUS,
        share_prefixes: bool = True,
    ) -> None:
        weight = model.embed_tokens.weight
        self.model = model
        self.pool = BlockPool(blocks, block_size, watermark)
        self.cache = PagedCache(model.config, self.pool, weight.dtype, weight.device)
        self.scheduler = BatchScheduler(self.pool, token_budget, max_running, batching, share_prefixes)
        self._next_number = 0

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt, tokens from 0 to vocab_size − 1, and return the number of the request.

        Raises:
            UserError: the prompt is empty or has an unknown token, or the request can never fit into the
                positions of the model or the blocks of the cache.
        """
        require_prompt(self.model, prompt)
        require_positions(self.model.config, len(prompt) + params.max_tokens - 1)
        request = GenerationRequest(self._next_number, [int(token) for token in prompt], params)
        self.scheduler.add(request)
        self._next_number += 1
        return request.number

    def step(self) -> Iteration:
        """Run one iteration."""
        parts = self.scheduler.schedule()
        if not parts:
            return Iteration(0, 0, {}, ())
        for part in parts:
            self.cache.copy(part.copies)
        spans = [(part.request.tokens[part.start :][: part.count], part.request.table) for part in parts]
        logits = forward_paged(self.model, self.cache, spans)
        tokens = {
            part.request.number: next_token(row, part.request.params, len(part.request.output))
            for part, row in zip(parts, logits, strict=True)
            if part.last
        }
        complete = self.scheduler.update(parts, tokens)
        return iteration_of(parts, tokens, complete)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Return the continuations of prompts, in their order; ``params`` is for all or one for each.

        Raises:
            UserError: a request is refused, or the numbers of prompts and parameters differ. No request is
                then queued.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts and {len(each)} parameters: give one for each prompt")
        numbers: list[int] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                numbers.append(self.add_request(prompt, own))
        except UserError:
            for _ in numbers:
                self.scheduler.waiting.pop()
            raise
        done: dict[int, Completion] = {}
        while not all(number in done for number in numbers):
            done.update((completion.number, completion) for completion in self.step().completed)
        return [done[number] for number in numbers]


def iteration_of(
    parts: Sequence[BatchPart], tokens: dict[int, int], complete: Sequence[GenerationRequest]
) -> Iteration:
    """Return what an iteration with these parts, new tokens and complete requests did."""
    return Iteration(
        sum(part.count for part in parts),
        sum(part.start + part.count for part in parts),
        tokens,
        tuple(completion_of(request) for request in complete),
    )


def completion_of(request: GenerationRequest) -> Completion:
    """Return the result of a complete request."""
    stopped = bool(request.output) and request.output[-1] in request.params.stop
    tokens = tuple(request.output)
    return Completion(request.number, tuple(request.prompt), tokens, stopped, request.preemptions)


def require_prompt(model: Llama, prompt: Sequence[int]) -> None:
    """Check that a prompt has tokens, all of the model's vocabulary.

    Raises:
        UserError: it has not.
    """
    size = model.config.vocab_size
    if len(prompt) == 0:
        raise UserError("the prompt is empty: give at least one token, such as the end-of-text token")
    if wrong := [token for token in prompt if not 0 <= token < size]:
        raise UserError(f"token {wrong[0]} is not in the vocabulary: use tokens from 0 to {size - 1}")


@torch.no_grad()
def generate_plain(model: Llama, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the continuation of one prompt without a cache: the twin of all other forms.

    Token n costs a forward over all n tokens before it.

    Raises:
        UserError: the prompt is empty or has an unknown token, or the model has too few positions.
    """
    require_prompt(model, prompt)
    require_positions(model.config, len(prompt) + params.max_tokens - 1)
    request = GenerationRequest(0, [int(token) for token in prompt], params)
    device = model.embed_tokens.weight.device
    while not request.complete:
        logits = model(torch.tensor([request.tokens], device=device))[0, -1]
        request.output.append(next_token(logits, params, len(request.output)))
    return request.output
