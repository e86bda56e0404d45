"""Where to cut a model into stages: so that the slowest stage, which sets the pace of all, is as fast as can be.

A model is a row of pieces (for a Llama: embedding, blocks, head), each with a cost, counted or measured. Stages are runs of pieces. With
C(k, n) the least possible cost of the slowest of k stages over the first n pieces,

    C(k, n) = min over j < n of max( C(k-1, j), cost of pieces j ... n-1 )

which dynamic programming fills in O(stages * pieces^2). Embedding and head are why equal numbers of blocks are not balanced: the head of a
small model with a large vocabulary costs as much as several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, nn

from dlo_lib.errors import UserError
from dlo_lib.models.configs import model_config
from dlo_lib.models.counts import AttentionFlops, forward_flops_per_token, parameters_by_part
from dlo_lib.models.llama import LlamaConfig
from dlo_lib.parallel.pipeline.clock import now


def partition(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """The pieces of each stage, in order and without an empty one, such that the most costly stage costs least.

    Of equally good cuts the one whose early stages are the fuller: they hold fewer activations at the end of a pipeline's row.

    Raises:
        UserError: fewer pieces than stages, or a cost that is no cost.
    """
    if not 1 <= stages <= len(costs):
        raise UserError(f"{len(costs)} pieces cannot make {stages} stages, each with at least one: use fewer stages")
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise UserError("a piece has a negative or infinite cost: costs are numbers from 0 on")
    upto = [0.0, *accumulate(costs)]
    pieces = len(costs)
    least = [[float("inf")] * (pieces + 1) for _ in range(stages + 1)]
    cut = [[0] * (pieces + 1) for _ in range(stages + 1)]
    least[0][0] = 0.0
    for count in range(1, stages + 1):
        for end in range(count, pieces + 1):
            for start in range(count - 1, end):
                slowest = max(least[count - 1][start], upto[end] - upto[start])
                if slowest <= least[count][end]:
                    least[count][end], cut[count][end] = slowest, start
    ranges, end = [], pieces
    for count in range(stages, 0, -1):
        start = cut[count][end]
        ranges.append(range(start, end))
        end = start
    return tuple(reversed(ranges))


def counted_costs(model: str | LlamaConfig, seq: int) -> list[float]:
    """The cost of each piece of a Llama in FLOPs a token, forward: embedding (a look-up: 0), blocks, norm and head."""
    config = model_config(model)
    head = 2.0 * config.vocab_size * config.hidden
    block = (forward_flops_per_token(config, seq, AttentionFlops.CAUSAL) - head) / config.num_layers
    return [0.0, *[block] * config.num_layers, head]


def counted_parameters(model: str | LlamaConfig) -> list[float]:
    """The parameters of each piece, to balance memory instead of time. A tied embedding counts at both ends, where it is held."""
    config = model_config(model)
    parts = parameters_by_part(config)
    block = (parts["attention"] + parts["mlp"]) / config.num_layers + 2 * config.hidden
    table = float(parts["embedding"])
    return [table, *[block] * config.num_layers, table + config.hidden]


def measured_costs(pieces: Sequence[nn.Module], example: Tensor, repeats: int = 5) -> list[float]:
    """Seconds of forward and backward of each piece, the least of ``repeats``; each is given what the one before it returns.

    Args:
        example: what the first piece is called with.
    """
    costs = []
    x = example
    for piece in pieces:
        times = []
        for _ in range(repeats):
            given = x.detach().requires_grad_(x.is_floating_point())
            began = now(x.device)
            out = piece(given)
            out.float().sum().backward()
            times.append(now(x.device) - began)
        costs.append(min(times))
        x = out.detach()
        piece.zero_grad(set_to_none=True)
    return costs
