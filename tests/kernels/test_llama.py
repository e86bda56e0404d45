"""Fused operations in a Llama: the same training as without them, and the memory that each one saves."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from dlo_lib.base.errors import UserError
from dlo_lib.kernels import FusedAdamW, FusedOperation, KernelBackend, Kernels, LossHead, fuse, using
from dlo_lib.kernels.llama import loss_options
from dlo_lib.models import Llama, LlamaConfig, model_config
from dlo_lib.models.router import MoEConfig
from dlo_lib.optim import Precision, train_step
from dlo_lib.profiling import measure_memory
from dlo_lib.profiling.tracker import MemoryTracker, Part

GROUPED = LlamaConfig(
    vocab_size=211, hidden=24, intermediate=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6
)
CONFIGS = {
    "grouped": GROUPED,
    "tied": replace(GROUPED, tied_embeddings=True, num_kv_heads=4),
    "experts": replace(
        GROUPED, moe=MoEConfig(num_experts=4, top_k=2, intermediate=16, shared_intermediate=16, every=2)
    ),
}
EVERY = frozenset(FusedOperation)


def _batches(config: LlamaConfig, count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator("cpu").manual_seed(3)
    tokens = torch.randint(config.vocab_size, (count, 3, 18), generator=generator, device="cpu")
    tokens = tokens.to(torch.get_default_device())
    targets = tokens[:, :, 1:].clone()
    targets[:, 0, 4:9] = -100
    return [(inputs, target) for inputs, target in zip(tokens[:, :, :-1], targets)]


def _trained(config, operations, *, checkpointing=False, takes_logits=False, precision=Precision.FP32):
    torch.manual_seed(0)
    wide = torch.float64 if precision is Precision.FP32 else torch.float32
    model = Llama(config, checkpointing=checkpointing).to(wide)
    fuse(model, operations, takes_logits)
    optimizer = (FusedAdamW if operations else torch.optim.AdamW)(model.parameters(), lr=1e-2)
    options = loss_options(operations, takes_logits)
    losses = [
        train_step(model, optimizer, _batches(config), precision=precision, max_norm=1.0, **options).loss
        for _ in range(5)
    ]
    return torch.stack(losses), {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("form", [{}, {"checkpointing": True}, {"takes_logits": True}], ids=str)
@pytest.mark.parametrize("twins", [True, False], ids=["twins", "as on a CPU"])
def test_five_steps_are_those_of_the_eager_model(config, form, twins):
    with using(KernelBackend.TORCH) if twins else contextlib.nullcontext():
        losses, params = _trained(config, EVERY, **form)
    expected, twin = _trained(config, frozenset())
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert params.keys() == twin.keys()
    for name, param in params.items():
        torch.testing.assert_close(param, twin[name], rtol=0, atol=1e-11, msg=name)


def test_five_steps_in_bf16_are_close_to_those_of_the_eager_model():
    losses, _ = _trained(GROUPED, EVERY, precision=Precision.BF16)
    expected, _ = _trained(GROUPED, frozenset(), precision=Precision.BF16)
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.parametrize("operation", FusedOperation)
def test_one_operation_alone_changes_no_other(operation):
    torch.manual_seed(0)
    model = fuse(Llama(GROUPED), [operation])
    changed = {
        FusedOperation.RMS_NORM: "normalize" in vars(model.norm),
        FusedOperation.ROPE: "rotate" in vars(model.layers[0].self_attn),
        FusedOperation.SWIGLU: "activate" in vars(model.layers[0].mlp),
        FusedOperation.ATTENTION: "attend" in vars(model.layers[0].self_attn),
        FusedOperation.LOSS: isinstance(model.lm_head, LossHead),
    }
    assert [name for name, is_changed in changed.items() if is_changed] == [operation]


def test_the_logits_of_all_tokens_never_exist():
    torch.manual_seed(0)
    config = replace(GROUPED, vocab_size=4096)
    model = fuse(Llama(config))
    inputs, targets = (torch.randint(4096, (16, 256)) for _ in range(2))
    for loss_of, exist in (
        (lambda: model(inputs, targets), False),
        (lambda: nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()), True),
    ):
        with using(KernelBackend.TORCH), MemoryTracker() as tracker:
            loss_of().backward()
        largest = max(event.bytes for event in tracker.events())
        assert (largest >= 4 * 16 * 256 * 4096) == exist


def test_targets_need_a_fused_head():
    inputs, targets = _batches(GROUPED)[0]
    with pytest.raises(TypeError):
        Llama(GROUPED)(inputs, targets)


def test_an_output_projection_with_a_bias_is_refused():
    model = Llama(GROUPED)
    model.lm_head = nn.Linear(GROUPED.hidden, GROUPED.vocab_size)
    with pytest.raises(UserError, match="the output projection has a bias: fuse the other operations only"):
        fuse(model)


WIDE = replace(model_config("llama-3.2-3b"), num_layers=4)
TOKENS, HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 4 * 2048, WIDE.hidden, WIDE.intermediate, 4, WIDE.vocab_size
SAVED = {
    # The fp32 copy and the normed input instead of one number of each row: 4 bytes of the residual stream,
    # which is fp32 with autocast, in two norms of each block and in the last.
    FusedOperation.RMS_NORM: (2 * LAYERS + 1) * 4 * TOKENS * HIDDEN,
    FusedOperation.SWIGLU: LAYERS * 2 * TOKENS * INTERMEDIATE,  # silu(gate) in bf16
    FusedOperation.ROPE: 0,  # temporary memory only, which is not part of the peak
    FusedOperation.ATTENTION: 0,  # PyTorch has a fused kernel for bf16
}


def _peak(kernels, batch=4, precision="bf16"):
    return measure_memory(WIDE, batch, 2048, precision=precision, parallel="none", kernels=kernels).peak_bytes


def test_measure_memory_shows_what_each_operation_saves_at_true_width():
    eager = _peak("eager")
    for operation, expected in SAVED.items():
        assert eager - _peak([operation]) == pytest.approx(expected, rel=0.01), operation
    # Logits in bf16 and fp32 and their gradients exist no longer; the gradient of the weight and of the
    # input, in fp32, do.
    loss = eager - _peak([FusedOperation.LOSS])
    assert 2 * TOKENS * VOCAB * 4 < loss < 2 * TOKENS * VOCAB * (4 + 2)
    fused = eager - _peak(Kernels.FUSED)
    assert fused == pytest.approx(sum(SAVED.values()) + loss, rel=0.01)


def test_fp32_with_grouped_queries_stores_no_scores():
    # PyTorch has no flash attention in fp32 for the GPU, on which the tensors of these tests are made.
    with torch.device("cpu"):
        eager, fused = (
            measure_memory(WIDE, 1, 2048, precision="fp32", parallel="none", kernels=kernels)
            for kernels in ("eager", [FusedOperation.ATTENTION])
        )
    scores = LAYERS * 4 * WIDE.num_heads * 2048 * 2048
    saved = eager.peak_by_part[Part.ACTIVATIONS] - fused.peak_by_part[Part.ACTIVATIONS]
    assert saved > 0.9 * scores


def test_the_plan_says_where_the_loss_needs_logits():
    assert loss_options(EVERY, takes_logits=False) == {"loss_in_model": True}
    assert loss_options(EVERY, takes_logits=True).keys() == {"sum_of_losses"}
    assert loss_options([FusedOperation.ROPE], takes_logits=False) == {}
