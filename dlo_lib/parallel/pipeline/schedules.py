"""The pipeline schedules of the literature. Each function returns a table, and ``SCHEDULES`` lists all.

Notation: p ranks, m micro-batches, v stages per rank; F is the time of the forward, I and W are those of the
input and weight part of the backward, and B = I + W. All stages have equal costs and sends take no time.
*Bubble* is the longest waiting time of a rank. *In flight* is the largest number of micro-batches whose
activations rank r holds, from forward to input gradient, each for 1/v of the layers of the rank.

================  ===================  ===============================  =====================================
schedule          bubble               in flight on rank r              paper
================  ===================  ===============================  =====================================
naive             m (p-1)(F+B)         1
AFAB              (p-1)(F+B)           m                                GPipe, arXiv:1811.06965
1F1B              (p-1)(F+B)           min(m, p-r)                      PipeDream-Flush, arXiv:2006.09503
interleaved 1F1B  (p-1)(F+B)/v         min(m v, (v-1)g + 2(p-r-1) + 1)  Megatron-LM, arXiv:2104.04473; m >= p
ZB-H1             (p-1)(F+I-W)         min(m, p-r)                      arXiv:2401.10241; m >= p
ZB-H2             (p-1)(F+I-2W)        min(m, 2(p-r)-1)                 arXiv:2401.10241; m >= 2p-1; see below
ZB-V              0 if F = I = W       2p                               arXiv:2405.15362; m >= 2p; see below
DualPipe-V        (p-1) F, F = I = W   2p + 1                           arXiv:2412.19437; m >= 2p; see below
================  ===================  ===============================  =====================================

The bubbles of the last three schedules are between the first and the last action of a rank. F, I and W are
the times of one stage: of half the layers of a rank for ZB-V and DualPipe-V, and of 1/v in the simulation of
interleaved 1F1B. The tests verify every entry with its conditions. A table does not depend on the costs of
its actions.

For interleaved 1F1B, micro-batches pass through the stages of a rank in groups of size g. If p divides m, g =
p. Megatron-LM requires this, because groups of p and a remainder have a larger bubble (p=4, v=2, m=6: 0.53 of
the ideal time instead of 0.25). Groups of nearly equal size have the bubble of the table for every m >= p;
the cost is memory, because g = ceil(m / floor(m/p)), which is at most 2p - 1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dlo_lib.base.errors import UserError
from dlo_lib.parallel.pipeline.table import (
    Action,
    ActionKind,
    B,
    F,
    I,
    Schedule,
    ScheduleKind,
    W,
    in_a_loop,
    in_a_v,
)

Row = tuple[Action, ...]


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Model parallelism without a pipeline: the forward and backward of a micro-batch complete on all ranks
    before the next micro-batch begins."""
    _check(ranks, micro_batches)
    return _same_stage("naive", ranks, micro_batches, lambda rank: _pairs(rank, range(micro_batches)))


def afab(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, as in GPipe. A rank holds the activations of every micro-batch."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        yield from (Action(F, rank, micro_batch) for micro_batch in range(micro_batches))
        yield from (Action(B, rank, micro_batch) for micro_batch in range(micro_batches))

    return _same_stage("AFAB", ranks, micro_batches, row)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward: after the warm-up, a rank alternates between the two. The bubble is that of
    AFAB, with at most p micro-batches in memory."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        ahead = min(ranks - rank - 1, micro_batches)  # the forwards of the warm-up
        yield from (Action(F, rank, micro_batch) for micro_batch in range(ahead))
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                yield Action(F, rank, done + ahead)
            yield Action(B, rank, done)

    return _same_stage("1F1B", ranks, micro_batches, row)


def interleaved(ranks: int, micro_batches: int, per_rank: int) -> Schedule:
    """1F1B with v smaller stages per rank: the warm-up is v times shorter, and v times as many bytes are
    sent.

    The micro-batches pass through the stages of a rank in groups of nearly equal size, at least p.

    Args:
        per_rank: the number of stages per rank, v.
    """
    _check(ranks, micro_batches, per_rank)
    groups = list(_groups(micro_batches, max(1, micro_batches // ranks)))
    total = micro_batches * per_rank

    def row(rank: int) -> Iterator[Action]:
        stages = [rank + ranks * chunk for chunk in range(per_rank)]
        forwards = [
            Action(F, stage, micro_batch) for group in groups for stage in stages for micro_batch in group
        ]
        last_first = stages[::-1]
        backwards = [
            Action(B, stage, micro_batch) for group in groups for stage in last_first for micro_batch in group
        ]
        ahead = min(total, (per_rank - 1) * max(map(len, groups)) + 2 * (ranks - rank - 1))
        yield from forwards[:ahead]
        for done in range(total):
            yield from forwards[done + ahead : done + ahead + 1]
            yield backwards[done]

    return Schedule("interleaved 1F1B", in_a_loop(ranks, per_rank), micro_batches, _rows(ranks, row))


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with a split backward: the input part runs immediately, and the weight part is deferred to a time
    that would be bubble.

    Rank r defers r weight parts. The memory of activations is that of 1F1B.
    """
    return _zero_bubble("ZB-H1", ranks, micro_batches, 1)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1 with more forwards in the warm-up: no bubble if F + I = 2W, with up to twice the activations of
    1F1B."""
    return _zero_bubble("ZB-H2", ranks, micro_batches, 2)


def _zero_bubble(name: str, ranks: int, micro_batches: int, depth: int) -> Schedule:
    """``depth`` forwards in the warm-up for each rank after this one, and ``depth`` deferred weight parts for
    each rank before it."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        ahead = min(depth * (ranks - rank - 1), micro_batches)
        deferred = min(depth * rank, micro_batches)
        yield from (Action(F, rank, micro_batch) for micro_batch in range(ahead))
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                yield Action(F, rank, done + ahead)
            yield Action(I, rank, done)
            if done >= deferred:
                yield Action(W, rank, done - deferred)
        rest = range(micro_batches - deferred, micro_batches)
        yield from (Action(W, rank, micro_batch) for micro_batch in rest)

    return _same_stage(name, ranks, micro_batches, row)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages per rank, placed in a V: no bubble if F = I = W, and every rank holds the activations of the
    first rank of 1F1B.

    The forwards of a micro-batch end on the rank where they began, so that the backwards begin on all ranks
    at about the same time.
    """
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        down, up = rank, 2 * ranks - 1 - rank
        # The pattern needs at least 2p micro-batches. The actions of those that do not exist are removed
        # below.
        make = _ActionCounter(max(micro_batches, 2 * ranks))
        cells = [make(F, down) for _ in range(2 * (ranks - rank) - 1)]
        for _ in range(rank):
            cells += [make(F, up), make(F, down)]
        for _ in range(ranks - rank):
            cells += [make(F, up), make(I, up), make(W, up)]
        while make.left(F, up):
            cells += [make(F, down)] if make.left(F, down) else []
            cells += [make(I, down), make(W, down), make(F, up), make(I, up), make(W, up)]
        for _ in range(rank):
            cells += [make(I, down), make(I, up)]
        for _ in range(ranks - rank):
            cells += [make(I, down), make(W, down)]
        for stage in (up, down):
            cells += [make(W, stage) for _ in range(make.left(W, stage))]
        return iter([cell for cell in cells if cell.micro_batch < micro_batches])

    return Schedule("ZB-V", in_a_v(ranks), micro_batches, _rows(ranks, row))


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """The placement of ZB-V, with whole backwards next to forwards of the other stage of the rank. The
    computation of one can overlap with the communication of the other.

    This is one half of DualPipe (arXiv:2412.19437; github.com/deepseek-ai/DualPipe). A runtime may execute a
    forward and the following backward together; this table has one action per cell.
    """
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1
        total = max(micro_batches, 2 * ranks)
        make = _ActionCounter(total)
        deferred: deque[Action] = deque()
        cells = [make(F, down) for _ in range(2 * after)]
        for _ in range(rank + 1):
            cells += [make(F, down), make(F, up)]
        for _ in range(after):
            cells += [*make.parts(up), make(F, up)]
        for _ in range(total - 2 * ranks + rank + 1):
            cells += [make(F, down), make(B, up), make(F, up), make(B, down)]
        for _ in range(after):
            cells += [make(B, up), make(F, up), make(B, down)]
        for number in range(2 * (rank + 1)):
            stage = down if number % 2 else up
            if number < rank + 1:
                cells.append(make(B, stage))
            else:  # defer the weight parts to the end, which would be bubble
                inputs, weights = make.parts(stage)
                cells.append(inputs)
                deferred.append(weights)
        for _ in range(after):
            inputs, weights = make.parts(down)
            deferred.append(weights)
            cells += [deferred.popleft(), inputs]
        cells += deferred
        return iter([cell for cell in cells if cell.micro_batch < micro_batches])

    return Schedule("DualPipe-V", in_a_v(ranks), micro_batches, _rows(ranks, row))


class _ActionCounter:
    """Returns the next action of a kind on a stage, with micro-batches in order. A whole backward and an
    input part use the same counter."""

    def __init__(self, micro_batches: int) -> None:
        self._total = micro_batches
        self._made: Counter[tuple[ActionKind, int]] = Counter()

    def __call__(self, kind: ActionKind, stage: int) -> Action:
        counted = I if kind is B else kind
        self._made[counted, stage] += 1
        return Action(kind, stage, self._made[counted, stage] - 1)

    def parts(self, stage: int) -> tuple[Action, Action]:
        """Return the input part and the weight part of the next backward."""
        inputs = self(I, stage)
        return inputs, Action(W, stage, inputs.micro_batch)

    def left(self, kind: ActionKind, stage: int) -> int:
        return self._total - self._made[kind, stage]


def _same_stage(
    name: str, ranks: int, micro_batches: int, row: Callable[[int], Iterator[Action]]
) -> Schedule:
    return Schedule(name, in_a_loop(ranks), micro_batches, _rows(ranks, row))


def _rows(ranks: int, row: Callable[[int], Iterator[Action]]) -> tuple[Row, ...]:
    return tuple(tuple(row(rank)) for rank in range(ranks))


def _pairs(stage: int, micro_batches: range) -> Iterator[Action]:
    for micro_batch in micro_batches:
        yield Action(F, stage, micro_batch)
        yield Action(B, stage, micro_batch)


def _groups(micro_batches: int, number: int) -> Iterator[range]:
    """Cut the micro-batches into ``number`` groups of nearly equal size."""
    for group in range(number):
        yield range(group * micro_batches // number, (group + 1) * micro_batches // number)


def _check(ranks: int, micro_batches: int, per_rank: int = 1) -> None:
    for name, value in (("ranks", ranks), ("micro-batches", micro_batches), ("stages a rank", per_rank)):
        if value < 1:
            raise UserError(f"a pipeline has {value} {name}: use at least 1")


def _drain(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    return (p - 1) * (f + i + w)


def _less_two_weights(p: Any, m: Any, v: Any, f: Any, i: Any, w: Any) -> Any:
    return (p - 1) * np.maximum(f + i - 2 * w, 0) / v


def _one_for_each_later_rank(p: Any, m: Any, v: Any, r: Any) -> Any:
    return np.minimum(m, p - r)


def _of_groups(p: Any, m: Any, v: Any, r: Any) -> Any:
    group = -(-m // np.maximum(m // p, 1))
    return np.minimum(m * v, (v - 1) * group + 2 * (p - r - 1) + 1)


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule of the table above. Its formulas take numbers or arrays of one shape.

    Attributes:
        make: creates the table, from p and m.
        bubble: the longest waiting time of a rank, from p, m, v, F, I and W; here F, I and W are the times of
            one micro-batch on all stages of a rank.
        in_flight: the micro-batches in flight, from p, m, v and r.
        inside: whether the bubble is the waiting between the first and the last action of a rank.
    """

    make: Callable[[int, int], Schedule]
    bubble: Callable[..., Any]
    in_flight: Callable[..., Any]
    inside: bool = False


SCHEDULES: Mapping[ScheduleKind, ScheduleEntry] = {
    ScheduleKind.NAIVE: ScheduleEntry(
        naive, lambda p, m, v, f, i, w: m * _drain(p, m, v, f, i, w), lambda p, m, v, r: 1
    ),
    ScheduleKind.AFAB: ScheduleEntry(afab, _drain, lambda p, m, v, r: m),
    ScheduleKind.ONE_F_ONE_B: ScheduleEntry(one_f_one_b, _drain, _one_for_each_later_rank),
    # With groups of nearly equal size, interleaved 1F1B has this bubble for every m >= p.
    ScheduleKind.INTERLEAVED: ScheduleEntry(
        partial(interleaved, per_rank=2),
        lambda p, m, v, f, i, w: _drain(p, m, v, f, i, w) / v,
        _of_groups,
    ),
    ScheduleKind.ZB_H1: ScheduleEntry(
        zb_h1, lambda p, m, v, f, i, w: (p - 1) * (f + i - w), _one_for_each_later_rank
    ),
    ScheduleKind.ZB_H2: ScheduleEntry(
        zb_h2, _less_two_weights, lambda p, m, v, r: np.minimum(m, 2 * (p - r) - 1), inside=True
    ),
    ScheduleKind.ZB_V: ScheduleEntry(
        zb_v, _less_two_weights, lambda p, m, v, r: np.minimum(v * m, 2 * p), inside=True
    ),
    ScheduleKind.DUALPIPE_V: ScheduleEntry(
        dualpipe_v,
        lambda p, m, v, f, i, w: (p - 1) * f / v,
        lambda p, m, v, r: np.minimum(v * m, 2 * p + 1),
        inside=True,
    ),
}


def make_schedule(kind: ScheduleKind, ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule of this kind. Interleaved 1F1B has two stages per rank.

    Raises:
        UserError: a size is below 1.
    """
    return SCHEDULES[kind].make(ranks, micro_batches)
