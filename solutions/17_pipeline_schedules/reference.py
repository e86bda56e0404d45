"""The library's own implementation under the names of this lab: what ``lab.use_reference("question")`` gives a stuck student."""

from __future__ import annotations

from dlo_lib.parallel.pipeline import schedules
from dlo_lib.parallel.pipeline.simulate import Costs, simulate
from dlo_lib.parallel.pipeline.table import Schedule


def naive_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """One micro-batch down and back before the next."""
    return _cells(schedules.naive(ranks, micro_batches))


def afab_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """All forwards, then all backwards."""
    return _cells(schedules.afab(ranks, micro_batches))


def one_f_one_b_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """One forward, one backward in turns."""
    return _cells(schedules.one_f_one_b(ranks, micro_batches))


def interleaved_rows(ranks: int, micro_batches: int, per_rank: int) -> list[list[str]]:
    """1F1B with several stages a rank."""
    return _cells(schedules.interleaved(ranks, micro_batches, per_rank))


def held(schedule: str, ranks: int, micro_batches: int, per_rank: int, rank: int) -> float:
    """The most that a rank holds, in activations of one micro-batch on all its layers."""
    table = _made(schedule, ranks, micro_batches, per_rank)
    return simulate(table).in_flight()[rank] * ranks / table.stages


def zb_h1_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    """1F1B with the weight part of the backward put off."""
    return _cells(schedules.zb_h1(ranks, micro_batches))


def waiting(
    schedule: str, ranks: int, micro_batches: int, per_rank: int, forward: float, input_gradient: float, weight_gradient: float
) -> float:
    """How long a rank waits in a step."""
    table = _made(schedule, ranks, micro_batches, per_rank)
    share = ranks / table.stages
    return max(simulate(table, Costs(share * forward, share * input_gradient, share * weight_gradient)).bubble)


def _made(name: str, ranks: int, micro_batches: int, per_rank: int) -> Schedule:
    if name == "interleaved":
        return schedules.interleaved(ranks, micro_batches, per_rank)
    makers = {"naive": schedules.naive, "AFAB": schedules.afab, "1F1B": schedules.one_f_one_b, "ZB-H1": schedules.zb_h1}
    return makers[name](ranks, micro_batches)


def _cells(table: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in table.rows]


REFERENCE = {
    "naive": {"naive_rows": naive_rows},
    "afab": {"afab_rows": afab_rows},
    "one_f_one_b": {"one_f_one_b_rows": one_f_one_b_rows},
    "interleaved": {"interleaved_rows": interleaved_rows},
    "memory": {"held": held},
    "zb_h1": {"zb_h1_rows": zb_h1_rows},
    "bubble": {"waiting": waiting},
}
