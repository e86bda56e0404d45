"""Experts on 1 to 4 ranks learn what one process learns from all the data: losses, norms and gradients within
1e-10 in float64, over 4 steps of 2 micro-batches. The ranks have unequal numbers of tokens, and most
micro-batches leave experts without a token.

All cases of a number of ranks are trained in one launch, because each rank needs a second for its imports.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dlo_lib.launch import run_ranks
from dlo_lib.optim.step import summed_cross_entropy
from tests.models.moe_twin import dense_moe
from tests.models.test_moe import CONFIGS, layer_of, weights_of
from tests.parallel.expert.forms import (
    MIXTURES,
    STEPS,
    History,
    distributed,
    llama,
    micro_batches,
    trained,
    trained_alone,
)

twin = functools.cache(trained_alone)


class Case(NamedTuple):
    mixture: str
    ep: int
    checkpointing: bool = False


EACH_MIXTURE = (2, 4)
"""The numbers of ranks, with ep 2."""
DEGREES = {1: (1,), 2: (1,), 3: (1, 3), 4: (1, 4)}
"""The degrees of ep, by the number of ranks."""
OF_DEGREES = "capacity top-2"
WITH_CHECKPOINTING = Case("drop-less top-1, shared", 2, checkpointing=True)


def cases(world_size: int) -> list[Case]:
    found = [Case(OF_DEGREES, ep) for ep in DEGREES[world_size]]
    if world_size in EACH_MIXTURE:
        found += [Case(mixture, 2) for mixture in MIXTURES]
    return found + [WITH_CHECKPOINTING] * (world_size == 2)


def trained_in_turn(chosen: list[Case]) -> list[History]:
    return [trained(case.mixture, case.ep, checkpointing=case.checkpointing) for case in chosen]


@functools.cache
def trained_on_ranks(world_size: int) -> dict[Case, list[History]]:
    """The histories of the ranks, by case."""
    chosen = cases(world_size)
    by_rank = run_ranks(trained_in_turn, world_size, chosen)
    return {case: list(histories) for case, histories in zip(chosen, zip(*by_rank), strict=True)}


def assert_same(ranks: list[History], alone: History) -> None:
    assert max(alone.norms) > 0.5, "nothing was clipped"
    for history in ranks:
        torch.testing.assert_close(history.losses, alone.losses, rtol=0, atol=1e-10)
        torch.testing.assert_close(history.norms, alone.norms, rtol=0, atol=1e-10)
        assert len(history.gradients) == STEPS
        for mine, its in zip(history.gradients, alone.gradients):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)
        for biases, expected in zip(history.biases, alone.biases, strict=True):
            torch.testing.assert_close(biases, expected, rtol=0, atol=0)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("world_size", EACH_MIXTURE)
def test_every_mixture(world_size, mixture):
    alone = twin(mixture, world_size)
    ranks = trained_on_ranks(world_size)[Case(mixture, 2)]
    assert_same(ranks, alone)
    assert alone.idle > 0, "every expert had tokens"
    assert any(history.dropped for history in ranks) == ("capacity" in mixture)
    assert bool(alone.biases[0]) == (mixture == "balance bias")


@pytest.mark.parametrize(("world_size", "ep"), [(ranks, ep) for ranks, eps in DEGREES.items() for ep in eps])
def test_every_degree(world_size, ep):
    assert_same(trained_on_ranks(world_size)[Case(OF_DEGREES, ep)], twin(OF_DEGREES, world_size))


def test_activation_checkpointing():
    assert_same(trained_on_ranks(2)[WITH_CHECKPOINTING], twin(WITH_CHECKPOINTING.mixture, 2))


def clipped_by_pytorch() -> tuple[float, float]:
    torch.manual_seed(0)
    model = distributed(llama("drop-less top-2"), ep=2)
    inputs, targets = micro_batches(0, dist.get_rank())[0]
    summed_cross_entropy(model(inputs), targets).backward()
    model.finish_grad_sync()
    ours = model.clip_grad_norm_(1e9)
    return float(ours), float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def test_pytorch_clips_over_all_ranks_too():
    norms = [norm for both in run_ranks(clipped_by_pytorch, 2) for norm in both]
    assert norms == pytest.approx([norms[0]] * 4)
    assert norms[0] > 0.1


def test_the_capacity_of_parts_of_a_batch_is_not_that_of_the_whole_batch():
    """The twin of N ranks limits each part by itself, with other drops than on the whole batch."""
    layer = layer_of(CONFIGS["capacity"])
    x = torch.randn(20, 12, dtype=torch.float64)
    (whole,), whole_losses, _ = dense_moe(weights_of(layer), layer.config, [x])
    parts, losses, _ = dense_moe(weights_of(layer), layer.config, [x[:15], x[15:]])
    assert not torch.allclose(torch.cat(parts), whole)
    assert torch.equal(losses, whole_losses)  # the losses count what was chosen, before drops
