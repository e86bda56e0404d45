"""A quantized Llama, and one with planted outliers, against the model in floating point."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.compress.calibration import channel_absmax
from dlo_lib.compress.int8_linear import Int8Linear
from dlo_lib.compress.llama import CALIBRATED, METHODS, plant_outliers, quantize_llama
from dlo_lib.compress.packing import stored_bytes
from dlo_lib.compress.weight_only import QuantizedLinear
from dlo_lib.models.llama import Llama, LlamaConfig
from dlo_lib.models.router import MoEConfig


def drawn_llama(tied: bool = False, dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> Llama:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden=24,
        intermediate=36,
        num_layers=2,
        num_heads=4,
        num_kv_heads=kv_heads,
        head_dim=6,
        tied_embeddings=tied,
        initializer_std=0.2,
    )
    return Llama(config, dtype=dtype)


TOKENS = torch.randint(50, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("factor", [64.0, 33.3])
def test_planted_outliers_keep_the_function(factor: float, tied: bool) -> None:
    model = drawn_llama(tied)
    before = model(TOKENS).detach()
    planted = plant_outliers(copy.deepcopy(model), [2, 17], factor)
    torch.testing.assert_close(planted(TOKENS).detach(), before, rtol=1e-11, atol=1e-11)
    seen: list[Tensor] = []
    for name, norm in planted.layers.named_modules():
        if name.endswith("layernorm"):
            norm.register_forward_hook(lambda _, __, output: seen.append(channel_absmax(output.detach())))
    planted(TOKENS)
    assert len(seen) == 4
    for largest in seen:
        others = torch.ones(24, dtype=torch.bool)
        others[[2, 17]] = False
        assert largest[~others].min() > 5 * largest[others].max()
    assert planted.lm_head.weight is planted.embed_tokens.weight or not tied


def test_planting_refuses_bad_channels() -> None:
    model = drawn_llama()
    for channels in ([24], [-1], [3, 3]):
        with pytest.raises(UserError, match="0 to 23"):
            plant_outliers(model, channels)
    with pytest.raises(UserError, match="positive"):
        plant_outliers(model, [1], 0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_quantizes_every_block(method: str, tied: bool) -> None:
    model = drawn_llama(tied)
    exact = model(TOKENS).detach()
    original = model.embed_tokens.weight.detach().clone()
    found = quantize_llama(model, method, 8, 12, [TOKENS[:2], TOKENS[2:, :9]])
    assert found is model
    kinds = {type(module) for name, module in model.layers.named_modules() if name.endswith("_proj")}
    assert kinds == {Int8Linear if "int8" in method or method == "smoothquant" else QuantizedLinear}
    assert torch.equal(model.embed_tokens.weight, original)
    assert model.lm_head.weight is model.embed_tokens.weight or not tied
    error = (model(TOKENS) - exact).square().mean() / exact.square().mean()
    assert 0 < float(error.detach()) < 1e-3
    with pytest.raises(UserError, match="floating point"):
        quantize_llama(model, method, 8, 12, [TOKENS])


def test_methods_help_against_planted_outliers() -> None:
    model = plant_outliers(drawn_llama(kv_heads=4), [2, 17], 64.0)
    exact = model(TOKENS).detach()

    def error(method: str, bits: int) -> float:
        found = quantize_llama(copy.deepcopy(model), method, bits, 12, [TOKENS])
        return float((found(TOKENS) - exact).square().mean().detach())

    int8 = error("int8", 8)
    assert error("llm_int8", 8) < int8 / 3
    assert error("smoothquant", 8) < int8 / 3
    nearest = error("rtn", 4)
    assert error("gptq", 4) < nearest
    assert error("awq", 4) < nearest


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_head_keeps_the_tie_and_the_file_is_small(bits: int, tied: bool, tmp_path: Path) -> None:
    model = drawn_llama(tied, torch.float32)
    quantize_llama(model, "rtn", bits, 12, head=True)
    logits, head = model(TOKENS), model.lm_head
    assert isinstance(head, QuantizedLinear)
    if tied:
        assert torch.equal(model.embed_tokens(TOKENS), head.rows()[TOKENS])
    matrices = 2 * (24 * (24 + 12 + 12 + 24) + 3 * 24 * 36) + 50 * 24
    norms = 5 * 24 * 4
    embedding = 0 if tied else 50 * 24 * 4
    expected_bytes = matrices * bits // 8 + matrices // 12 * 4 + norms + embedding
    assert stored_bytes(model) == expected_bytes
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    assert file.stat().st_size == 8 + int.from_bytes(file.read_bytes()[:8], "little") + expected_bytes
    other = quantize_llama(drawn_llama(tied, torch.float32), "rtn", bits, 12, head=True)
    for buffer in other.state_dict().values():
        buffer.zero_()
    other.load_state_dict(load_file(file))
    assert torch.equal(other(TOKENS), logits)
    assert torch.equal(copy.deepcopy(model)(TOKENS), logits)


def test_a_bf16_model_stays_in_bf16() -> None:
    for method in METHODS:
        model = quantize_llama(drawn_llama(dtype=torch.bfloat16), method, 8, 12, [TOKENS])
        logits = model(TOKENS)
        assert logits.dtype == torch.bfloat16
        assert logits.isfinite().all()


def test_bad_input_of_a_llama_is_refused_before_a_change() -> None:
    model = drawn_llama()
    with pytest.raises(UserError, match="unknown method"):
        quantize_llama(model, "gtpq")
    for method in CALIBRATED:
        with pytest.raises(UserError, match="batches"):
            quantize_llama(model, method)
    with pytest.raises(UserError, match="4 or 8"):
        quantize_llama(model, "rtn", 5)
    with pytest.raises(UserError, match="4 or 8"):
        quantize_llama(model, "int8", 5, head=True)
    with pytest.raises(UserError, match="divisor of 36"):
        quantize_llama(model, "rtn", 4, 8)
    with pytest.raises(UserError, match="alpha"):
        quantize_llama(model, "smoothquant", 8, batches=[TOKENS], alpha=2)
    assert all(type(module) is nn.Linear for name, module in model.named_modules() if name.endswith("_proj"))
    moe = Llama(LlamaConfig(9, 8, 8, 1, 2, 1, 4, moe=MoEConfig(num_experts=2, top_k=2, intermediate=4)))
    with pytest.raises(UserError, match="experts"):
        quantize_llama(moe)
