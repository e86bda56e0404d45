"""Error feedback: what a compression leaves out of a tensor is added to the next one.

    x <- g + e        sent = C(x)        e <- x - sent

The sum of all that is sent then differs from the sum of all gradients by one error e, however many steps
there are. Without it a compression such as top-k or signs loses the same elements in every step, and the
training ends elsewhere or diverges.

Papers: F. Seide et al., 1-Bit Stochastic Gradient Descent (Interspeech 2014); S. P. Karimireddy et al., Error
Feedback Fixes SignSGD and other Gradient Compression Schemes (arXiv:1901.09847).
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """The error of each tensor that is compressed again and again.

    Args:
        enabled: False to lose what a compression leaves out, to compare.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._errors: dict[str, Tensor] = {}

    def corrected(self, key: str, x: Tensor) -> Tensor:
        """Return ``x`` + e, a new tensor of its shape; e is zero at first.

        A tensor of another size has no error yet: DDP rebuilds its buckets after the first step.
        """
        error = self._errors.get(key)
        return x.clone() if error is None or error.shape != x.shape else x + error

    def keep(self, key: str, corrected: Tensor, sent: Tensor) -> None:
        """Keep what ``sent`` leaves out of ``corrected``, where it is finite: an overflow would stay in all
        later steps."""
        if self.enabled:
            self._errors[key] = torch.nan_to_num(corrected - sent, nan=0.0, posinf=0.0, neginf=0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the errors. They belong to this rank: a resumed run gives each rank its errors back."""
        return dict(self._errors)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Replace the errors by copies of those of ``state``."""
        self._errors = {key: error.clone() for key, error in state.items()}

    def norm(self) -> float:
        """Return the Euclidean norm of all errors together."""
        norms = [error.float().norm() for error in self._errors.values()]
        return float(torch.stack(norms).norm()) if norms else 0.0
