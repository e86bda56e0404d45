"""A mixture-of-experts layer: a router chooses k of E experts for each token, and the output is their
weighted sum.

    logits = x @ W_r                                          (T, E), in fp32 or wider
    out    = sum over the k chosen experts e of  weight_e * expert_e(x)     + shared(x)

All experts together hold E times the parameters of one, but a token uses only k of them. The weights of a
token are those of ``GateWeights``. A *shared expert* (DeepSeekMoE) processes every token.

Without a counterforce, the router soon prefers a few experts. Three remedies:

- The *balance loss* (Switch Transformer): E * sum over e of f_e P_e, where f_e is the share of the choices
  that went to expert e and P_e is the mean probability of e. It is 1 with equal loads, and E if one expert
  receives everything with probability 1. Its gradient reaches the router only through P_e.
- The *z-loss* (ST-MoE): the mean of logsumexp(logits)^2, which keeps the logits small.
- The *balance bias* (DeepSeek-V3): a bias on the scores that decides which experts are chosen, but is not
  part of their weights. After each step, ``update_balance_bias`` adds rate * sign(mean load - load).

The layer adds the gradients of its losses in its backward, as if they had been added to the loss of the
model. The caller therefore does not collect them; they also work inside a pipeline stage and with activation
checkpointing. ``scale_auxiliary_losses`` sets their scale, which ``train_step`` does.

An expert without a limit processes every token that chose it (``capacity_factor`` None). With a limit, the
excess is dropped and counted (``token_dispatch``).

Papers: Shazeer et al. (arXiv:1701.06538), GShard (arXiv:2006.16668), Switch Transformer (arXiv:2101.03961),
ST-MoE (arXiv:2202.08906), Mixtral (arXiv:2401.04088), DeepSeekMoE (arXiv:2401.06066), auxiliary-loss-free
balance (arXiv:2408.15664), DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dlo_lib.models.experts import Experts, Segments
from dlo_lib.models.router import MoEConfig, Router
from dlo_lib.models.token_dispatch import capacity_of, combine_rows, plan_dispatch, scatter_tokens


@dataclass(frozen=True, eq=False)
class RoutingStats:
    """What the router did in the last forward, over the data of all ranks of the batch unless stated.

    Attributes:
        load: (num_experts,) int64, the number of choices of each expert, before drops.
        dropped: () int64, the number of choices that this rank dropped.
        balance_loss, z_loss: () the losses, without their coefficients. Each rank has its share; their mean
            over the ranks is the loss.
    """

    load: Tensor
    dropped: Tensor
    balance_loss: Tensor
    z_loss: Tensor


class PendingRows(Protocol):
    """Rows on their way to their experts, or back."""

    def wait(self) -> tuple[Tensor, Segments]:
        """Return the rows, (R, hidden), and how they are sorted."""


class TokenExchange(Protocol):
    """Moves rows to the ranks that store their experts, and back."""

    averaged_ranks: int
    """The number of ranks over which gradients are averaged."""
    token_ranks: int
    """The number of ranks that compute different tokens of the batch."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> PendingRows:
        """Start to send ``rows`` (R, hidden), sorted by expert; ``counts`` (num_experts,) of each expert."""

    def combine(self, rows: Tensor, sent: PendingRows) -> Tensor:
        """Return the results of the rows that ``sent`` dispatched, (R, hidden), in their order."""

    def sum_over_batch(self, tensor: Tensor) -> None:
        """Sum ``tensor`` in place over the ranks that compute different tokens of the batch."""


class LocalExchange:
    """All experts are in this process: rows stay where they are."""

    averaged_ranks = token_ranks = 1

    def dispatch(self, rows: Tensor, counts: Tensor) -> PendingRows:
        return _LocalRows(rows, [counts.tolist()])

    def combine(self, rows: Tensor, sent: PendingRows) -> Tensor:
        return rows

    def sum_over_batch(self, tensor: Tensor) -> None:
        pass


@dataclass(frozen=True)
class _LocalRows:
    rows: Tensor
    segments: Segments

    def wait(self) -> tuple[Tensor, Segments]:
        return self.rows, self.segments


class MoELayer(nn.Module):
    """A mixture-of-experts layer; input and output are (..., hidden).

    Args:
        config: the sizes and choices.
        hidden: the width of the residual stream.
        shared: the shared expert, a module of (..., hidden) to (..., hidden); None for none.

    ``parallel.expert.parallelize_experts`` replaces ``exchange`` and the parameters of ``experts``.
    """

    def __init__(
        self, config: MoEConfig, hidden: int, shared: nn.Module | None = None, **factory: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config, hidden, **factory)
        self.experts = Experts(config.num_experts, hidden, config.intermediate, **factory)
        self.shared = shared
        self.exchange: TokenExchange = LocalExchange()
        self.auxiliary_scale: float | Tensor = 1.0
        self.stats: RoutingStats | None = None
        """Of the last forward; None before it."""
        self._load: Tensor | None = None  # since the last update of the bias, on this rank

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        experts, weights, probabilities, logits = self.router(tokens)
        factor, count = self.config.capacity_factor, self.config.num_experts
        capacity = None if factor is None else capacity_of(factor, len(tokens), self.config.top_k, count)
        plan = plan_dispatch(experts, count, capacity)
        load = torch.bincount(experts.reshape(-1), minlength=count) if capacity else plan.counts

        kind = tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype
        rows = scatter_tokens(tokens.to(dtype), plan)
        sent = self.exchange.dispatch(rows, plan.counts)
        # The shared expert computes while the rows are on their way.
        shared = None if self.shared is None else self.shared(x)
        received, segments = sent.wait()
        returned = self.exchange.combine(self.experts(received, segments), sent)
        with torch.autocast(kind, enabled=False):
            out = combine_rows(returned, weights, plan)
        out = self._with_losses(out, load, plan.dropped, probabilities, logits).view(x.shape)
        return out if shared is None else out + shared

    def _with_losses(
        self, out: Tensor, load: Tensor, dropped: Tensor, probabilities: Tensor, logits: Tensor
    ) -> Tensor:
        """Return ``out``, in whose backward the losses of this rank have their gradients, and the load is
        counted."""
        config, local = self.config, load
        if self.exchange.token_ranks > 1 and (config.balance_loss or config.z_loss):
            load = local.clone()
            self.exchange.sum_over_batch(load)
        choices = load.sum().clamp(min=1).to(probabilities)  # a quotient of integers would be fp32
        # Gradients are averaged over some ranks. Therefore the mean over the tokens of all ranks becomes the
        # sum over those of this rank, times the number of averaged ranks, divided by the number of all
        # tokens.
        share = self.exchange.averaged_ranks * config.top_k / choices
        balance = config.num_experts * torch.dot(load / choices, probabilities.sum(0)) * share
        z = logits.logsumexp(-1).square().sum() * share
        self.stats = RoutingStats(load, dropped, balance.detach(), z.detach())
        losses = config.balance_loss * balance + config.z_loss * z
        return _AddLosses.apply(out, losses, self, local)

    def count_load(self, load: Tensor) -> None:
        """Add to the load since the last update of the bias."""
        if self.config.bias_rate:
            self._load = load if self._load is None else self._load + load

    def take_load(self) -> Tensor:
        """Return the load on this rank since the last call, (num_experts,) int64, and restart the count."""
        load, self._load = self._load, None
        if load is None:
            return torch.zeros(self.config.num_experts, dtype=torch.int64, device=self.router.weight.device)
        return load


class _AddLosses(torch.autograd.Function):
    """The identity. Its backward gives ``losses`` the gradient that they would have in the sum of all losses.

    The load is counted in backward, because a forward that is repeated for activation checkpointing, or that
    only evaluates, has none.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, losses: Tensor, layer: MoELayer, load: Tensor) -> Tensor:
        ctx.layer, ctx.load = layer, load
        ctx.save_for_backward(losses)
        return out.view_as(out)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (losses,) = ctx.saved_tensors
        ctx.layer.count_load(ctx.load)
        return grad, torch.ones_like(losses) * ctx.layer.auxiliary_scale, None, None


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """Return the mixture-of-experts layers of ``model``, in order."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def scale_auxiliary_losses(layers: Iterable[MoELayer], scale: float | Tensor) -> None:
    """Set the scale of the losses of each layer in the following backward passes.

    ``train_step`` sets 1 / (number of micro-batches), times the scale of a ``GradScaler``, so that the loss
    of a layer is the mean over the micro-batches.
    """
    for layer in layers:
        layer.auxiliary_scale = scale


@torch.no_grad()
def update_balance_bias(layers: Iterable[MoELayer]) -> None:
    """Update the balance bias of each layer that has one, from the loads since the last update; called by
    every rank after the step of the optimiser.

        bias += rate * sign(mean load - load),        over all ranks with different parts of the batch

    Cost: one all-reduce of num_experts integers for all layers together.
    """
    biased = [layer for layer in layers if layer.router.balance_bias is not None]
    if not biased:
        return
    loads = torch.stack([layer.take_load() for layer in biased])  # (layers, num_experts)
    biased[0].exchange.sum_over_batch(loads)
    for layer, load in zip(biased, loads.double()):
        layer.router.widen_bias()
        bias = layer.router.balance_bias
        assert bias is not None
        bias += layer.config.bias_rate * torch.sign(load.mean() - load).to(bias)
