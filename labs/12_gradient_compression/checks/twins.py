"""What the results are compared with: one process with the tensors of all ranks, in float64.

Errors are not carried from step to step here: what a rank has not sent is all that it had, less all that
it has sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlo_lib.grading.checks.twins import twin

Inputs = list[list[Tensor]]
"""``inputs[rank][step]``"""


def bytes_by_messages(scheme: str, rows: int, columns: int, ranks: int, kept: int) -> float:
    """The bytes of one rank: what it sends to a neighbour in one step of each collective, N - 1 times. An
    all-reduce counts as two collectives.
    """
    part = rows * columns / ranks
    in_a_step = {
        "fp32": [4 * part, 4 * part],
        "fp16": [2 * part, 2 * part],
        "top-k": [4 * kept, 8 * kept],
        "one-bit": [part / 8, 4, part / 8, 4],
        "low-rank": 2 * [4 * rows * kept / ranks, 4 * columns * kept / ranks],
    }
    return float(sum(sum(in_a_step[scheme]) for _ in range(ranks - 1)))


@twin
def mean_of_pairs(pairs: list[tuple[Tensor, Tensor]], size: int, last_wins: bool = False) -> Tensor:
    """The mean of tensors with these values at these positions. ``last_wins``: the others are lost."""
    total = [0.0] * size
    for values, positions in pairs:
        for value, position in zip(values.tolist(), positions.tolist()):
            total[position] = value / len(pairs) + (0.0 if last_wins else total[position])
    return torch.tensor(total, dtype=pairs[0][0].dtype)


def fed_shares(xs: list[Tensor], share: float) -> list[Tensor]:
    """What a compression sends that keeps a share of each element, with error feedback from zero."""
    sent: list[Tensor] = []
    for step in range(len(xs)):
        sent.append(share * (sum(xs[: step + 1]) - sum(sent)))
    return sent


def signs(x: Tensor) -> Tensor:
    """The mean magnitude of x, with the sign of each element."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype) * x.abs().sum() / x.numel()


class OneBit:
    """The one-bit mean, step after step. ``first`` and ``second``: has this compression error feedback?"""

    def __init__(self, like: Tensor, world: int, first: bool = True, second: bool = True) -> None:
        self.first, self.second, self.zero = first, second, torch.zeros_like(like)
        self.given, self.sent = [self.zero] * world, [self.zero] * world
        self.means, self.results = self.zero, self.zero

    def step(self, tensors: list[Tensor]) -> Tensor:
        """The result for one tensor of each rank."""
        self.given = [total + own for total, own in zip(self.given, tensors)]
        late = [total - before for total, before in zip(self.given, self.sent)] if self.first else tensors
        arrived = [signs(own) for own in late]
        self.sent = [before + now for before, now in zip(self.sent, arrived)]
        mean = sum(arrived) / len(arrived)
        self.means = self.means + mean
        whole = self.means - self.results if self.second else mean
        found = torch.cat([signs(part) for part in whole.chunk(len(arrived))])
        self.results = self.results + found
        return found


@twin
def one_bit_means(inputs: Inputs, first: bool = True, second: bool = True) -> list[Tensor]:
    """The mean of each step."""
    means = OneBit(inputs[0][0], len(inputs), first, second)
    return [means.step(list(tensors)) for tensors in zip(*inputs)]


@twin
def low_rank_means(inputs: Inputs, q: Tensor, feedback: bool = True, warm: bool = True) -> list[Tensor]:
    """The mean of each step: the projection of the mean matrix on the columns of its product with Q."""
    world, found, first = len(inputs), [], q.double()
    q, results = first, torch.zeros_like(inputs[0][0], dtype=torch.float64)
    given = [torch.zeros_like(results) for _ in inputs]
    for step in range(len(inputs[0])):
        given = [total + own[step].double() for total, own in zip(given, inputs)]
        current = given if feedback else [own[step].double() for own in inputs]
        mean = sum(current) / world - (results if feedback else 0)
        product = mean @ (q if warm else first)
        found.append((product @ (torch.linalg.pinv(product) @ mean)).to(inputs[0][0].dtype))
        q = mean.T @ product
        q = q / q.norm()
        results = results + found[-1]
    return found


def weighted(values: Sequence[Tensor], beta: float) -> Tensor:
    """The moving average after the last value, as a sum over all values."""
    return sum((1 - beta) * beta ** (len(values) - 1 - place) * value for place, value in enumerate(values))


def last_of_warmup(inputs: Inputs, form: str, betas: tuple[float, float], warmup: int, **_: object) -> int:
    """The last step of the warm-up; 0 if it does not end. ``form``: "raw" for the norm of v, "norm" for the
    Euclidean norm of the corrected one."""
    distance, norms, variance = round(1 / (1 - betas[1])), [], torch.zeros_like(inputs[0][0])
    for step, gradients in enumerate(zip(*inputs), start=1):
        variance = betas[1] * variance + (1 - betas[1]) * (sum(gradients) / len(inputs)) ** 2
        size = float(variance.norm() if form == "norm" else variance.sum())
        norms.append(size / (1 if form == "raw" else 1 - betas[1] ** step))
        if step > distance and step >= warmup and norms[-1] / norms[-1 - distance] >= 0.96:
            return step
    return 0


@twin
def adam_path(
    x: Tensor, inputs: Inputs, lr: float, betas: tuple[float, float], eps: float, warmup: int, form: str = ""
) -> tuple[list[Tensor], int]:
    """The parameters before and after each step, and the last step of the warm-up."""
    world, steps = len(inputs), len(inputs[0])
    means = [sum(own[step] for own in inputs) / world for step in range(steps)]
    raw = [weighted([mean**2 for mean in means[: step + 1]], betas[1]) for step in range(steps)]
    corrected = [value / (1 - betas[1] ** (step + 1)) for step, value in enumerate(raw)]
    frozen = last_of_warmup(inputs, form, betas, warmup)
    path, momentum = [x], torch.zeros_like(x)
    bits = OneBit(x, world)
    for step in range(steps):
        if step < frozen or not frozen:
            momentum, root = weighted(means[: step + 1], betas[0]), corrected[step].sqrt()
        else:
            momentum = bits.step([betas[0] * momentum + (1 - betas[0]) * own[step] for own in inputs])
            last = raw[frozen - 1] / (1 - betas[1] ** (step + 1 if form == "correction" else frozen))
            root = (corrected[step] if form == "variance" else last).sqrt()
        x = x - lr * momentum / (1 - betas[0] ** (step + 1)) / (root + eps)
        path.append(x)
    return path, frozen
