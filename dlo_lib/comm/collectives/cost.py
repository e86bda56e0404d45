"""The α–β model: a message of m bytes takes α + β m seconds. An algorithm costs its consecutive messages.

α is the latency of a message in seconds, β the time per byte in seconds, 1/β the bandwidth of a link. For B
bytes on N ranks, with L = ⌈log₂ N⌉:

    ring all-reduce                     2 (N-1) α + 2 (N-1)/N B β
    tree all-reduce                     2 L α     + 2 L B β
    ring reduce-scatter, all-gather     (N-1) α   + (N-1)/N B β         B: the full tensor
    pairwise all-to-all                 (N-1) α   + (N-1)/N B β         B: the data of one rank for all ranks
    tree broadcast                      L α       + L B β

Trees are faster for small messages, rings for large ones; ``crossover`` gives the size at which they are
equal. The model ignores the time of the additions, links shared by several messages, and ranks that start
late. A fit to measurements includes these as far as they grow with B.

R. Hockney, *The communication challenge for MPP* (1994), doi:10.1016/S0167-8191(06)80021-9; Thakur et al.,
see ``tree``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlo_lib.base.errors import UserError


class Algorithm(enum.Enum):
    """The algorithms of this package."""

    RING_ALL_REDUCE = "ring all-reduce"
    TREE_ALL_REDUCE = "tree all-reduce"
    RING_REDUCE_SCATTER = "ring reduce-scatter"
    RING_ALL_GATHER = "ring all-gather"
    PAIRWISE_ALL_TO_ALL = "pairwise all-to-all"
    TREE_BROADCAST = "tree broadcast"

    def messages(self, ranks: int) -> int:
        """Return the number of consecutive messages on ``ranks`` ranks."""
        rounds = (ranks - 1).bit_length()  # ⌈log₂ N⌉
        return {
            Algorithm.RING_ALL_REDUCE: 2 * (ranks - 1),
            Algorithm.TREE_ALL_REDUCE: 2 * rounds,
            Algorithm.TREE_BROADCAST: rounds,
        }.get(self, ranks - 1)

    def share(self, ranks: int) -> float:
        """Return the bytes of these messages together, in units of B."""
        if self in (Algorithm.TREE_ALL_REDUCE, Algorithm.TREE_BROADCAST):
            return float(self.messages(ranks))
        return self.messages(ranks) / ranks


@dataclass(frozen=True)
class AlphaBeta:
    """The cost of a link.

    Attributes:
        alpha: latency of a message, in seconds.
        beta: time per byte, in seconds.
    """

    alpha: float
    beta: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; infinite if ``beta`` is 0."""
        return 1 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class Measurement:
    """One timed collective: ``bytes`` is B of the model, ``seconds`` is the time of the slowest rank."""

    algorithm: Algorithm
    bytes: int
    ranks: int
    seconds: float


def cost(algorithm: Algorithm, bytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Return the seconds that the model predicts; 0 on one rank.

    Raises:
        UserError: ``ranks`` is less than 1, or ``bytes`` is negative.
    """
    if ranks < 1 or bytes < 0:
        raise UserError(f"{bytes} bytes on {ranks} ranks: use at least 0 bytes and 1 rank")
    return algorithm.messages(ranks) * alpha + algorithm.share(ranks) * bytes * beta


def cheapest(
    algorithms: Sequence[Algorithm], bytes: float, ranks: int, alpha: float, beta: float
) -> Algorithm:
    """Return the algorithm with the lowest cost; the first one if several cost the same."""
    return min(algorithms, key=lambda algorithm: cost(algorithm, bytes, ranks, alpha, beta))


def crossover(first: Algorithm, second: Algorithm, ranks: int, alpha: float, beta: float) -> float | None:
    """Return the bytes at which both cost the same, or None if one of them is never more expensive.

    Below this size the algorithm with fewer messages is cheaper, above it the one that sends fewer bytes.
    """
    messages = second.messages(ranks) - first.messages(ranks)
    share = first.share(ranks) - second.share(ranks)
    return None if messages * share <= 0 or alpha <= 0 or beta <= 0 else messages * alpha / (share * beta)


def fit_alpha_beta(measurements: Iterable[Measurement]) -> AlphaBeta:
    """Fit α ≥ 0 and β ≥ 0 to the measurements, by least squares of the *relative* errors.

    Absolute errors would leave α undetermined, because an error of 1 % on the largest tensor is longer than
    the whole time of the smallest. Measure sizes from a few bytes, where only α matters, to some MB.

    Raises:
        UserError: a time is not positive, or the measurements do not determine both α and β, for example
            because they all have one size.
    """
    rows = []
    for one in measurements:
        if not one.seconds > 0:
            raise UserError(
                f"{one.algorithm.value} of {one.bytes} bytes took {one.seconds} s: "
                "remove measurements whose time is not positive"
            )
        # messages / seconds * α + bytes / seconds * β = 1
        rows.append(
            (
                one.algorithm.messages(one.ranks) / one.seconds,
                one.algorithm.share(one.ranks) * one.bytes / one.seconds,
            )
        )
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if determinant <= 1e-12 * mm * bb:
        raise UserError(
            "these measurements do not determine both α and β: "
            "measure a small and a large size on 2 or more ranks"
        )
    alpha, beta = (m * bb - b * mb) / determinant, (mm * b - mb * m) / determinant
    if alpha < 0:
        return AlphaBeta(0.0, b / bb)
    if beta < 0:
        return AlphaBeta(m / mm, 0.0)
    return AlphaBeta(alpha, beta)
