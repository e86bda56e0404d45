"""Counts from a configuration equal those of the modules, and FLOPs equal those that PyTorch counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from dlo_lib.models import CONFIGS, Llama, LlamaConfig, model_config
from dlo_lib.models.counts import (
    AttentionFlops,
    flops_per_token,
    forward_flops_per_token,
    parameters,
    parameters_by_part,
)


@st.composite
def configurations(draw) -> LlamaConfig:
    num_kv_heads = draw(st.integers(1, 4))
    return LlamaConfig(
        vocab_size=draw(st.integers(2, 300)),
        hidden=draw(st.integers(1, 64)),
        intermediate=draw(st.integers(1, 100)),
        num_layers=draw(st.integers(0, 4)),
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 16)),
        tied_embeddings=draw(st.booleans()),
    )


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama-3.2-1b", 1_235_814_400), ("llama-3.2-3b", 3_212_749_824), ("llama-3.1-8b", 8_030_261_248)],
)
def test_the_count_equals_the_published_one(name, published):
    assert parameters(name) == published
    assert (
        sum(parameter.numel() for parameter in Llama(model_config(name), device="meta").parameters())
        == published
    )


@settings(max_examples=40, deadline=None)
@given(configurations())
def test_each_part_is_the_sum_over_its_modules(config):
    model = Llama(config, device="meta")
    part_of = {"embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "lm_head": "output"}
    counted = dict.fromkeys(("embedding", "attention", "mlp", "norm", "output"), 0)
    for name, parameter in model.named_parameters():
        part = next((part for module, part in part_of.items() if module in name.split(".")), "norm")
        counted[part] += parameter.numel()
    assert parameters_by_part(config) == counted
    assert parameters(config) == sum(parameter.numel() for parameter in model.parameters())


# the route of a token is not known on the meta device
@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.moe is None])
def test_flops_equal_those_of_the_executed_products(name):
    batch, seq = 2, 16
    config = model_config(name)
    with torch.device("meta"):  # here attention is two products over all keys
        model, tokens = Llama(config), torch.zeros(batch, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert forward.get_total_flops() == batch * seq * forward_flops_per_token(config, seq)
    assert forward.get_total_flops() + backward.get_total_flops() == batch * seq * flops_per_token(
        config, seq
    )


def test_flops_with_full_attention_follow_the_formula_of_palm():
    config, seq = model_config("llama-3.2-3b"), 2048
    # the tied table counts once, as the output
    matrices = parameters(config) - parameters_by_part(config)["norm"]
    assert flops_per_token(config, seq, AttentionFlops.NONE) == 6 * matrices
    assert (
        flops_per_token(config, seq)
        == 6 * matrices + 12 * config.num_layers * config.num_heads * config.head_dim * seq
    )


@pytest.mark.parametrize("seq", [1, 2, 7])
def test_causal_attention_has_half_the_keys_plus_the_own_key(seq):
    config = model_config("tiny")
    scores = sum(query + 1 for query in range(seq))  # query i has the keys 0 to i
    per_score = 4 * config.num_layers * config.num_heads * config.head_dim
    matrices = forward_flops_per_token(config, seq, AttentionFlops.NONE)
    assert (
        seq * (forward_flops_per_token(config, seq, AttentionFlops.CAUSAL) - matrices) == per_score * scores
    )
    assert seq * (forward_flops_per_token(config, seq, AttentionFlops.FULL) - matrices) == per_score * seq**2
