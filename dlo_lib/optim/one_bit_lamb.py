"""1-bit LAMB: LAMB until its variance is frozen, then a momentum in one bit and a ratio without norms.

    warm-up:      g <- mean over ranks        LAMB, and of each layer  c <- b3 c + (1 - b3) |p| / |u|
    compressed:   m <- one-bit mean over ranks of  b1 m + (1 - b1) g of this rank
                  g' = (m - b1 m_before) / (1 - b1)        w <- b2 w + (1 - b2) g'²
                  f = max over the layer of (sqrt(v') + eps) / (sqrt(w') + eps),  at most 10 % from the last f
                  p <- p - lr c f u,      u = m' / (sqrt(v') + eps) + wd p

LAMB's ratio |p| / |u| changes with the variance, and a frozen v would freeze it. The ratio of the warm-up, c,
is therefore corrected by f, which compares v with a variance w that follows the gradients: they are
reconstructed from the momentum, which all ranks have. A layer whose gradients have shrunk gets longer steps,
as with LAMB.

In one message, layers with a small momentum would get the signs of a common, larger scale. Each layer is
divided by its mean magnitude at the switch before it is compressed, and multiplied afterwards.

Paper: C. Li et al., 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
Convergence Speed, algorithm 1 (arXiv:2104.06069).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.flat_moments import FlatMoments

SMALLEST, LARGEST = 0.01, 10.0
"""Of a ratio of norms."""
FACTORS = (0.5, 4.0)
"""The least and the largest f."""
STRIDE = 0.1
"""The largest relative change of f in a step."""


class OneBitLAMB(FlatMoments):
    """The optimiser of the module's docstring; it communicates as ``FlatMoments`` says. Parameters of one
    dimension have the ratio 1.

    Args:
        params: parameters or parameter groups. Every rank has the same ones, with equal values.
        freeze_after: the last step of the warm-up, after that of the learning rate.
        lr: the fraction of its norm by which a layer moves.
        betas: the factors b1 and b2.
        ratio_beta: the factor b3.
        eps: the constant beside the root.
        weight_decay: the factor wd, inside of u.
        group: the ranks; None is all of them.
        error_feedback: False to lose what the signs leave out, to compare.
    """

    kept = (*FlatMoments.kept, "fresh", "ratios", "factors", "scales")

    def __init__(
        self,
        params: ParamsT,
        freeze_after: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        ratio_beta: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, group, error_feedback)
        self.freeze_after, self.ratio_beta = freeze_after, ratio_beta
        self.fresh = torch.zeros_like(self.momentum)
        """w, (elements,)."""
        self.ratios, self.factors, self.scales = (
            torch.ones(len(self.params), dtype=self.momentum.dtype, device=self.momentum.device)
            for _ in range(3)
        )
        """c, f and the mean magnitudes of the momentum, (parameters,)."""

    def update(self, gradient: Tensor) -> None:
        beta1, beta2 = self.betas
        if self.frozen_at:
            before = self.momentum.clone()
            self.momentum.lerp_(gradient, 1 - beta1)
            scale = torch.cat([one.expand(size) for one, size in zip(self.scales, self.sizes, strict=True)])
            self.momentum.copy_(self.one_bit_mean(self.momentum / scale) * scale)
            mean = (self.momentum - beta1 * before) / (1 - beta1)
            self.fresh.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
        else:
            mean = self.exact_mean(gradient)
            self.momentum.lerp_(mean, 1 - beta1)
            self.variance.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            self.fresh.copy_(self.variance)
        roots = self.corrected_variance().sqrt_().add_(self.eps)
        fresh = (self.fresh / (1 - beta2**self.steps)).sqrt_().add_(self.eps)
        direction = self.momentum / (1 - beta1**self.steps) / roots
        parts = zip(self.by_param(direction), self.by_param(roots / fresh), self.rates(), strict=True)
        for number, (part, quotient, (rate, decay)) in enumerate(parts):
            param = self.params[number]
            moved = part + decay * param
            param.add_(self._ratio(number, param, moved, quotient) * moved, alpha=-rate)
        if not self.frozen_at and self.steps >= self.freeze_after:
            self.frozen_at = self.steps
            means = [part.abs().mean() for part in self.momentum.split(self.sizes)]
            self.scales.copy_(torch.stack(means).clamp_min(torch.finfo(self.momentum.dtype).tiny))

    def _ratio(self, number: int, param: Tensor, moved: Tensor, quotient: Tensor) -> Tensor:
        """Return the ratio of a layer: LAMB's in the warm-up, then c f."""
        if param.ndim < 2:
            return torch.ones_like(self.ratios[number])
        if self.frozen_at:
            last = self.factors[number]
            factor = quotient.amax().clamp(*FACTORS)
            factor = torch.minimum(torch.maximum(factor, last * (1 - STRIDE)), last * (1 + STRIDE))
            self.factors[number] = factor
            return self.ratios[number] * factor
        norm, length = param.norm(), moved.norm()
        ratio = torch.where((norm > 0) & (length > 0), norm / length, torch.ones_like(norm))
        kept = self.ratio_beta * self.ratios[number] + (1 - self.ratio_beta) * ratio.clamp(SMALLEST, LARGEST)
        self.ratios[number] = kept if self.steps > 1 else ratio.clamp(SMALLEST, LARGEST)
        return ratio
