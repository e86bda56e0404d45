"""What the checks compare with, the library's tables and costs, and the sizes that they draw."""

from __future__ import annotations

from dlo_lib.grading.twins import twin
from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.simulate import Costs
from dlo_lib.parallel.pipeline.table import Schedule

MAKERS = {
    "naive": schedules.naive,
    "AFAB": schedules.afab,
    "1F1B": schedules.one_f_one_b,
    "ZB-H1": schedules.zb_h1,
    "ZB-H2": schedules.zb_h2,
}


@twin
def known(name: str, ranks: int, micro_batches: int, per_rank: int = 1) -> Schedule:
    """The library's table."""
    return schedules.interleaved(ranks, micro_batches, per_rank) if name == "interleaved" else MAKERS[name](ranks, micro_batches)


def shared(forward: float, input_gradient: float, weight_gradient: float, per_rank: int = 1) -> Costs:
    """Costs of a stage that is one of ``per_rank`` equal ones; those given are of all layers of a rank."""
    return Costs(forward / per_rank, input_gradient / per_rank, weight_gradient / per_rank)


# -- what is drawn


def size(t, most_ranks: int = 5) -> tuple[int, int]:
    """Ranks, and micro-batches that keep them all at work."""
    ranks = t.integer(2, most_ranks)
    return ranks, ranks + t.integer(1, 6)


def many(t) -> tuple[int, int]:
    """More ranks, with many micro-batches for each."""
    return t.integer(6, 8), t.integer(12, 20)


def groups(t, fewest: int = 2) -> tuple[int, int]:
    """Ranks, and a multiple of them."""
    ranks = t.integer(2, 4)
    return ranks, ranks * t.integer(fewest, fewest + 2)


def three(t) -> tuple[float, float, float]:
    """F, I and W of a rank's layers, with W the smallest."""
    return t.uniform(0.8, 1.2), t.uniform(1.0, 1.5), t.uniform(0.5, 0.8)


def contest_case(t, ranks: int, micro_batches: int, cap: float) -> dict:
    """Costs as the contest gives them: nearly equal parts, with and without a price on sending."""
    costs = {"forward": 1.0, "input_gradient": t.uniform(0.95, 1.05), "weight_gradient": t.uniform(0.9, 1.0), "send": t.choice([0.0, 0.02])}
    return {"ranks": ranks, "micro_batches": micro_batches, "cap": cap, "costs": costs}
