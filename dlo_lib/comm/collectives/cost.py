"""The α–β model: a message of m bytes takes α + β m seconds. An algorithm costs the messages that follow one another, and their bytes.

α is the latency of a message in seconds, β the seconds a byte takes, 1/β the bandwidth of a link. For B bytes on N ranks, L = ⌈log₂ N⌉:

    ring all-reduce                     2 (N-1) α + 2 (N-1)/N B β
    tree all-reduce                     2 L α     + 2 L B β
    ring reduce-scatter, all-gather     (N-1) α   + (N-1)/N B β         B: the full tensor
    pairwise all-to-all                 (N-1) α   + (N-1)/N B β         B: what one rank has for all
    tree broadcast                      L α       + L B β

So trees win where messages are small, rings where they are large; ``crossover`` says where. Left out: the time of the additions, links that
are shared by several messages, and ranks that start late. A fit to measurements takes them in as far as they grow with B.

R. Hockney, *The communication challenge for MPP* (1994), doi:10.1016/S0167-8191(06)80021-9; Thakur et al. as in ``tree``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dlo_lib.errors import UserError


class Algorithm(enum.Enum):
    """The algorithms of this package."""

    RING_ALL_REDUCE = "ring all-reduce"
    TREE_ALL_REDUCE = "tree all-reduce"
    RING_REDUCE_SCATTER = "ring reduce-scatter"
    RING_ALL_GATHER = "ring all-gather"
    PAIRWISE_ALL_TO_ALL = "pairwise all-to-all"
    TREE_BROADCAST = "tree broadcast"

    def messages(self, ranks: int) -> int:
        """How many messages follow one another."""
        rounds = (ranks - 1).bit_length()  # ⌈log₂ N⌉
        return {
            Algorithm.RING_ALL_REDUCE: 2 * (ranks - 1),
            Algorithm.TREE_ALL_REDUCE: 2 * rounds,
            Algorithm.TREE_BROADCAST: rounds,
        }.get(self, ranks - 1)

    def share(self, ranks: int) -> float:
        """The bytes of those messages together, in units of B."""
        if self in (Algorithm.TREE_ALL_REDUCE, Algorithm.TREE_BROADCAST):
            return float(self.messages(ranks))
        return self.messages(ranks) / ranks


@dataclass(frozen=True)
class AlphaBeta:
    """A link.

    Attributes:
        alpha: seconds a message takes however small it is.
        beta: seconds a byte takes.
    """

    alpha: float
    beta: float

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth, infinite where bytes cost nothing."""
        return 1 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class Measurement:
    """One timed collective: ``bytes`` is B of the model, ``seconds`` those of the slowest rank."""

    algorithm: Algorithm
    bytes: int
    ranks: int
    seconds: float


def cost(algorithm: Algorithm, bytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Seconds by the model; 0 on one rank.

    Raises:
        UserError: fewer than one rank, or fewer than no bytes.
    """
    if ranks < 1 or bytes < 0:
        raise UserError(f"{bytes} bytes on {ranks} ranks: use at least 0 bytes and 1 rank")
    return algorithm.messages(ranks) * alpha + algorithm.share(ranks) * bytes * beta


def cheapest(algorithms: Sequence[Algorithm], bytes: float, ranks: int, alpha: float, beta: float) -> Algorithm:
    """The one of ``algorithms`` that costs least; the first of equals."""
    return min(algorithms, key=lambda algorithm: cost(algorithm, bytes, ranks, alpha, beta))


def crossover(first: Algorithm, second: Algorithm, ranks: int, alpha: float, beta: float) -> float | None:
    """The bytes at which both cost the same, None where one is never dearer than the other.

    Below it the one with fewer messages is cheaper, above it the one that sends fewer bytes.
    """
    messages = second.messages(ranks) - first.messages(ranks)
    share = first.share(ranks) - second.share(ranks)
    return None if messages * share <= 0 or alpha <= 0 or beta <= 0 else messages * alpha / (share * beta)


def fit_alpha_beta(measurements: Iterable[Measurement]) -> AlphaBeta:
    """The α ≥ 0 and β ≥ 0 whose costs are nearest to the measurements, by least squares of the *relative* errors.

    Absolute errors would leave α to chance: an error of 1 % on the largest tensor is more than all of the time of the smallest.
    Measure sizes from some bytes, where α is all there is, to some MB.

    Raises:
        UserError: a time that is not positive; or all measurements say the same of α and β, as those of one size do.
    """
    rows = []
    for one in measurements:
        if not one.seconds > 0:
            raise UserError(f"{one.algorithm.value} of {one.bytes} bytes took {one.seconds} s: leave out what was not measured")
        # messages / seconds * α + bytes / seconds * β = 1
        rows.append((one.algorithm.messages(one.ranks) / one.seconds, one.algorithm.share(one.ranks) * one.bytes / one.seconds))
    mm, mb, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    m, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = mm * bb - mb * mb
    if determinant <= 1e-12 * mm * bb:
        raise UserError("α and β cannot be told apart by these measurements: measure a small and a large size on 2 or more ranks")
    alpha, beta = (m * bb - b * mb) / determinant, (mm * b - mb * m) / determinant
    if alpha < 0:
        return AlphaBeta(0.0, b / bb)
    if beta < 0:
        return AlphaBeta(m / mm, 0.0)
    return AlphaBeta(alpha, beta)
