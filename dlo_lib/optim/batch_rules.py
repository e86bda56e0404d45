"""The learning rate for another batch, from one that is known to be good.

    linear         lr <- lr k        k = new batch / known batch
    square root    lr <- lr sqrt(k)

Linear: k small steps with nearly the same weights move by the sum of their gradients, and one step with the
mean of a batch k times larger moves as far at k times the rate. It is right for SGD while the noise of the
gradient is large and the rate is small; with a warm-up, because early weights change fast. Square root: the
step of Adam, LAMB or Lion has a length that does not depend on the gradient's. What grows with the rate is
the variance of k small steps, and it is the same at sqrt(k) times the rate. Neither rule holds beyond the
batch at which the noise no longer matters: measure there.

Papers: P. Goyal et al., Accurate, Large Minibatch SGD (arXiv:1706.02677), section 2.1; S. Malladi et al., On
the SDEs and Scaling Rules for Adaptive Gradient Algorithms (arXiv:2205.10287).
"""

from __future__ import annotations

import enum
import math

from dlo_lib.base.errors import require_count


class BatchRule(enum.Enum):
    """How the learning rate follows the batch."""

    NONE = "none"
    LINEAR = "linear"
    SQRT = "sqrt"

    def scaled(self, lr: float, batch: int, known: int) -> float:
        """Return the learning rate of steps of ``batch`` sequences.

        Args:
            lr: the rate that is good for steps of ``known`` sequences.

        Raises:
            UserError: a batch is below 1.
        """
        require_count("the batch", batch)
        require_count("the batch of the known rate", known)
        factor = batch / known
        return lr * {BatchRule.NONE: 1.0, BatchRule.LINEAR: factor, BatchRule.SQRT: math.sqrt(factor)}[self]
