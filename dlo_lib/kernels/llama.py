"""Puts the fused operations into a Llama, in place, without another model class.

The modules of ``models.llama`` compute with functions that an instance can replace. The output projection
becomes a ``LossHead``, because its product and the cross-entropy are one operation; parameters, their names
and the values of a checkpoint stay.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_lib.base.errors import UserError
from dlo_lib.kernels.cross_entropy import cross_entropy
from dlo_lib.kernels.cross_entropy_terms import LossReduction
from dlo_lib.kernels.flash_attention import flash_attention
from dlo_lib.kernels.linear_cross_entropy import linear_cross_entropy
from dlo_lib.kernels.rms_norm import rms_norm
from dlo_lib.kernels.rope import rope
from dlo_lib.kernels.swiglu import swiglu
from dlo_lib.models.llama import MLP, Attention, Llama, RMSNorm


class FusedOperation(enum.Enum):
    """An operation of a Llama that has a fused form."""

    RMS_NORM = "rms_norm"
    ROPE = "rope"
    SWIGLU = "swiglu"
    ATTENTION = "attention"
    """FlashAttention where PyTorch writes the scores to memory: fp32 with grouped queries. Elsewhere
    PyTorch has a fused kernel, which stays."""
    LOSS = "loss"
    """The output projection with the cross-entropy."""


class Kernels(enum.Enum):
    """Which operations of a model are fused."""

    EAGER = "eager"
    """None: the operators of PyTorch, one after the other."""
    FUSED = "fused"
    """All that have a fused form."""

    @property
    def operations(self) -> frozenset[FusedOperation]:
        return frozenset(FusedOperation) if self is Kernels.FUSED else frozenset()


class LossHead(nn.Linear):
    """An output projection that also computes the sum of the losses of the valid tokens, without logits."""

    def __init__(self, head: nn.Linear) -> None:
        nn.Module.__init__(self)  # the parameters are those of head
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits (batch, seq, vocab), or with ``targets`` (batch, seq) the sum of the losses,
        ()."""
        if targets is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, targets, reduction=LossReduction.SUM)


def fuse(
    model: Llama,
    operations: Iterable[FusedOperation] = tuple(FusedOperation),
    takes_logits: bool = False,
) -> Llama:
    """Replace operations of ``model`` by their fused form, in place, and return the model.

    Call it before the model is wrapped. With ``FusedOperation.LOSS``, ``model(tokens, targets)`` returns the
    sum of the losses of the valid tokens, and ``train_step`` needs ``loss_options``.

    Args:
        model: on any device, also on the meta device.
        operations: the operations to replace.
        takes_logits: whether the loss is computed outside of the model (``ParallelPlan.takes_logits``). The
            output projection then stays.

    Raises:
        UserError: the output projection has a bias.
    """
    chosen = set(operations)
    for module in model.modules():
        if isinstance(module, RMSNorm) and FusedOperation.RMS_NORM in chosen:
            module.normalize = rms_norm
        elif isinstance(module, Attention):
            if FusedOperation.ROPE in chosen:
                module.rotate = rope
            if FusedOperation.ATTENTION in chosen:
                module.attend = _attend
        elif isinstance(module, MLP) and FusedOperation.SWIGLU in chosen:
            module.activate = swiglu
    if FusedOperation.LOSS in chosen and not takes_logits and not isinstance(model.lm_head, LossHead):
        if model.lm_head.bias is not None:
            raise UserError("the output projection has a bias: fuse the other operations only")
        model.lm_head = LossHead(model.lm_head)
    return model


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the sum of the losses of the valid tokens, (), as ``optim.step.summed_cross_entropy`` does, and
    save the logits instead of the log-probabilities."""
    return cross_entropy(logits, targets, reduction=LossReduction.SUM)


def loss_options(operations: Collection[FusedOperation], takes_logits: bool) -> dict[str, Any]:
    """Return the arguments of ``train_step`` that choose the loss.

    Args:
        operations, takes_logits: those of ``fuse``.
    """
    if FusedOperation.LOSS not in operations:
        return {}
    return {"sum_of_losses": summed_cross_entropy} if takes_logits else {"loss_in_model": True}


def _attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    # Inside autocast the inputs may be fp32, and PyTorch's function casts them.
    if enable_gqa and q.dtype is torch.float32 and not torch.is_autocast_enabled(q.device.type):
        return flash_attention(q, k, v, is_causal)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
