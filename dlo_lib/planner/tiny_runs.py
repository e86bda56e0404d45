"""Trainings of a fraction of a second, on which scaling laws are tried, and the budget that pays for them.

The language has V tokens, and the next token depends on the last one only. Tokens follow Zipf's law, and the
logits of the next token are a V x V matrix whose singular values fall as a power law. So a wider model and
more tokens both help with diminishing returns, as in a large language, and the entropy, which no model can
beat, is known. The model of width d has two tables of V x d,

    logits(next | last) = W_in[last] W_out^T,

and is trained on fresh tokens with Adam. The look-up in W_in computes nothing, so N = V d parameters are in
matrix products, and D tokens cost 6 N D FLOPs. The loss is the exact cross-entropy, in nats a token, over all
pairs of tokens. On one core 10^9 FLOPs take about 0.06 s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlo_lib.base.errors import require_count
from dlo_lib.base.one_thread import one_torch_thread

BATCH = 256
"""Tokens of a step."""
_BETAS, _WARMUP = (0.9, 0.95), 0.05


class TinyLanguage:
    """A drawn language.

    Args:
        vocab_size: tokens, at least 2.
        seed: of the language; two seeds give two languages.
        spectrum: the exponent of the singular values; a larger one makes wide models less useful.
        scale: the standard deviation of the logits; a larger one lowers the entropy.

    Raises:
        UserError: ``vocab_size`` is below 2.
    """

    def __init__(self, vocab_size: int, seed: int, spectrum: float = 0.5, scale: float = 3.0) -> None:
        require_count("vocab_size", vocab_size, least=2)
        draw = torch.Generator().manual_seed(seed)
        square = (vocab_size, vocab_size)
        left, right = (
            torch.linalg.qr(torch.randn(square, generator=draw, dtype=torch.float64))[0] for _ in range(2)
        )
        ranks = torch.arange(1, vocab_size + 1, dtype=torch.float64)
        logits = (left * ranks**-spectrum) @ right.T
        self.vocab_size, self.seed = vocab_size, seed
        self.frequency = (1 / ranks) / (1 / ranks).sum()
        self.next_token = (logits * (scale / logits.std())).softmax(-1)
        self._ends = (self.next_token.cumsum(-1) + torch.arange(vocab_size)[:, None]).flatten()

    @property
    def entropy(self) -> float:
        """The smallest loss that a model can have, in nats a token."""
        return self._cross_entropy(self.next_token.log())

    def flops(self, width: int, tokens: int) -> int:
        """Return what a training costs: 6 N D, with the parameters in matrix products."""
        return 6 * self.vocab_size * width * tokens

    def train(self, width: int, tokens: int, seed: int = 0) -> float:
        """Train a model on ``tokens`` fresh tokens, and return its loss in nats a token.

        Raises:
            UserError: ``width`` is below 1, or there are fewer tokens than a step has.
        """
        require_count("width", width)
        require_count("tokens", tokens, least=BATCH)
        with one_torch_thread():
            return self._train(width, tokens, seed)

    def _train(self, width: int, tokens: int, seed: int) -> float:
        draw = torch.Generator().manual_seed(hash((self.seed, seed, width, tokens)) % 2**63)
        size = self.vocab_size
        weights = 0.1 * torch.randn(2 * size, width, generator=draw)
        tables, gradients = (weights[:size], weights[size:]), torch.zeros_like(weights)
        first, second = torch.zeros_like(weights), torch.zeros_like(weights)
        last, after = self._text(tokens, draw)
        steps = tokens // BATCH
        peak = 0.08 * (width / 16) ** -0.7  # a wide model sums more products in each logit
        for step in range(1, steps + 1):
            part = slice((step - 1) * BATCH, step * BATCH)
            _backward(tables, last[part], after[part], gradients)
            first.lerp_(gradients, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradients, gradients, value=1 - _BETAS[1])
            rate = peak * min(1.0, step / (_WARMUP * steps + 1)) * (1 - (step - 1) / steps)
            root = (second / (1 - _BETAS[1] ** step)).sqrt_().add_(1e-8)
            weights.addcdiv_(first, root, value=-rate / (1 - _BETAS[0] ** step))
        w_in, w_out = (table.double() for table in tables)
        return self._cross_entropy((w_in @ w_out.T).log_softmax(-1))

    def _text(self, tokens: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw pairs of a token and the next one."""
        last = torch.multinomial(self.frequency, tokens, replacement=True, generator=draw)
        where = last + torch.rand(tokens, generator=draw, dtype=torch.float64)
        after = torch.searchsorted(self._ends, where) - last * self.vocab_size
        return last, after.clamp(0, self.vocab_size - 1)

    def _cross_entropy(self, log_probability: Tensor) -> float:
        return -float((self.frequency[:, None] * self.next_token * log_probability).sum())


def _backward(tables: tuple[Tensor, Tensor], last: Tensor, after: Tensor, gradients: Tensor) -> None:
    """Write the gradients of the mean cross-entropy: softmax - one-hot, times the other factor."""
    w_in, w_out = tables
    hidden = w_in[last]
    error = (hidden @ w_out.T).softmax(-1)
    error[torch.arange(len(last)), after] -= 1
    error /= len(last)
    torch.mm(error.T, hidden, out=gradients[len(w_in) :])
    gradients[: len(w_in)].zero_().index_add_(0, last, error @ w_out)


class RunBudget:
    """Runs trainings as long as FLOPs are left: reserves the cost of a run, refunds a lost run, refuses
    a run that costs more than what is left or than one run may cost.

    Args:
        language: what the models are trained on.
        flops: the budget.
        lost: the numbers of the runs, from 0, whose node fails.
        largest: the part of the budget that one run may cost.

    Attributes:
        left: the FLOPs that are left.
        runs: (width, tokens, loss) of each run that was done.
        failed: (width, tokens) of each lost run.
        refused: (width, tokens) of each run that was refused.
    """

    def __init__(
        self, language: TinyLanguage, flops: float, lost: tuple[int, ...] = (), largest: float = 1.0
    ) -> None:
        self.language, self.left, self._lost = language, float(flops), lost
        self._most = largest * flops
        self.runs: list[tuple[int, int, float]] = []
        self.failed: list[tuple[int, int]] = []
        self.refused: list[tuple[int, int]] = []

    def run(self, width: int, tokens: int) -> dict[str, Any]:
        """Train a model if the budget allows it.

        Returns:
            ``status``: "done", "lost" or "refused"; ``loss``, None unless done; ``left``, the FLOPs after it.

        Raises:
            UserError: the sizes are not whole numbers, or too small.
        """
        require_count("width", width)
        require_count("tokens", tokens, least=BATCH)
        cost, loss = self.language.flops(width, tokens), None
        if cost > min(self.left, self._most):
            self.refused.append((width, tokens))
            status = "refused"
        else:
            self.left -= cost  # reserved
            if len(self.runs) + len(self.failed) in self._lost:
                self.left += cost  # refunded
                self.failed.append((width, tokens))
                status = "lost"
            else:
                loss, status = self.language.train(width, tokens), "done"
                self.runs.append((width, tokens, loss))
        return {"status": status, "loss": loss, "left": self.left}
