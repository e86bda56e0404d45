"""Cuts a model into stages such that the cost of the slowest stage, which limits the throughput, is minimal.

A model is a sequence of pieces (for a Llama: embedding, blocks, head), each with a counted or measured cost.
A stage is a sequence of consecutive pieces. Let C(k, n) be the minimal cost of the slowest of k stages over
the first n pieces:

    C(k, n) = min over j < n of max( C(k-1, j), cost of pieces j ... n-1 )

Dynamic programming computes it in O(stages * pieces^2). Equal numbers of blocks are not balanced, because of
the embedding and the head: the head of a small model with a large vocabulary costs as much as several blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.models.configs import model_config
from dlo_lib.models.counts import AttentionFlops, forward_flops_per_token, parameters_by_part
from dlo_lib.models.llama import LlamaConfig


def partition(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Return the pieces of each stage, in order, such that the cost of the most expensive stage is minimal.

    Every stage has at least one piece. Among equally good solutions, the early stages have the most pieces.

    Args:
        costs: the cost of each piece, in any unit.
        stages: the number of stages.

    Raises:
        UserError: there are fewer pieces than stages, or a cost is negative or not finite.
    """
    if not 1 <= stages <= len(costs):
        raise UserError(
            f"{len(costs)} pieces cannot make {stages} stages, each with at least one: "
            f"use at most {len(costs)}"
        )
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
    """Return the cost of each piece of a Llama in forward FLOPs per token: the embedding (0, a look-up), the
    blocks, and the last norm with the head."""
    config = model_config(model)
    head = 2.0 * config.vocab_size * config.hidden
    block = (forward_flops_per_token(config, seq, AttentionFlops.CAUSAL) - head) / config.num_layers
    return [0.0, *[block] * config.num_layers, head]


def counted_parameters(model: str | LlamaConfig) -> list[float]:
    """Return the number of parameters of each piece of a Llama, to balance memory instead of time. A tied
    embedding counts in the first and in the last piece."""
    config = model_config(model)
    parts = parameters_by_part(config)
    block = (parts["attention"] + parts["mlp"]) / config.num_layers + 2 * config.hidden
    table = float(parts["embedding"])
    return [table, *[block] * config.num_layers, table + config.hidden]


def measured_costs(pieces: Sequence[nn.Module], example: Tensor, repeats: int = 5) -> list[float]:
    """Measure forward and backward of each piece, in seconds; the result is the minimum of ``repeats``
    measurements.

    Args:
        pieces: the modules. Each is called with the output of the previous one.
        example: the input of the first piece.
    """
    costs = []
    x = example
    for piece in pieces:
        times = []
        for _ in range(repeats):
            given = x.detach().requires_grad_(x.is_floating_point())
            began = _now(x.device)
            out = piece(given)
            out.float().sum().backward()
            times.append(_now(x.device) - began)
        costs.append(min(times))
        x = out.detach()
        piece.zero_grad(set_to_none=True)
    return costs


def _now(device: torch.device) -> float:
    """Wait for ``device`` and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()
