"""Batch normalisation over the batches of all ranks. With few samples per GPU, the statistics of one GPU are
too noisy for training.

Each rank computes the mean and the sum of squared deviations M2 of its samples. The ranks gather them (2C+1
numbers each) and combine them in the same order, so that the results are bitwise equal on all ranks:

    n = sum n_i    mean = sum n_i mean_i / n    M2 = sum M2_i + sum n_i (mean_i - mean)^2    var = M2 / n

This form has no cancellation, in contrast to the difference between the sum of squares and the square of the
sum. The batches of the ranks may have different sizes, including 0. Backward needs two sums per channel over
all ranks: sum dy and sum dy*x_hat. Sent per layer and step: an all-gather of (2C+1)*N numbers and an
all-reduce of 2C numbers.

Papers: S. Ioffe, C. Szegedy (arXiv:1502.03167); combination of moments: T. F. Chan, G. H. Golub, R. J.
LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances (1979).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from dlo_lib.base.errors import UserError


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation (``nn.BatchNorm1d/2d/3d``) with training statistics over the samples of all ranks.

    Args:
        num_features: the number of channels C. The input is (B, C, ...); B may differ between ranks and may
            be 0.
        eps, momentum, affine, track_running_stats, device, dtype: as in ``nn.BatchNorm2d``.
        group: the ranks; None for all ranks, or for this process if there is no process group.

    For 16-bit inputs, the statistics are in fp32. Every rank must run every training forward and backward.

    Raises:
        UserError: all ranks together have a single value per channel, which has no variance; the input has
            another number of channels.
    """

    def __init__(
        self, num_features: int, *args: Any, group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        self.group = group

    @classmethod
    def convert(cls, module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every batch normalisation in ``module``. The parameters and buffers remain the same
        tensors.

        Returns ``module``, or its replacement if it is a batch normalisation.
        """
        others = (cls, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
        if isinstance(module, _BatchNorm) and not isinstance(module, others):
            options = (module.eps, module.momentum, module.affine, module.track_running_stats)
            made = cls(module.num_features, *options, group=group)
            made.train(module.training)
            for name, held in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                setattr(made, name, held)
            return made
        for name, child in module.named_children():
            replacement = cls.convert(child, group)
            if replacement is not child:
                setattr(module, name, replacement)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, (B, C, ...). The result has the same shape and dtype."""
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None:
            running = (self.running_mean, self.running_var)
            return F.batch_norm(x, *running, self.weight, self.bias, False, 0.0, self.eps)
        out, mean, m2, count = _Normalise.apply(x, self.weight, self.bias, self.eps, self._ranks())
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._update(mean, m2, count)
        return out

    def _ranks(self) -> dist.ProcessGroup | None:
        if not self.training:
            return None  # without running statistics, evaluation uses the batch of this rank only
        return self.group if self.group is not None else dist.group.WORLD

    @torch.no_grad()
    def _update(self, mean: Tensor, m2: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((m2 / (count - 1)).to(self.running_var.dtype), share)

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2 or x.size(1) != self.num_features:
            raise UserError(
                f"input of shape {tuple(x.shape)} for {self.num_features} channels: "
                f"use (batch, {self.num_features}, ...)",
            )


class _Normalise(torch.autograd.Function):
    """Returns the normalised input, and the mean (C,), M2 (C,) and count () of all ranks for the running
    statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        over = [dim for dim in range(x.dim()) if dim != 1]
        mean, m2, count = gathered_moments(wide, over, group)
        if count.item() <= 1:
            raise UserError(
                "batch normalisation of a single value per channel has no variance: "
                "use a larger batch, or eval()",
            )
        scale = (m2 / count + eps).rsqrt()
        normal = (wide - _by_channel(mean, x)) * _by_channel(scale, x)
        out = normal if weight is None else normal * _by_channel(weight, x)
        out = out if bias is None else out + _by_channel(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group, ctx.over = group, over
        ctx.mark_non_differentiable(mean, m2, count)
        return out.to(x.dtype), mean, m2, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        normal = (x.to(mean.dtype) - _by_channel(mean, x)) * _by_channel(scale, x)
        grad = grad.to(mean.dtype)
        sums = torch.stack([grad.sum(ctx.over), (grad * normal).sum(ctx.over)])
        local = sums.clone()  # the local gradients of weight and bias, which data parallelism averages
        if ctx.group is not None and dist.get_world_size(ctx.group) > 1:
            dist.all_reduce(sums, group=ctx.group)
        of_one, of_normal = sums / count
        factor = scale if weight is None else scale * weight.to(scale.dtype)
        grad_x = (grad - _by_channel(of_one, x) - normal * _by_channel(of_normal, x)) * _by_channel(factor, x)
        of_weight = local[1].to(weight.dtype) if weight is not None else None
        of_bias = local[0].to(weight.dtype) if weight is not None else None
        return grad_x.to(x.dtype), of_weight, of_bias, None, None


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def gathered_moments(
    x: Tensor, over: list[int], group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean (C,), M2 (C,) and number () of the samples of all ranks; called by every rank.

    Args:
        x: the samples of this rank, (B, C, ...).
        over: all dimensions of ``x`` except the channels.
        group: the ranks; None for this process.
    """
    mean, m2, count = _moments(x, over)
    if group is None or dist.get_world_size(group) == 1:
        return mean, m2, count
    return _combine(_gather(torch.cat([mean, m2, count.view(1)]), group))


def _moments(x: Tensor, over: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean (C,), M2 (C,) and count () of this rank; zeros if it has no sample."""
    count = x.new_tensor(x.numel() // x.size(1))
    mean = x.sum(over) / count.clamp(min=1)
    return mean, (x - _by_channel(mean, x)).square().sum(over), count


def _gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather ``own``, (K,), of the N ranks to (N, K)."""
    rows = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(rows), own, group=group)
    return rows


def _combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the mean, M2 and count of the ranks, (N, 2C+1), to those of all samples."""
    channels = (rows.size(1) - 1) // 2
    means, m2s, counts = rows.split([channels, channels, 1], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return mean, (m2s + counts * (means - mean).square()).sum(0), count
