"""A mixture of experts written out with masks, and nothing of the library: every expert computes every token,
and a mask keeps what was chosen. The losses are computed from all probabilities at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlo_lib.models import GateWeights, MoEConfig

Weights = dict[str, Tensor]
"""The parameters of an ``MoELayer`` by their names, and ``balance_bias`` if there is one."""


def dense_moe(
    weights: Weights, config: MoEConfig, pieces: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs of each of ``pieces`` (T, hidden); the losses with their coefficients, over all tokens of all
    pieces together, (); and the load, (num_experts,). The capacity holds for each piece alone."""
    outputs, probabilities, logits, chosen = [], [], [], []
    for x in pieces:
        scores_of = x @ weights["router.weight"].t()
        if config.gate_weights is GateWeights.SIGMOID:
            scores = torch.sigmoid(scores_of)
            probability = scores / scores.sum(-1, keepdim=True)
        else:
            scores = probability = torch.softmax(scores_of, -1)
        order = torch.argsort(scores + weights.get("balance_bias", 0), dim=-1, descending=True)
        choices = order[:, : config.top_k]
        gates = torch.gather(scores, 1, choices)
        if config.gate_weights is not GateWeights.SOFTMAX_BEFORE:
            gates = gates / gates.sum(-1, keepdim=True)
        kept = torch.ones_like(gates)
        if config.capacity_factor is not None:
            capacity = max(
                1, -int(-config.capacity_factor * len(x) * config.top_k // config.num_experts)
            )  # the ceiling
            filled = [0] * config.num_experts
            for choice in range(config.top_k):  # first choices of all tokens come first
                for token in range(len(x)):
                    expert = int(choices[token, choice])
                    kept[token, choice] = filled[expert] < capacity
                    filled[expert] += 1
        out = torch.zeros_like(x)
        for expert in range(config.num_experts):
            gate, up = (x @ weights["experts.gate_up"][expert]).chunk(2, -1)
            y = (F.silu(gate) * up) @ weights["experts.down"][expert]
            out = out + y * (gates * kept * (choices == expert)).sum(-1, keepdim=True)
        if config.shared_intermediate:
            gate = F.silu(x @ weights["shared.gate_proj.weight"].t())
            out = (
                out
                + (gate * (x @ weights["shared.up_proj.weight"].t())) @ weights["shared.down_proj.weight"].t()
            )
        outputs.append(out)
        probabilities.append(probability)
        logits.append(scores_of)
        chosen.append(choices)
    every, count = torch.cat(chosen), config.num_experts
    load = torch.stack([(every == expert).sum() for expert in range(count)])
    share = load.double() / max(every.numel(), 1)
    balance = count * (share * torch.cat(probabilities).mean(0)).sum()
    z = torch.cat(logits).exp().sum(-1).log().square().mean()
    return outputs, config.balance_loss * balance + config.z_loss * z, load
