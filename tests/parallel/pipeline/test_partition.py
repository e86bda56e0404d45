"""Cuts are the best there are, and what a Llama's pieces cost is counted right."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.models import Llama, model_config
from dlo_lib.models.counts import AttentionFlops, forward_flops_per_token, parameters
from dlo_lib.parallel.pipeline.llama import LlamaStage, tied_embedding_ranks
from dlo_lib.parallel.pipeline.partition import counted_costs, counted_parameters, measured_costs, partition
from dlo_lib.parallel.pipeline.schedules import interleaved, one_f_one_b, zb_v


def best_by_trying(costs, stages):
    ends = ((0, *cuts, len(costs)) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    return min(max(sum(costs[start:end]) for start, end in itertools.pairwise(cuts)) for cuts in ends)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    cuts = partition(costs, stages)
    assert [piece for cut in cuts for piece in cut] == list(range(len(costs)))
    assert len(cuts) == stages
    assert all(cuts)
    assert max(sum(costs[piece] for piece in cut) for cut in cuts) == best_by_trying(costs, stages)


def test_the_head_of_a_large_vocabulary_takes_the_place_of_blocks():
    config = model_config("llama-3.2-1b")  # 16 blocks; its head costs as much as several
    cuts = partition(counted_costs(config, 2048), 4)
    assert [len(cut) for cut in cuts] != [5, 4, 4, 5]
    assert len(cuts[-1]) < len(cuts[0])
    costs = counted_costs(config, 2048)
    assert max(sum(costs[piece] for piece in cut) for cut in cuts) < 1.15 * sum(costs) / 4


def test_counted_costs_and_parameters_add_up_to_the_models():
    for name in ("tiny", "llama-3.2-1b", "llama-3.2-3b"):
        config = model_config(name)
        assert sum(counted_costs(config, 512)) == pytest.approx(
            forward_flops_per_token(config, 512, AttentionFlops.CAUSAL)
        )
        both_ends = config.vocab_size * config.hidden if config.tied_embeddings else 0
        assert sum(counted_parameters(config)) == parameters(config) + both_ends


def test_measured_costs_follow_the_work_and_leave_no_gradients():
    torch.manual_seed(0)
    small, large = nn.Linear(8, 512), nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    costs = measured_costs([small, large], torch.randn(64, 8), repeats=3)
    assert len(costs) == 2
    assert 0 < costs[0] < costs[1]
    assert all(parameter.grad is None for module in (small, large) for parameter in module.parameters())


@pytest.mark.parametrize(
    ("costs", "stages", "message"),
    [([1, 2], 3, "2 pieces cannot make 3"), ([1], 0, "cannot make 0"), ([1, -1], 1, "negative")],
)
def test_what_cannot_be_cut_is_refused(costs, stages, message):
    with pytest.raises(UserError, match=message):
        partition(costs, stages)


def test_stages_one_after_another_are_the_model_and_keep_its_names():
    torch.manual_seed(0)
    model = Llama(model_config("tiny"))
    tokens = torch.randint(0, 257, (2, 12))
    stages = [LlamaStage(model, cut) for cut in partition([1, 1, 1, 1], 3)]
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(set(names) - {"lm_head.weight"}) == sorted(name for name, _ in model.named_parameters())


def test_pieces_that_are_not_there_are_refused():
    with pytest.raises(UserError, match=r"pieces 2 \.\.\. 4 of a Llama that has 0 \.\.\. 3"):
        LlamaStage(Llama(model_config("tiny")), range(2, 5))


def test_tied_ends_lie_on_two_ranks_unless_the_placement_brings_them_together():
    assert tied_embedding_ranks(True, one_f_one_b(4, 4).placement) == (0, 3)
    assert tied_embedding_ranks(True, interleaved(4, 4, 2).placement) == (0, 3)
    assert tied_embedding_ranks(True, zb_v(4, 8).placement) is None
    assert tied_embedding_ranks(False, one_f_one_b(4, 4).placement) is None
