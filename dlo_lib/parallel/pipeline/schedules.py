"""The schedules of the field, each a function that makes its table.

With p ranks, m micro-batches, v stages a rank, F the forward, I and W the backward's input and weight part (B = I + W), equal stages and
free sends. *Bubble* is the most that a rank waits; *in flight* counts micro-batches that rank r holds activations of, from forward to
input gradient, each for 1/v of the rank's layers:

================  =====================  =======================================  ==========================================
schedule          bubble                 in flight on rank r                      paper
================  =====================  =======================================  ==========================================
naive             m (p-1)(F+B)           1
AFAB              (p-1)(F+B)             m                                        GPipe, arXiv:1811.06965
1F1B              (p-1)(F+B)             min(m, p-r)                              PipeDream-Flush, arXiv:2006.09503; DAPPLE
interleaved 1F1B  (p-1)(F+B)/v           min(m v, (v-1)g + 2(p-r-1) + 1)          Megatron-LM, arXiv:2104.04473; m >= p; g below
ZB-H1             (p-1)(F+I-W)           min(m, p-r)                              zero bubble, arXiv:2401.10241; m >= p
ZB-H2             (p-1)(F+I-2W)          min(m, 2(p-r)-1)                         the same; m >= 2p-1, between a rank's first and last
ZB-V              0 where F = I = W      2p                                       arXiv:2405.15362; the same, m >= 2p
DualPipe-V        (p-1) F, F = I = W     2p + 1                                   arXiv:2412.19437; the same, m >= 2p
================  =====================  =======================================  ==========================================

F, I and W are those of one stage, so of half a rank's layers in the last two, and of 1/v in the interleaved row's simulation. The tests
prove every entry, with its conditions. A table does not depend on what its actions cost.

g is the size of the groups in which micro-batches go round the ranks: p where p divides m. Megatron-LM asks for that, because groups of p
and a rest leave a larger bubble (p=4, v=2, m=6: 0.53 of the ideal time, not 0.25); groups as equal as can be keep the formula's bubble for
every m >= p, and pay with g = ceil(m / floor(m/p)), so up to 2p - 1, in memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator

from dlo_lib.errors import UserError
from dlo_lib.parallel.pipeline.table import Action, ActionKind, B, F, I, Schedule, W, in_a_loop, in_a_v

Row = tuple[Action, ...]


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Model parallelism without a pipeline: one micro-batch goes all the way down and back before the next begins."""
    _check(ranks, micro_batches)
    return _same_stage("naive", ranks, micro_batches, lambda rank: _pairs(rank, range(micro_batches)))


def afab(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, as GPipe: simple, and holds every micro-batch."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        yield from (Action(F, rank, micro_batch) for micro_batch in range(micro_batches))
        yield from (Action(B, rank, micro_batch) for micro_batch in range(micro_batches))

    return _same_stage("AFAB", ranks, micro_batches, row)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turns once the pipeline is full: AFAB's bubble with at most p micro-batches in memory."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        ahead = min(ranks - rank - 1, micro_batches)  # forwards before the first backward can come
        yield from (Action(F, rank, micro_batch) for micro_batch in range(ahead))
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                yield Action(F, rank, done + ahead)
            yield Action(B, rank, done)

    return _same_stage("1F1B", ranks, micro_batches, row)


def interleaved(ranks: int, micro_batches: int, per_rank: int) -> Schedule:
    """1F1B with several thinner stages a rank: the pipeline fills v times as fast, and v times as much is sent.

    Micro-batches go through a rank's stages in groups of p, or a little more, as equal as can be.
    """
    _check(ranks, micro_batches, per_rank)
    groups = list(_groups(micro_batches, max(1, micro_batches // ranks)))
    total = micro_batches * per_rank

    def row(rank: int) -> Iterator[Action]:
        stages = [rank + ranks * chunk for chunk in range(per_rank)]
        forwards = [Action(F, stage, micro_batch) for group in groups for stage in stages for micro_batch in group]
        backwards = [Action(B, stage, micro_batch) for group in groups for stage in reversed(stages) for micro_batch in group]
        ahead = min(total, (per_rank - 1) * max(map(len, groups)) + 2 * (ranks - rank - 1))
        yield from forwards[:ahead]
        for done in range(total):
            yield from forwards[done + ahead : done + ahead + 1]
            yield backwards[done]

    return Schedule("interleaved 1F1B", in_a_loop(ranks, per_rank), micro_batches, _rows(ranks, row))


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose backward is split: the input part goes at once, the weight part waits until it fills what would be bubble.

    Rank r leaves r weight parts open; the memory of activations is 1F1B's.
    """
    return _zero_bubble("ZB-H1", ranks, micro_batches, 1)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1 with the warm-up filled with forwards too: no bubble where F + I = 2W, for up to twice the activations."""
    return _zero_bubble("ZB-H2", ranks, micro_batches, 2)


def _zero_bubble(name: str, ranks: int, micro_batches: int, depth: int) -> Schedule:
    """``depth`` forwards and ``depth`` open weight parts for each rank after, and before, this one."""
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        ahead = min(depth * (ranks - rank - 1), micro_batches)
        open_weights = min(depth * rank, micro_batches)
        yield from (Action(F, rank, micro_batch) for micro_batch in range(ahead))
        for done in range(micro_batches):
            if done + ahead < micro_batches:
                yield Action(F, rank, done + ahead)
            yield Action(I, rank, done)
            if done >= open_weights:
                yield Action(W, rank, done - open_weights)
        yield from (Action(W, rank, micro_batch) for micro_batch in range(micro_batches - open_weights, micro_batches))

    return _same_stage(name, ranks, micro_batches, row)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages a rank, down and up again in a V: no bubble where F = I = W, and every rank holds what 1F1B's first rank does.

    The wave of forwards comes back to the rank it started from, so backwards begin on all ranks at about the same time.
    """
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        down, up = rank, 2 * ranks - 1 - rank
        make = _Counted(max(micro_batches, 2 * ranks))  # the pattern needs so many; those that do not exist are left out below
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
    """ZB-V's placement with whole backwards next to forwards of the other stage, so that one can hide the other's communication.

    As in DeepSeek's DualPipe cut in half (arXiv:2412.19437; github.com/deepseek-ai/DualPipe). A forward and the backward after it may run
    as one, which this table, with one action a cell, leaves to the runtime.
    """
    _check(ranks, micro_batches)

    def row(rank: int) -> Iterator[Action]:
        down, up, after = rank, 2 * ranks - 1 - rank, ranks - rank - 1
        total = max(micro_batches, 2 * ranks)
        make = _Counted(total)
        open_weights: deque[Action] = deque()
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
            else:  # from here on weight parts are kept for the end, where there would be bubble
                inputs, weights = make.parts(stage)
                cells.append(inputs)
                open_weights.append(weights)
        for _ in range(after):
            inputs, weights = make.parts(down)
            open_weights.append(weights)
            cells += [open_weights.popleft(), inputs]
        cells += open_weights
        return iter([cell for cell in cells if cell.micro_batch < micro_batches])

    return Schedule("DualPipe-V", in_a_v(ranks), micro_batches, _rows(ranks, row))


class _Counted:
    """Makes the next action of a kind on a stage: micro-batches in their order, whole backwards and parts counted together."""

    def __init__(self, micro_batches: int) -> None:
        self._total = micro_batches
        self._made: Counter[tuple[ActionKind, int]] = Counter()

    def __call__(self, kind: ActionKind, stage: int) -> Action:
        counted = I if kind is B else kind
        self._made[counted, stage] += 1
        return Action(kind, stage, self._made[counted, stage] - 1)

    def parts(self, stage: int) -> tuple[Action, Action]:
        """A backward in two."""
        inputs = self(I, stage)
        return inputs, Action(W, stage, inputs.micro_batch)

    def left(self, kind: ActionKind, stage: int) -> int:
        return self._total - self._made[kind, stage]


def _same_stage(name: str, ranks: int, micro_batches: int, row: Callable[[int], Iterator[Action]]) -> Schedule:
    return Schedule(name, in_a_loop(ranks), micro_batches, _rows(ranks, row))


def _rows(ranks: int, row: Callable[[int], Iterator[Action]]) -> tuple[Row, ...]:
    return tuple(tuple(row(rank)) for rank in range(ranks))


def _pairs(stage: int, micro_batches: range) -> Iterator[Action]:
    for micro_batch in micro_batches:
        yield Action(F, stage, micro_batch)
        yield Action(B, stage, micro_batch)


def _groups(micro_batches: int, number: int) -> Iterator[range]:
    """Cut into ``number`` runs as equal as can be."""
    for group in range(number):
        yield range(group * micro_batches // number, (group + 1) * micro_batches // number)


def _check(ranks: int, micro_batches: int, per_rank: int = 1) -> None:
    for name, value in (("ranks", ranks), ("micro-batches", micro_batches), ("stages a rank", per_rank)):
        if value < 1:
            raise UserError(f"a pipeline has {value} {name}: use at least 1")
