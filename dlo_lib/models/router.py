"""The router of a mixture of experts, and the sizes and choices of a mixture.

    logits = x @ W_r^T                       (T, E), in fp32 or wider, because small differences decide
    chosen = top-k of (scores + bias)        the balance bias decides who is chosen, and nothing else
    weights of the chosen                    from the scores without the bias, by ``GateWeights``

Papers: Shazeer et al. (arXiv:1701.06538), Switch Transformer (arXiv:2101.03961), Mixtral (arXiv:2401.04088),
DeepSeek-V3 (arXiv:2412.19437), auxiliary-loss-free balance (arXiv:2408.15664).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError, require_count


class GateWeights(enum.Enum):
    """The weights of the chosen experts."""

    SOFTMAX_BEFORE = "softmax before top-k"
    """Probabilities over all experts. Their sum is below 1, so that the router learns with k = 1 as well
    (Switch Transformer, GShard)."""
    SOFTMAX_AFTER = "softmax after top-k"
    """Softmax over the chosen logits, with sum 1 (Mixtral). It equals the probabilities over all experts,
    divided by their sum."""
    SIGMOID = "sigmoid"
    """Sigmoids of the chosen logits, divided by their sum (DeepSeek-V3). A score does not depend on the other
    experts."""


@dataclass(frozen=True)
class MoEConfig:
    """The sizes and choices of the mixture-of-experts layers of a model.

    Args:
        num_experts, top_k: E and k.
        intermediate: the width inside one expert.
        shared_intermediate: the width of the shared expert; 0 for none. n shared experts are one of n times
            the width.
        every: the MLP of each ``every``-th block is such a layer: 1 for all, 2 for every second one.
        gate_weights: the weights of the chosen experts.
        capacity_factor: limits the rows of an expert to this multiple of an equal load; None for no limit.
        balance_loss, z_loss: the coefficients of the losses.
        bias_rate: the step of the balance bias; 0 for no bias.

    Raises:
        UserError: a value is impossible; the message names the cure.
    """

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    every: int = 1
    gate_weights: GateWeights = GateWeights.SOFTMAX_AFTER
    capacity_factor: float | None = None
    balance_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "intermediate", "every"):
            require_count(name, getattr(self, name))
        require_count("shared_intermediate", self.shared_intermediate, least=0)
        if self.top_k > self.num_experts:
            raise UserError(
                f"top_k is {self.top_k} of {self.num_experts} experts: use at most {self.num_experts}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise UserError(
                f"capacity_factor is {self.capacity_factor}: use a positive number, or None for no limit"
            )
        if self.top_k == 1 and self.gate_weights is not GateWeights.SOFTMAX_BEFORE:
            raise UserError(
                "with top_k 1 this weight is always 1, and the router does not learn: "
                "use GateWeights.SOFTMAX_BEFORE"
            )


class Router(nn.Module):
    """Chooses the experts of each token, in fp32 or wider.

    Parameter: ``weight`` (num_experts, hidden). Buffer, with ``bias_rate``: ``balance_bias`` (num_experts,),
    in fp32 or wider also if the model, or the state that it loads, is in bf16 or fp16, where a sum of many
    small steps would stop growing.
    """

    balance_bias: Tensor | None

    def __init__(self, config: MoEConfig, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden, **factory))
        bias = None
        if config.bias_rate:
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            bias = torch.zeros(config.num_experts, **{**factory, "dtype": wide})
        self.register_buffer("balance_bias", bias)
        self.init_weights(0.02)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn``, such as that of ``model.bfloat16()``, and keep the bias in fp32 or wider."""
        before = self.balance_bias
        super()._apply(fn, recurse)
        if before is not None and self.balance_bias is not None:
            wide = torch.promote_types(self.balance_bias.dtype, torch.float32)
            if self.balance_bias.dtype != wide:
                self.balance_bias = before.to(self.balance_bias.device, wide)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load the weight and the bias. With ``assign=True`` the bias would take the dtype of the state."""
        super()._load_from_state_dict(*args)
        self.widen_bias()

    def widen_bias(self) -> None:
        """Store the bias in fp32 or wider."""
        if self.balance_bias is not None:
            wide = torch.promote_types(self.balance_bias.dtype, torch.float32)
            self.balance_bias = self.balance_bias.to(wide)

    def init_weights(self, std: float) -> None:
        """Initialise the matrix normal with standard deviation ``std``, and the bias with zeros."""
        nn.init.normal_(self.weight, std=std)
        if self.balance_bias is not None:
            nn.init.zeros_(self.balance_bias)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route ``tokens`` (T, hidden).

        Returns the chosen experts (T, k) int64, their weights (T, k), the probabilities (T, E) and the logits
        (T, E), in fp32 or wider.
        """
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(tokens.to(wide), self.weight.to(wide))
            scores = (
                logits.sigmoid() if self.config.gate_weights is GateWeights.SIGMOID else logits.softmax(-1)
            )
            biased = scores if self.balance_bias is None else scores + self.balance_bias
            experts = biased.topk(self.config.top_k, dim=-1).indices
            weights = scores.gather(-1, experts)
            if self.config.gate_weights is not GateWeights.SOFTMAX_BEFORE:
                weights = weights / weights.sum(-1, keepdim=True)
        probabilities = scores
        if self.config.gate_weights is GateWeights.SIGMOID:
            probabilities = scores / scores.sum(-1, keepdim=True)
        return experts, weights, probabilities, logits
