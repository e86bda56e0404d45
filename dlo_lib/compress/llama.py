"""Quantization of a Llama, block by block.

Each block has four stages: the projections q, k and v, which read the first norm; o; gate and up, which read
the second norm; and down. The calibration batches run through the quantized blocks before it, so that a
method sees the activations that it will meet. In a block, the methods that scale channels (awq,
smoothquant) do so for all stages first, because the factors of down are folded into up before up is
rounded. Then the stages are rounded one after another; gptq reads the inputs of each stage behind the
rounded ones.

| method | weights | activations | needs batches |
|---|---|---|---|
| rtn | rounded to nearest, ``bits`` 4 or 8, in groups | floating point | no |
| awq | scaled by activations, then rounded | floating point | yes |
| gptq | rounded with compensated errors | floating point | yes |
| int8 | int8 for each output channel | int8 for each token | no |
| llm_int8 | int8 for each output channel | int8, outlier columns in floating point | no |
| smoothquant | int8, after outliers moved into them | int8 for each token | yes |

Embedding and head stay in floating point unless ``head`` is set. ``plant_outliers`` gives a small model the
outlier channels of a large one.

Cost: the calibration holds the hidden states of all batches, and the inputs of one stage.

Papers: those of the methods; outlier channels are described by LLM.int8() (arXiv:2208.07339).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlo_lib.base.errors import UserError, unknown_name
from dlo_lib.compress.awq import search_awq_factors
from dlo_lib.compress.calibration import channel_absmax
from dlo_lib.compress.gptq import gptq_quantize, hessian
from dlo_lib.compress.int8_linear import Int8Linear
from dlo_lib.compress.smoothquant import fold_factors, smoothing_factors
from dlo_lib.compress.weight_only import QuantizedEmbedding, QuantizedLinear
from dlo_lib.models.llama import Llama, rotation

METHODS = ("rtn", "awq", "gptq", "int8", "llm_int8", "smoothquant")
"""The methods of ``quantize_llama``."""

CALIBRATED = ("awq", "gptq", "smoothquant")
"""The methods that need batches."""

_STAGES = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (None, ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
"""For each stage the module that can divide its input by factors, and the linear layers."""


@torch.no_grad()
def quantize_llama(
    model: Llama,
    method: str = "rtn",
    bits: int = 4,
    group_size: int | None = None,
    batches: Iterable[Tensor] = (),
    symmetric: bool = True,
    alpha: float = 0.5,
    threshold: float = 6.0,
    head: bool = False,
) -> Llama:
    """Replace the linear layers of the blocks of ``model`` in place, and return it.

    Args:
        model: in floating point, without experts.
        method: one of ``METHODS``.
        bits, group_size, symmetric: the grid of weights for ``rtn``, ``awq`` and ``gptq``; without a group
            size, one scale for each row. Other methods have 8 bits.
        batches: tokens (batch, seq) int64, for the methods in ``CALIBRATED``.
        alpha: of SmoothQuant, 0 to 1.
        threshold: of LLM.int8().
        head: store the head in ``bits`` bits too, rounded to nearest. A tied embedding then reads the stored
            weight of the head.

    Raises:
        UserError: an unknown method, no batches for a method that needs them, a model with experts or one
            that is already quantized, ``bits`` that is not 4 or 8 where it is read, or a group size that does
            not divide a number of inputs; the model is then unchanged. Or a weight or an activation contains
            NaN or infinity.
    """
    tokens = list(batches)
    _check(model, method, bits, group_size, alpha, head, tokens)
    chosen = _Settings(method, bits, group_size, symmetric, alpha, threshold)
    # One state (batch, seq, hidden) for each batch; without calibration there is none to follow.
    states = [model.embed_tokens(batch) for batch in tokens] if method in CALIBRATED else []
    for block in model.layers:
        for before, names in _STAGES:
            if before is not None and method in ("awq", "smoothquant"):
                linears = [_linear(block, name) for name in names]
                factors = chosen.factors(_inputs(model, block, names[0], states), linears)
                fold_factors(block.get_submodule(before), linears, factors)
        for _, names in _STAGES:
            h = hessian(_inputs(model, block, names[0], states)) if method == "gptq" else None
            for name in names:
                parent, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(parent), leaf, chosen.rounded(_linear(block, name), h))
        states = [block(state, *rotation(model.config, state.shape[1], state)) for state in states]
    if head:
        dtype = model.embed_tokens.weight.dtype
        stored = QuantizedLinear.from_linear(model.lm_head, bits, group_size, symmetric)
        model.lm_head = stored  # type: ignore[assignment]
        if model.config.tied_embeddings:
            model.embed_tokens = QuantizedEmbedding(stored, dtype)  # type: ignore[assignment]
    return model


@torch.no_grad()
def plant_outliers(model: Llama, channels: Sequence[int], factor: float = 64.0) -> Llama:
    """Multiply activations by ``factor`` in ``channels`` behind both norms of each block, in place, and
    return the model.

    The weight of the norm is multiplied and the columns of the matrices that read it are divided, so that the
    function stays equal to rounding; with a power of two it is equal bit by bit, except where a sum is
    added in another order or a number leaves the range of the dtype.

    Args:
        model: without experts.
        channels: indices of the hidden dimension, each once.
        factor: positive; activations of large models have outliers of 20 to 100 times the others.

    Raises:
        UserError: a channel is out of range or repeated, ``factor`` is not positive, or there are experts.
    """
    hidden = model.config.hidden
    if len(set(channels)) != len(channels) or not all(0 <= channel < hidden for channel in channels):
        raise UserError(f"channels are {list(channels)}: use different numbers from 0 to {hidden - 1}")
    if not 0 < factor < float("inf"):
        raise UserError(f"factor is {factor}: use a positive number, such as 64")
    _check_dense(model)
    factors = torch.ones(hidden, dtype=torch.float64)
    factors[list(channels)] = 1 / factor
    for block in model.layers:
        for before, names in _STAGES:
            if before is not None and before.endswith("layernorm"):
                linears = [_linear(block, name) for name in names]
                fold_factors(block.get_submodule(before), linears, factors.to(linears[0].weight.device))
    return model


@dataclass(frozen=True)
class _Settings:
    """The arguments of ``quantize_llama``."""

    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    alpha: float
    threshold: float

    def factors(self, x: Tensor, linears: list[nn.Linear]) -> Tensor:
        weights = [linear.weight for linear in linears]
        if self.method == "smoothquant":
            return smoothing_factors(channel_absmax(x), weights, self.alpha)
        return search_awq_factors(x, weights, self.bits, self.group_size, self.symmetric)[0]

    def rounded(self, linear: nn.Linear, h: Tensor | None) -> nn.Module:
        if self.method in ("int8", "smoothquant"):
            return Int8Linear(linear)
        if self.method == "llm_int8":
            return Int8Linear(linear, threshold=self.threshold)
        if h is None:
            return QuantizedLinear.from_linear(linear, self.bits, self.group_size, self.symmetric)
        q, grid = gptq_quantize(linear.weight, h, self.bits, self.group_size, self.symmetric)
        return QuantizedLinear.from_integers(q, grid, linear.bias)


def _inputs(model: Llama, block: nn.Module, name: str, states: list[Tensor]) -> Tensor:
    """Return what the layer ``name`` reads over all batches, (tokens, in)."""
    seen: list[Tensor] = []
    linear = block.get_submodule(name)
    hook = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, -2)))
    try:
        for state in states:
            block(state, *rotation(model.config, state.shape[1], state))
    finally:
        hook.remove()
    return torch.cat(seen)


def _linear(block: nn.Module, name: str) -> nn.Linear:
    linear = block.get_submodule(name)
    if not isinstance(linear, nn.Linear):
        raise UserError(f"{name} is a {type(linear).__name__}: use a model in floating point")
    return linear


def _check_dense(model: Llama) -> None:
    if model.config.moe is not None:
        raise UserError("the model has experts: quantization of a Llama needs a dense MLP in every block")


def _check(
    model: Llama,
    method: str,
    bits: int,
    group_size: int | None,
    alpha: float,
    head: bool,
    tokens: list[Tensor],
) -> None:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    _check_dense(model)
    if method in CALIBRATED and not sum(batch.numel() for batch in tokens):
        raise UserError(f"{method} needs activations: give batches of tokens (batch, seq)")
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}: use a number from 0 to 1")
    if head:
        QuantizedLinear(model.config.hidden, 1, False, bits, group_size, device="meta")
    for block in model.layers:
        for _, names in _STAGES:
            for name in names:
                linear = _linear(block, name)
                if method in ("rtn", "awq", "gptq"):
                    # An empty layer on meta checks both arguments.
                    QuantizedLinear(linear.in_features, 1, False, bits, group_size, device="meta")
