"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

import torch
from torch import Tensor

from dlo_lib.comm.collectives import Algorithm, Measurement, all_gather, all_to_all, broadcast, cost, crossover, fit_alpha_beta, reduce
from dlo_lib.comm.collectives import all_reduce as all_reduce_
from dlo_lib.comm.collectives.messages import Place, Reduction
from dlo_lib.comm.collectives.ring import _reduced, _spread

ALGORITHMS = {"ring": Algorithm.RING_ALL_REDUCE, "tree": Algorithm.TREE_ALL_REDUCE}


def estimate_pi(points: Tensor) -> float:
    """From the counts of all ranks."""
    counts = torch.tensor([float((points.square().sum(1) <= 1).sum()), len(points)], dtype=torch.float64)
    all_reduce_(counts)
    return float(4 * counts[0] / counts[1])


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int) -> None:
    """Both at once."""
    Place.of(None).exchange(outgoing, to, incoming, source)


def ring_reduce_scatter(tensor: Tensor) -> Tensor:
    """This rank's chunk of the sum."""
    place = Place.of(None)
    return _reduced(tensor.tensor_split(place.ranks), Reduction.SUM, place)


def ring_all_gather(chunk: Tensor, size: int) -> Tensor:
    """All chunks."""
    place = Place.of(None)
    whole = chunk.new_empty(size)
    chunks = whole.tensor_split(place.ranks)
    chunks[place.rank].copy_(chunk)
    _spread(chunks, place)
    return whole


def ring_all_reduce(tensor: Tensor) -> Tensor:
    """The sum on every rank."""
    total = tensor.clone()
    all_reduce_(total)
    return total


def tree_broadcast(tensor: Tensor, root: int) -> None:
    """The tensor of ``root`` on every rank."""
    broadcast(tensor, root)


def tree_reduce(tensor: Tensor) -> Tensor | None:
    """The sum on rank 0."""
    return reduce(tensor)


def everyone_to_everyone(parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Part r goes to rank r."""
    received = [parts[0].new_empty(size) for size in sizes]
    all_to_all(received, parts)
    return received


def predicted_seconds(algorithm: str, size: float, ranks: int, alpha: float, beta: float) -> float:
    """The model's cost."""
    return cost(ALGORITHMS[algorithm], size, ranks, alpha, beta)


def fit_link(timings: list[tuple[str, int, int, float]]) -> tuple[float, float]:
    """Alpha and beta."""
    link = fit_alpha_beta(Measurement(ALGORITHMS[name], size, ranks, seconds) for name, size, ranks, seconds in timings)
    return link.alpha, link.beta


def crossover_bytes(ranks: int, alpha: float, beta: float) -> float | None:
    """Where both cost the same."""
    return crossover(*ALGORITHMS.values(), ranks, alpha, beta)


REFERENCE = {
    "pi": {"estimate_pi": estimate_pi},
    "exchange": {"exchange": exchange},
    "scatter": {"ring_reduce_scatter": ring_reduce_scatter},
    "gather": {"ring_all_gather": ring_all_gather},
    "ring": {"ring_all_reduce": ring_all_reduce},
    "broadcast": {"tree_broadcast": tree_broadcast},
    "reduce": {"tree_reduce": tree_reduce},
    "everyone": {"everyone_to_everyone": everyone_to_everyone},
    "cost": {"predicted_seconds": predicted_seconds},
    "fit": {"fit_link": fit_link},
    "crossover": {"crossover_bytes": crossover_bytes},
}
