"""Logits and gradients equal those of transformers' Llama, for all variants of the family."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_lib.models import Llama, LlamaConfig, RopeScaling, model_config
from dlo_lib.models.hf_config import config_to_hf
from dlo_lib.models.llama import rotation
from tests.lazy import Lazy

transformers = Lazy("transformers")
their_llama = Lazy("transformers.models.llama.modeling_llama")


def twin_of(model: Llama) -> torch.nn.Module:
    """Return transformers' model with the same weights."""
    dtype = model.norm.weight.dtype
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_hf(model.config, dtype))).to(
        dtype
    )
    names = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    theirs.load_state_dict(names, strict=True)
    return theirs


def losses_and_gradients(model: Llama, theirs: torch.nn.Module, tokens: torch.Tensor):
    """Return logits and gradients of the mean next-token loss, ours and transformers', by our names."""
    results = []
    for logits, parameters in (
        (model(tokens), model.named_parameters()),
        (theirs(tokens).logits, theirs.named_parameters()),
    ):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        results.append(
            (logits.detach(), {name.removeprefix("model."): parameter.grad for name, parameter in parameters})
        )
    return results


def assert_equal(model: Llama, tokens: torch.Tensor, tolerance: float) -> None:
    (logits, gradients), (their_logits, their_gradients) = losses_and_gradients(model, twin_of(model), tokens)
    torch.testing.assert_close(logits, their_logits, atol=tolerance, rtol=0)
    assert gradients.keys() == their_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient,
            their_gradients[name],
            atol=tolerance,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def widen_their_norm(patch: pytest.MonkeyPatch) -> None:
    """Let transformers' norm compute in float64, which it otherwise reduces to fp32."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    patch.setattr(their_llama.LlamaRMSNorm, "forward", forward)


def large_weights(model: Llama) -> Llama:
    """Set weights for which attention is far from uniform, so that errors in rotation
    or masking are visible."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_logits_and_gradients_equal_transformers_in_float64(config, monkeypatch):
    widen_their_norm(monkeypatch)
    model = large_weights(Llama(config, dtype=torch.float64))
    assert_equal(model, torch.randint(config.vocab_size, (2, 40)), tolerance=1e-10)


@st.composite
def configurations(draw) -> LlamaConfig:
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 4))
    scaling = st.builds(RopeScaling, factor=st.floats(1.5, 32.0), original_max_positions=st.integers(8, 64))
    return LlamaConfig(
        vocab_size=draw(st.integers(2, 50)),
        hidden=num_heads * draw(st.integers(1, 6)),  # transformers requires a multiple for any head_dim
        intermediate=draw(st.integers(1, 50)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=2 * draw(st.integers(1, 12)),
        rope_theta=draw(st.sampled_from([1e2, 1e4, 5e5])),
        rope_scaling=draw(st.none() | scaling),
        tied_embeddings=draw(st.booleans()),
    )


@settings(max_examples=25, deadline=None)
@given(config=configurations(), batch=st.integers(1, 3), seq=st.integers(2, 33), seed=st.integers(0, 99))
def test_logits_and_gradients_equal_transformers_on_random_configurations(config, batch, seq, seed):
    with pytest.MonkeyPatch.context() as patch:
        widen_their_norm(patch)
        torch.manual_seed(seed)
        model = large_weights(Llama(config, dtype=torch.float64))
        assert_equal(model, torch.randint(config.vocab_size, (batch, seq)), tolerance=1e-10)


def test_logits_and_gradients_equal_unpatched_transformers_in_fp32(config):
    model = Llama(config)
    assert_equal(model, torch.randint(config.vocab_size, (2, 40)), tolerance=1e-5)


def test_no_position_depends_on_later_tokens(config):
    model = large_weights(Llama(config, dtype=torch.float64))
    tokens = torch.randint(config.vocab_size, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.isclose(before[:, 12:], after[:, 12:]).all(-1).any(), (
        "every later position depends on the changed token"
    )


def test_checkpointing_changes_neither_loss_nor_gradients(config):
    plain = Llama(config, dtype=torch.float64)
    checkpointed = copy.deepcopy(plain)
    checkpointed.checkpointing = True
    tokens = torch.randint(config.vocab_size, (2, 16))
    for model in (plain, checkpointed):
        model(tokens).pow(2).sum().backward()
    for (name, ours), theirs in zip(plain.named_parameters(), checkpointed.parameters()):
        assert torch.equal(ours.grad, theirs.grad), name


def test_checkpointing_saves_one_tensor_per_block():
    config = LlamaConfig(
        vocab_size=32, hidden=16, intermediate=32, num_layers=6, num_heads=2, num_kv_heads=1, head_dim=8
    )
    tokens = torch.randint(32, (2, 10))
    kept = {}
    for checkpointing in (False, True):
        model = Llama(config, checkpointing=checkpointing)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            model(tokens)
        own = {parameter.data_ptr() for parameter in model.parameters()}
        kept[checkpointing] = {
            tensor.data_ptr()
            for tensor in saved
            if tensor.data_ptr() not in own and tensor.shape == (2, 10, 16)
        }
    assert len(kept[False]) > 3 * config.num_layers
    assert len(kept[True]) <= config.num_layers + 3, (
        "the input of each block, and the tensors of the last norm"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_in_low_precision_with_gradients_in_fp32(config, dtype):
    model = Llama(config)
    tokens = torch.randint(config.vocab_size, (2, 24))
    exact = model(tokens)
    with torch.autocast("cpu", dtype):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), exact, atol=2e-2 * exact.abs().max().item(), rtol=0)
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_model_in_bf16_uses_angles_computed_in_fp32():
    config = model_config("tiny")
    exact = rotation(config, 1000, torch.zeros(1, dtype=torch.float32))
    for ours, rounded_once in zip(rotation(config, 1000, torch.zeros(1, dtype=torch.bfloat16)), exact):
        assert torch.equal(ours, rounded_once.bfloat16())


def test_a_model_from_the_meta_device_equals_one_built_in_place(config):
    torch.manual_seed(3)
    built = Llama(config)
    empty = Llama(config, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.to_empty(device="cpu")
    torch.manual_seed(4)
    empty.init_weights()
    torch.manual_seed(4)
    built.init_weights()
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(empty.state_dict().values(), built.state_dict().values())
    )
    assert (empty.lm_head.weight is empty.embed_tokens.weight) == config.tied_embeddings
    tokens = torch.randint(config.vocab_size, (1, 9))
    assert torch.equal(empty(tokens), built(tokens))


def test_initial_weights_have_the_configured_standard_deviation():
    model = Llama(LlamaConfig(200, 100, 200, 1, 4, 2, 30, initializer_std=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
    assert model(torch.randint(200, (1, 50))).std() < 1, "so that the first predictions are nearly uniform"


def test_invalid_configurations_raise_with_the_reason():
    sizes = {"vocab_size": 8, "hidden": 8, "intermediate": 8, "num_layers": 1, "num_heads": 4}
    with pytest.raises(ValueError, match="num_heads .4. must be a multiple of num_kv_heads .3."):
        LlamaConfig(**sizes, num_kv_heads=3, head_dim=2)
    with pytest.raises(ValueError, match="head_dim .3. must be even"):
        LlamaConfig(**sizes, num_kv_heads=2, head_dim=3)
