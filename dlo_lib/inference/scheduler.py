"""Continuous batching: the sequences of a step are chosen anew before each iteration.

A static batch waits until its longest sequence is complete. Here a complete sequence leaves after its last
iteration, and a waiting one takes its place in the next (Orca). ``BatchScheduler.schedule`` chooses the
tokens of an iteration in this order:

1. each running sequence that decodes: one token;
2. each running sequence whose prompt is not complete: the tokens that are left of the budget;
3. waiting sequences, first come first served, if the blocks of all their tokens are free.

With a token budget, a long prompt is computed in chunks beside the decodes (Sarathi), so that the time
between two tokens stays bounded; without one, a prompt is computed in one iteration. If a decoding sequence
needs a block and none is free, the sequence that was admitted last is pre-empted: it loses its blocks and
later computes its tokens again. The oldest sequence is never pre-empted for a younger one, so all complete.

Papers: G. Yu et al., Orca (OSDI 2022); A. Agrawal et al., Sarathi-Serve (arXiv:2403.02310); W. Kwon et al.,
PagedAttention (arXiv:2309.06180), pre-emption by recomputation.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlo_lib.base.errors import UserError, require_count
from dlo_lib.inference.blocks import BlockPool, BlockTable
from dlo_lib.inference.sampling import SamplingParams, is_complete


class Batching(enum.Enum):
    """When waiting sequences are admitted: before each iteration, or when the whole batch is complete.

    The complete rows of a static batch compute nothing here, as if their padding cost no time.
    """

    CONTINUOUS = "continuous"
    STATIC = "static"


@dataclass(eq=False)
class GenerationRequest:
    """One sequence: its prompt, its continuation so far, and its blocks.

    ``table.length`` counts the tokens whose keys and values are stored; ``preemptions`` counts how often
    the request lost its blocks.
    """

    number: int
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    preemptions: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and continuation."""
        return self.prompt + self.output

    @property
    def left(self) -> int:
        """Tokens to compute before the next token is known; 1 while the sequence decodes."""
        return len(self.prompt) + len(self.output) - self.table.length

    @property
    def complete(self) -> bool:
        """Whether the continuation has ended."""
        return is_complete(self.output, self.params)


@dataclass(frozen=True)
class BatchPart:
    """What one sequence computes in an iteration: ``count`` tokens from position ``start`` on.

    ``copies`` are the blocks to copy before. ``last`` says whether the next token is then known.
    """

    request: GenerationRequest
    start: int
    count: int
    last: bool
    copies: tuple[tuple[int, int], ...] = ()


class BatchScheduler:
    """Chooses the tokens of each iteration; computes nothing itself.

    Args:
        pool: the blocks.
        token_budget: tokens of an iteration at most; None computes each prompt in one iteration.
        max_running: sequences that run at the same time at most.
        batching: whether sequences are admitted continuously or in static batches.
        share_prefixes: whether a request takes known full blocks of its prompt from the pool.

    Raises:
        UserError: a size is not a positive whole number.
    """

    def __init__(
        self,
        pool: BlockPool,
        token_budget: int | None = None,
        max_running: int = 256,
        batching: Batching = Batching.CONTINUOUS,
        share_prefixes: bool = True,
    ) -> None:
        require_count("max_running", max_running)
        if token_budget is not None:
            require_count("token_budget", token_budget)
        self.pool, self.token_budget, self.max_running = pool, token_budget, max_running
        self.batching, self.share_prefixes = batching, share_prefixes
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: GenerationRequest) -> None:
        """Append a request to those that wait.

        Raises:
            UserError: its prompt is empty, or it needs more blocks than the pool has.
        """
        if not request.prompt:
            raise UserError("the prompt is empty: give at least one token, such as the end-of-text token")
        # The last token is returned and never computed.
        needed = self.pool.blocks_for(len(request.prompt) + request.params.max_tokens - 1)
        if needed > self.pool.num_blocks:
            raise UserError(
                f"the request needs {needed} blocks of {self.pool.block_size} tokens and the pool has "
                f"{self.pool.num_blocks}: shorten the prompt, lower max_tokens or use more blocks"
            )
        self.waiting.append(request)

    def schedule(self) -> list[BatchPart]:
        """Return the parts of the next iteration, whose slots are reserved; empty if there is no work."""
        budget = self.token_budget if self.token_budget is not None else 2**62
        parts: list[BatchPart] = []
        for request in [r for r in self.running if r.left == 1]:
            if budget == 0:
                break
            # A request that was pre-empted for an earlier one is no longer running.
            if request in self.running and self._make_room(request):
                parts.append(self._part(request, 1))
                budget -= 1
        begun = [r for r in self.running if r.left > 1]
        for request in begun:
            if budget == 0:
                return parts
            parts.append(self._part(request, min(budget, request.left)))
            budget -= parts[-1].count
        if self.batching is Batching.STATIC and self.running:
            return parts
        while budget and self.waiting and len(self.running) < self.max_running and self._admit():
            request = self.running[-1]
            parts.append(self._part(request, min(budget, request.left)))
            budget -= parts[-1].count
        return parts

    def update(self, parts: Sequence[BatchPart], tokens: Mapping[int, int]) -> list[GenerationRequest]:
        """Note what an iteration computed, and return the requests that are now complete.

        Args:
            parts: those that ``schedule`` returned.
            tokens: the next token of each request whose part is the last, by the number of the request.
        """
        complete = []
        for part in parts:
            request = part.request
            end = request.table.length = part.start + part.count
            if self.share_prefixes and part.start // self.pool.block_size < end // self.pool.block_size:
                self.pool.publish(request.table, request.tokens)
            if part.last:
                request.output.append(tokens[request.number])
            if request.complete:
                self.running.remove(request)
                self.pool.release(request.table)
                complete.append(request)
        return complete

    def _part(self, request: GenerationRequest, count: int) -> BatchPart:
        copies = tuple(self.pool.reserve(request.table, count))
        return BatchPart(request, request.table.length, count, count == request.left, copies)

    def _make_room(self, request: GenerationRequest) -> bool:
        """Pre-empt the youngest sequences until a token of ``request`` fits; False if it was pre-empted."""
        while self.pool.missing(request.table, 1) > self.pool.num_free:
            victim = self.running.pop()
            self.pool.release(victim.table)
            victim.preemptions += 1
            self.preemptions += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _admit(self) -> bool:
        """Admit the first waiting request if the blocks of all its tokens are free."""
        request = self.waiting[0]
        # The last token is computed in any case, because its logits are needed.
        table = self.pool.share(request.tokens[:-1]) if self.share_prefixes else BlockTable()
        left = len(request.tokens) - table.length
        missing = self.pool.missing(table, left)
        # A sequence that runs alone may take the watermark; the pool has enough blocks, as `add` has checked.
        fits = self.pool.can_admit(missing) if self.running else missing <= self.pool.num_free
        if not fits:
            self.pool.release(table)
            return False
        self.pool.reserve(table, left)
        request.table = table
        self.running.append(self.waiting.popleft())
        return True
