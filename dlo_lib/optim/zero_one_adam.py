"""0/1 Adam: most steps send one bit of each element, and later most steps send nothing.

    first phase, with growing intervals k between the exact steps:
        exact step:     g <- mean over ranks            m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g²
        other steps:    g <- one-bit mean over ranks    m <- b1 m + (1 - b1) g
        p <- p - lr (m' / (sqrt(v') + eps) + wd p)

    second phase, v frozen, with growing intervals k between the steps that communicate:
        m <- b1 m + (1 - b1) g of this rank     d <- d + lr m     p <- p - lr (m / (sqrt(v') + eps) + wd p)
        every k-th step:    d <- one-bit mean of d over ranks     m <- d / (sum of lr)
                            p <- (p after the last communication, decayed) - d / (sqrt(v') + eps)     d <- 0

v changes less and less, so the exact steps become rare: the interval doubles after ``exact_per_interval`` of
them. With v frozen, the distance that the parameters have moved since the last communication is linear in the
sum of the momenta, so ranks can move apart for some steps and then agree on the mean of d. One bit in one of
k steps is less than a bit in each. m' and v' are corrected for their start at zero, which no longer matters
in the second phase.

Bytes of a step, Ψ elements on N ranks, f = (N - 1) / N: exact 8 Ψ f, in one bit Ψ f / 4, and in the second
phase Ψ f / (4 k) on average.

Paper: Y. Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, algorithm 1
and section 6 (arXiv:2202.06009). m is updated before its use, as in Adam and in DeepSpeed's implementation.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dlo_lib.optim.flat_moments import FlatMoments


class ZeroOneAdam(FlatMoments):
    """The optimiser of the module's docstring; it communicates as ``FlatMoments`` says. Between two
    communications of the second phase, the ranks have different parameters.

    Args:
        params: parameters or parameter groups. Every rank has the same ones, with equal values.
        freeze_after: the last step of the first phase, after the warm-up of the learning rate.
        lr: the learning rate.
        betas: the factors b1 and b2.
        eps: the constant beside the root.
        weight_decay: the factor wd, decoupled as in AdamW.
        exact_per_interval: the number of exact steps after which the interval between two of them doubles.
        steps_per_interval: the number of steps of the second phase after which its interval doubles.
        longest: the longest interval of the second phase.
        group: the ranks; None is all of them.
        error_feedback: False to lose what the signs leave out, to compare.
    """

    kept = (*FlatMoments.kept, "moved", "base", "rate_sums", "interval", "exact_steps", "local_steps")

    def __init__(
        self,
        params: ParamsT,
        freeze_after: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        exact_per_interval: int = 16,
        steps_per_interval: int = 32_768,
        longest: int = 16,
        group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, group, error_feedback)
        self.freeze_after, self.exact_per_interval = freeze_after, exact_per_interval
        self.steps_per_interval, self.longest = steps_per_interval, longest
        self.moved, self.base = torch.zeros_like(self.momentum), torch.zeros_like(self.momentum)
        """d, and the parameters after the last communication, decayed; (elements,)."""
        self.rate_sums = [0.0] * len(self.params)
        self.interval, self.exact_steps, self.local_steps = 1, 0, 0

    def update(self, gradient: Tensor) -> None:
        if self.frozen_at:
            self._second_phase(gradient)
        else:
            self._first_phase(gradient)

    def _first_phase(self, gradient: Tensor) -> None:
        beta1, beta2 = self.betas
        exact = self.steps % self.interval == 0
        mean = self.exact_mean(gradient) if exact else self.one_bit_mean(gradient)
        self.momentum.lerp_(mean, 1 - beta1)
        if exact:
            self.variance.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
            self.exact_steps += 1
            if self.exact_steps % self.exact_per_interval == 0:
                self.interval *= 2
        self._move(self.momentum / (1 - beta1**self.steps) / self._roots())
        if self.steps >= self.freeze_after:
            self.frozen_at, self.interval = self.steps, 1
            self._mean.load_state_dict({})  # the errors are those of gradients
            self.base.copy_(torch.cat([param.flatten() for param in self.params]))

    def _second_phase(self, gradient: Tensor) -> None:
        self.momentum.lerp_(gradient, 1 - self.betas[0])
        roots = self._roots()
        self._move(self.momentum / roots)
        parts = zip(*map(self.by_param, (self.base, self.moved, self.momentum)), self.rates(), strict=True)
        for number, (base, moved, momentum, (rate, decay)) in enumerate(parts):
            base.mul_(1 - rate * decay)
            moved.add_(momentum, alpha=rate)
            self.rate_sums[number] += rate
        self.local_steps += 1
        if self.local_steps % self.interval == 0:
            self._agree(roots)
        if self.local_steps % self.steps_per_interval == 0:
            self.interval = min(self.longest, 2 * self.interval)

    def _agree(self, roots: Tensor) -> None:
        """Let all ranks have moved by the mean of their distances; their parameters are then equal."""
        mean = self.one_bit_mean(self.moved)
        self.base -= mean / roots
        self.moved.zero_()
        parts = zip(self.params, *map(self.by_param, (self.base, self.momentum, mean)), strict=True)
        for number, (param, base, momentum, distance) in enumerate(parts):
            param.copy_(base)
            if self.rate_sums[number]:
                momentum.copy_(distance / self.rate_sums[number])
        self.rate_sums = [0.0] * len(self.params)

    def _move(self, direction: Tensor) -> None:
        parts = zip(self.params, self.by_param(direction), self.rates(), strict=True)
        for param, part, (rate, decay) in parts:
            param.mul_(1 - rate * decay).add_(part, alpha=-rate)

    def _roots(self) -> Tensor:
        corrected = self.variance / (1 - self.betas[1] ** max(1, self.exact_steps))
        return corrected.sqrt_().add_(self.eps)
