"""Convert between Hugging Face's ``config.json`` of a Llama and ``LlamaConfig``.

Both formats of the rotary positions are read: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling`` (earlier versions and the hub). The second is written, because every version reads it. An
option that ``Llama`` does not support raises an error.

A Llama with experts is no model of transformers. Its ``model_type`` is ``dlo_moe_llama``, which transformers
refuses, and its ``moe`` holds the ``MoEConfig``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from dlo_lib.base.errors import UserError
from dlo_lib.models.llama import LlamaConfig, RopeScaling
from dlo_lib.models.router import GateWeights, MoEConfig

_WITH_EXPERTS = "dlo_moe_llama"
_ROPE_THETA = 10_000.0  # the default of config.json: the value of the first Llama


def config_from_hf(table: dict[str, Any]) -> LlamaConfig:
    """Convert the content of a ``config.json`` to a configuration.

    Raises:
        UserError: it is not a Llama, it has an option that ``Llama`` does not support, or a size is missing
            or wrong.
    """
    _check_supported(table)
    rope = table.get("rope_parameters") or {}
    try:
        return LlamaConfig(
            vocab_size=table["vocab_size"],
            hidden=table["hidden_size"],
            intermediate=table["intermediate_size"],
            num_layers=table["num_hidden_layers"],
            num_heads=table["num_attention_heads"],
            num_kv_heads=table.get("num_key_value_heads") or table["num_attention_heads"],
            head_dim=table.get("head_dim") or table["hidden_size"] // table["num_attention_heads"],
            max_positions=table.get("max_position_embeddings", 2048),
            rope_theta=rope.get("rope_theta", table.get("rope_theta", _ROPE_THETA)),
            rope_scaling=_rope_scaling(rope or table.get("rope_scaling") or {}),
            norm_eps=table.get("rms_norm_eps", 1e-6),
            tied_embeddings=table.get("tie_word_embeddings", False),
            initializer_std=table.get("initializer_range", 0.02),
            moe=_moe(table["moe"]) if table["model_type"] == _WITH_EXPERTS else None,
        )
    except KeyError as error:
        raise UserError(
            f"config.json has no {error.args[0]}: copy it again from the source of the checkpoint"
        ) from error
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"config.json has inconsistent sizes: {error}") from error


def config_to_hf(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of ``config.json`` for a checkpoint of ``config`` in ``dtype``."""
    scaling = config.rope_scaling
    kind: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if config.moe is not None:
        weights = {"gate_weights": config.moe.gate_weights.value}
        kind = {"model_type": _WITH_EXPERTS, "moe": asdict(config.moe) | weights}
    return {
        **kind,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        },
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.initializer_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _check_supported(table: dict[str, Any]) -> None:
    expected = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
    }
    for name, ours in expected.items():
        theirs = table.get(name, None if name == "model_type" else ours)
        if theirs != ours and (name, theirs) != ("model_type", _WITH_EXPERTS):
            raise UserError(
                f"config.json has {name} = {theirs!r}, Llama supports {ours!r}: "
                "choose a checkpoint of the Llama 3 family"
            )


def _moe(table: dict[str, Any]) -> MoEConfig:
    return MoEConfig(**table | {"gate_weights": GateWeights(table["gate_weights"])})


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(
            f'config.json scales rotary positions by "{kind}", Llama supports "llama3": '
            "choose a checkpoint of the Llama 3 family"
        )
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_positions=rope["original_max_position_embeddings"],
    )
